"""Shared-prompt attention: the K responses to a prompt are one row that holds the prompt once.

Where this departs from stock transformers:
1. A packed row is `p1 r11 .. r1K p2 r21 ..`. Each response continues from its own prompt's end, so
   position ids restart; a stock implementation would take the restart for a new document and cut
   the responses off from their prompt, silently. Only the functions below may see a packed row.
2. `shared` (the default) never computes a response-to-response block: causal attention over the
   prompts, then each response against [its prompt, itself], which costs P*P + K*R*(P + R) pairs.
   `dense` runs the T x T mask that *defines* the idea; with long responses it is slower than no
   sharing at all, and is kept as the oracle and the ablation.
3. Decoding runs through the same registered function, against key/value slots of fixed size.

    pack(prompts, responses) -> Packed -> attach(model, kind)'s model(packed=...) -> hidden states
"""
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# One mask must serve all layers. Add an architecture once tests/test_attention.py holds for it.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
GROUPED = ("cpu", "npu")  # devices whose fused kernels take grouped queries, see _fused


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, launched: from memory of the host that is not pinned, the host would
    wait until the device has done all it has to do."""
    to_pin = x.device.type == "cpu" and device.type != "cpu"
    return (x.pin_memory() if to_pin else x).to(device, non_blocking=True)


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one row, and the indices attention needs. Made by `pack`, on the host."""
    input_ids: Tensor          # (1, T)
    position_ids: Tensor       # (1, T)
    predictors: Tensor         # (A,) the place whose hidden state predicts a response token
    targets: Tensor            # (A,) that token
    response_of: Tensor        # (A,) the response it belongs to, 0 .. N-1
    lengths: Tensor            # (N,) tokens of each response
    group_of_place: Tensor     # (T,) the prompt of a place; padding is a group of its own
    response_of_place: Tensor  # (T,) the response of a place, -1 in a prompt
    prompt_of: Tensor          # (N,) the prompt of each response, 0 .. G-1
    prompt_lengths: Tensor     # (G,)
    prompt_places: Tensor      # (G, longest prompt) places, filled up with 0
    response_places: Tensor    # (N, longest response)
    restore: Tensor            # (T,) where a place went in [prompt_places, response_places]

    def to(self, device) -> "Packed":
        """From the host: copies between devices would wait for all that the first has to do."""
        return Packed(*(upload(getattr(self, f.name), torch.device(device)) for f in fields(self)))

    def cost(self) -> dict[str, int]:
        """Tokens, and query-key pairs that may attend: here, and with a prompt a response."""
        prompt, response = self.prompt_lengths, self.lengths
        own, triangle = prompt[self.prompt_of], lambda n: n * (n + 1) // 2
        return {"tokens_shared": int(prompt.sum() + response.sum()),
                "tokens_repeated": int((own + response).sum()),
                "pairs_shared": int(triangle(prompt).sum() + triangle(response).sum()
                                    + (response * own).sum()),
                "pairs_repeated": int(triangle(own + response).sum())}

    @cached_property
    def dense_mask(self) -> Tensor:
        return shared_prompt_mask(self)[None, None]  # (1, 1, T, T)

    @cached_property
    def response_mask(self) -> Tensor:
        """(N, 1, R, P + R) bool: a token sees its whole prompt and its own response so far.
        No row is empty, not even padding's: a softmax over nothing would be NaN."""
        (n, r), p = self.response_places.shape, self.prompt_places.shape[1]
        device = self.restore.device
        in_prompt = torch.arange(p, device=device) < self.prompt_lengths[self.prompt_of, None]
        so_far = torch.ones(r, r, dtype=torch.bool, device=device).tril()
        return torch.cat([in_prompt[:, None].expand(n, r, p), so_far.expand(n, r, r)], 2)[:, None]


def pack(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]], *,
         share: bool = True, multiple: int = 1) -> Packed:
    """Lay G prompts and their responses (for each prompt a list of lists of ids) end to end, once.
    `share=False` gives every response its own copy of its prompt: the baseline, same results.
    `multiple` fills up T and the lengths inside attention: with 8 the bits of a pass on a CPU do
    not depend on the number of threads. A prompt may have no responses.
    Raises ValueError for an empty prompt or response."""
    if not share:
        prompts, responses = ([p for p, samples in zip(prompts, responses, strict=True)
                               for _ in samples], [[r] for samples in responses for r in samples])
    pieces = [piece for prompt, samples in zip(prompts, responses, strict=True)
              for piece in (prompt, *samples)]
    length = np.array([len(piece) for piece in pieces])
    if not length.all():
        raise ValueError("a prompt or response without tokens cannot be packed")
    # Of each piece: is it a prompt, which group, which response, where it starts, its own prompt.
    is_prompt = np.array([i == 0 for samples in responses for i in range(len(samples) + 1)])
    group, number = is_prompt.cumsum() - 1, (~is_prompt).cumsum() - 1
    start, own = length.cumsum() - length, np.flatnonzero(is_prompt)[group]
    # Of each place: its piece, and how far it is from the piece's start.
    place = np.arange(length.sum())
    piece = np.repeat(np.arange(len(pieces)), length)
    offset = place - start[piece]
    position = offset + np.where(is_prompt, 0, length[own])[piece]
    # A response's first token is predicted by its prompt's last place, not by the place before it,
    # which for all responses but a prompt's first holds the end of another response.
    predictor = np.where(offset == 0, (start + length - 1)[own][piece], place - 1)
    in_response = ~is_prompt[piece]
    ids = np.concatenate([np.asarray(piece) for piece in pieces])

    groups, rows = len(prompts), int((~is_prompt).sum())
    width, response_width = (-(-max(length[which], default=0) // multiple) * multiple
                             for which in (is_prompt, ~is_prompt))
    first = np.where(is_prompt, group * width, groups * width + number * response_width)
    restore = first[piece] + offset
    table = np.zeros(groups * width + rows * response_width, dtype=np.int64)
    table[restore] = place
    filling = (0, -len(place) % multiple)
    # In the order of the fields of Packed.
    return Packed(*(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (
        np.pad(ids, filling)[None], np.pad(position, filling)[None], predictor[in_response],
        ids[in_response], number[piece][in_response], length[~is_prompt],
        np.pad(group[piece], filling, constant_values=groups),
        np.pad(np.where(is_prompt, -1, number)[piece], filling, constant_values=-1),
        group[~is_prompt], length[is_prompt], table[:groups * width].reshape(groups, width),
        table[groups * width:].reshape(rows, response_width), np.pad(restore, filling))))


def shared_prompt_mask(packed: Packed) -> Tensor:
    """The definition, (T, T) bool, True = may attend: an earlier place of the same group that is in
    the prompt or in the same response."""
    group, response = packed.group_of_place, packed.response_of_place
    place = torch.arange(len(group), device=group.device)
    visible = (response[None, :] == -1) | (response[:, None] == response[None, :])
    return (place[:, None] >= place[None, :]) & (group[:, None] == group[None, :]) & visible


class Slots:
    """Keys and values of the prompts and of the responses in flight, allocated once. A prompt's are
    stored once and read once a step, by all its responses together. A step works on the first slots
    and places that `aim_decode` set: a few static shapes, so that it can be captured as a graph."""

    def __init__(self, layers: int, rows: int, heads: int, prompt: int, response: int, size: int,
                 *, dtype: torch.dtype, device: torch.device):
        self.prompts, self.responses = (  # keys and values
            [torch.zeros(layers, rows, heads, places, size, dtype=dtype, device=device)
             for _ in range(2)] for places in (prompt, response))

    def aim(self, stored: Sequence[Tensor], slot: Tensor, place: Tensor) -> None:
        """Aim the next pass: token i is written to slot[i] and place[i] of prompts or responses."""
        self.stored, self.slot, self.place = stored, slot, place

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values, (n, heads, size), of the tokens that `aim` chose."""
        for stored, x in zip(self.stored, (key, value)):
            stored[layer][self.slot, :, self.place] = x[:len(self.slot)].to(stored.dtype)

    def aim_decode(self, lengths: Tensor, places: Tensor, slot: Tensor, lane: Tensor,
                   lanes: Tensor, widths: tuple[int, int]) -> None:
        """Aim a decode step. Row i has a prompt of lengths[i] tokens and writes its places[i];
        lanes (slots, K) are the rows that read each prompt slot: row i is lanes[slot[i], lane[i]].
        """
        self.aim(self.responses, torch.arange(len(places), device=places.device), places)
        self.lanes, self.widths = lanes, widths
        prompt, own = (torch.arange(width, device=places.device) for width in widths)
        hidden = torch.cat([prompt >= lengths[:, None], own > places[:, None]], 1)
        self.bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        # The same for rows split by key head: row and head of every (slot, head, lane), flattened,
        # and back. index_select copies whole (g, n) blocks; with x[lanes] attention takes 5 to 12 %
        # more on a CPU.
        heads, k = self.prompts[0].shape[2], lanes.shape[1]
        head = torch.arange(heads, device=places.device)
        self.to_lanes = (lanes[:, None, :] * heads + head[:, None]).flatten()
        self.to_rows = ((slot[:, None] * heads + head) * k + lane[:, None]).flatten()

    def _with_prompts(self, x: Tensor, stored: Tensor) -> Tensor:
        """x (rows, heads, g, n) @ what each row's prompt slot holds, (slots, heads, n, m): the rows
        of a prompt are multiplied together, so that it is read once. -> (rows, heads, g, m)"""
        rows, heads, g, n = x.shape
        x = x.flatten(0, 1).index_select(0, self.to_lanes)      # (slots * heads * K, g, n)
        x = x.view(len(self.lanes), heads, -1, n) @ stored      # (slots, heads, K * g, m)
        x = x.view(-1, g, x.shape[-1]).index_select(0, self.to_rows)
        return x.view(rows, heads, g, -1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor,
               scaling: float) -> Tensor:
        """Attention of one new token a row, (rows, heads, 1, size), to its prompt and its response.
        Written as matrix products over the g query heads of a key head: unlike one-query
        `scaled_dot_product_attention` its bits do not depend on threads."""
        self.write(layer, key[:, :, 0], value[:, :, 0])
        rows, heads, _, size = query.shape
        prompt_width, own_width = self.widths
        prompt_keys, prompt_values = (stored[layer, :len(self.lanes), :, :prompt_width]
                                      for stored in self.prompts)
        keys, values = (stored[layer, :rows, :, :own_width] for stored in self.responses)
        query = (query * scaling).view(rows, keys.shape[1], -1, size).to(keys.dtype)
        scores = torch.cat([self._with_prompts(query, prompt_keys.mT), query @ keys.mT], -1)
        # (rows, key heads, g, widths); in float32 before the softmax, as the bias is
        attention = (scores + self.bias[:, None, None]).softmax(-1).to(keys.dtype)
        of_prompt, of_own = attention.split(self.widths, -1)
        output = self._with_prompts(of_prompt, prompt_values) + of_own @ values
        return output.view(rows, 1, heads, size)


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """(1, heads, T, size) at places (B, L) -> (B, heads, L, size)."""
    rows = x[0].transpose(0, 1).index_select(0, places.flatten())
    return rows.view(*places.shape, *rows.shape[1:]).transpose(1, 2)


def _fused(query, key, value, scaling, **mask):
    """Grouped-query attention. CUDA's kernels for a mask or float32 know no grouped queries: there
    PyTorch would silently keep all scores of a layer, so keys and values are repeated."""
    if (queries := query.shape[1] // key.shape[1]) > 1 and query.device.type not in GROUPED:
        key, value = (x.repeat_interleave(queries, 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, scale=scaling, **mask,
                                        enable_gqa=key.shape[1] != query.shape[1])


def _shared(query, key, value, packed, scaling):
    """Causal attention over the prompts, then each response against [its prompt, itself]."""
    heads, size = query.shape[1], query.shape[3]
    # Prompts are filled up on the right, where a causal query never looks.
    prompt_key, prompt_value = (_gather(x, packed.prompt_places) for x in (key, value))
    outputs = [_fused(_gather(query, packed.prompt_places), prompt_key, prompt_value, scaling,
                      is_causal=True)]
    if n := len(packed.lengths):
        # The gradient of `expand` is a sum, that of `index_select` a slow scatter.
        prompts = [x.expand(n, -1, -1, -1) if len(x) == 1 else
                   x.index_select(0, packed.prompt_of) for x in (prompt_key, prompt_value)]
        both = [torch.cat([prompt, _gather(x, packed.response_places)], 2)
                for prompt, x in zip(prompts, (key, value))]
        outputs.append(_fused(_gather(query, packed.response_places), *both, scaling,
                              attn_mask=packed.response_mask))
    rows = torch.cat([o.transpose(1, 2).reshape(-1, heads, size) for o in outputs])
    return rows.index_select(0, packed.restore)[None]


def _dense(query, key, value, packed, scaling):
    return _fused(query, key, value, scaling, attn_mask=packed.dense_mask).transpose(1, 2)


def _attention(over_packed, module, query, key, value, attention_mask, scaling, packed=None,
               slots=None, **_):
    """Training: `packed` alone. Prefill: `packed` and `slots`. Decoding: `slots` alone."""
    if attention_mask is not None or (packed is None and slots is None):
        raise ValueError("an attached model takes packed= or slots=, and no attention mask")
    if packed is None:
        return slots.attend(module.layer_idx, query, key, value, scaling), None
    if slots is not None:
        slots.write(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
    return over_packed(query, key, value, packed, scaling), None  # (1, T, heads, size)


KINDS = {"shared": _shared, "dense": _dense}
# No entry in transformers' registry of mask functions: with one, every pass would first search its
# position ids for packed documents, which reads a value back to the host.
for _kind, _over_packed in KINDS.items():
    ALL_ATTENTION_FUNCTIONS.register(f"{_kind}_prompt", partial(_attention, _over_packed))


def refuse(config) -> None:
    """Raise ValueError, by name, for a model that one mask in all layers cannot serve."""
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"{config.model_type} is not among the supported architectures: "
                         f"{', '.join(ARCHITECTURES)}")
    narrower = ("sliding_window", "attention_chunk_size", "attn_logit_softcapping")
    found = [f"{name}={value}" for name in narrower if (value := getattr(config, name, None))]
    found += sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    found += [f"rope_type={rope}"] if rope in ("dynamic", "longrope") else []
    if found:
        raise ValueError(f"this {config.model_type} model has {', '.join(found)}: a shared prompt "
                         "needs full attention in every layer, at the same angles whatever the "
                         "length of a pass")


def attach(model, kind: str = "shared"):
    """Put an implementation into a transformers model, whose forward pass then takes `packed=` or
    `slots=`, and return the model. Raises ValueError for another kind (under `eager` attention a
    boolean mask would hide nothing, without an error) and for a model that `refuse` refuses."""
    if kind not in KINDS:
        raise ValueError(f"no attention named {kind!r}; there are {', '.join(KINDS)}")
    refuse(model.config)
    model.set_attn_implementation(f"{kind}_prompt")
    return model
