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
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KINDS = ("shared", "dense")
# One mask must serve all layers. Add an architecture once tests/test_attention.py holds for it.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one row, and the indices attention needs. Made by `pack`."""
    input_ids: torch.Tensor          # (1, T)
    position_ids: torch.Tensor       # (1, T)
    predictors: torch.Tensor         # (A,) the place whose hidden state predicts a response token
    targets: torch.Tensor            # (A,) that token
    response_of: torch.Tensor        # (A,) the response it belongs to, 0 .. N-1
    lengths: torch.Tensor            # (N,) tokens of each response
    group_of_place: torch.Tensor     # (T,) the prompt of a place; padding is a group of its own
    response_of_place: torch.Tensor  # (T,) the response of a place, -1 in a prompt
    prompt_of: torch.Tensor          # (N,) the prompt of each response, 0 .. G-1
    prompt_lengths: torch.Tensor     # (G,)
    prompt_places: torch.Tensor      # (G, longest prompt) places, filled up with 0
    response_places: torch.Tensor    # (N, longest response)
    restore: torch.Tensor            # (T,) where a place went in [prompt_places, response_places]

    def to(self, device) -> "Packed":
        return Packed(*(getattr(self, f.name).to(device, non_blocking=True)
                        for f in dataclasses.fields(self)))

    def cost(self) -> dict[str, int]:
        """Tokens, and query-key pairs that may attend: here, and with a prompt a response."""
        prompt, response = self.prompt_lengths, self.lengths
        own = prompt[self.prompt_of]  # (N,)
        return {"tokens_shared": int(prompt.sum() + response.sum()),
                "tokens_repeated": int((own + response).sum()),
                "pairs_shared": int((prompt * (prompt + 1) // 2).sum()
                                    + (response * own + response * (response + 1) // 2).sum()),
                "pairs_repeated": int(((own + response) * (own + response + 1) // 2).sum())}

    @cached_property
    def dense_mask(self) -> torch.Tensor:
        return shared_prompt_mask(self)[None, None]  # (1, 1, T, T)

    @cached_property
    def response_mask(self) -> torch.Tensor:
        """(N, 1, R, P + R) bool: a token sees its whole prompt and its own response so far.
        No row is empty, not even padding's: a softmax over nothing would be NaN."""
        p, r = self.prompt_places.shape[1], self.response_places.shape[1]
        device = self.restore.device
        in_prompt = torch.arange(p, device=device) < self.prompt_lengths[self.prompt_of, None]
        so_far = torch.ones(r, r, dtype=torch.bool, device=device).tril()
        n = len(self.lengths)
        visible = torch.cat([in_prompt[:, None, :].expand(n, r, p), so_far.expand(n, r, r)], 2)
        return visible[:, None]


def pack(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]], *,
         share: bool = True, multiple: int = 1) -> Packed:
    """Lay G prompts and their responses (for each prompt a list of lists of ids) end to end, once.

    `share=False` gives every response its own copy of its prompt: the baseline, same results.
    `multiple` fills T and the padded lengths inside attention up to multiples: on a CPU, 8 makes
    the bits of a pass independent of the number of threads. A prompt may have no responses.
    Raises ValueError for an empty prompt or response.
    """
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
    return Packed(*(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (
        np.pad(ids, filling)[None], np.pad(position, filling)[None], predictor[in_response],
        ids[in_response], number[piece][in_response], length[~is_prompt],
        np.pad(group[piece], filling, constant_values=groups),
        np.pad(np.where(is_prompt, -1, number)[piece], filling, constant_values=-1),
        group[~is_prompt], length[is_prompt], table[:groups * width].reshape(groups, width),
        table[groups * width:].reshape(rows, response_width), np.pad(restore, filling))))


def shared_prompt_mask(packed: Packed) -> torch.Tensor:
    """The definition, (T, T) bool, True = may attend: an earlier place of the same group that is in
    the prompt or in the same response."""
    group, response = packed.group_of_place, packed.response_of_place
    place = torch.arange(len(group), device=group.device)
    visible = (response[None, :] == -1) | (response[:, None] == response[None, :])
    return (place[:, None] >= place[None, :]) & (group[:, None] == group[None, :]) & visible


class Slots:
    """Keys and values of the rows in flight, allocated once, and of the prompts just prefilled.

    A decode step works on the first rows and their first places, as set by `at`: a few static
    shapes, so that it can be captured as a graph and an almost empty batch costs little.
    """

    def __init__(self, layers: int, rows: int, heads: int, width: int, size: int, *, dtype, device):
        # (layers, keys and values, rows, key/value heads, width, head size)
        self.cache = torch.zeros(layers, 2, rows, heads, width, size, dtype=dtype, device=device)
        self.row = torch.arange(rows, device=device)
        self.prefilled = [None] * layers  # per layer: keys and values, (2, heads, T, size)

    def at(self, positions: torch.Tensor, width: int) -> "Slots":
        """Aim the next step: token i of the batch goes to row i, place positions[i]."""
        self.positions, self.width = positions, width
        # (rows, 1, 1, width): a place beyond a row's own is another request's, or nobody's
        place = torch.arange(width, device=positions.device)
        self.hidden = (place > positions[:, None])[:, None, None, :]
        return self

    def stage(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.prefilled[layer] = torch.stack([keys[0], values[0]]).to(self.cache.dtype)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scaling: float) -> torch.Tensor:
        """Attention of one new token a row, (rows, heads, 1, size), over its slots. Written as two
        matrix products over the query heads of a key head, filled up to a multiple of 4: unlike
        one-query `scaled_dot_product_attention` its bits depend on neither threads nor width."""
        rows, heads, _, size = query.shape
        place = self.row[:rows], slice(None), self.positions  # (rows, key/value heads, size)
        for which, new in enumerate((key, value)):
            self.cache[layer, which][place] = new[:, :, 0].to(self.cache.dtype)
        keys, values = self.cache[layer, :, :rows, :, :self.width]
        share = heads // keys.shape[1]
        query = query.reshape(rows, keys.shape[1], share, size).to(keys.dtype)
        query = pad(query, (0, 0, 0, -share % 4))
        scores = (query @ keys.transpose(-1, -2) * scaling).masked_fill(self.hidden, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return (weights.to(keys.dtype) @ values)[:, :, :share].reshape(rows, 1, heads, size)


def _gather(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(1, heads, T, size) at places (B, L) -> (B, heads, L, size)."""
    rows = x[0].transpose(0, 1).index_select(0, places.flatten())
    return rows.view(*places.shape, *rows.shape[1:]).transpose(1, 2)


def _shared(query, key, value, packed, scaling):
    """Causal attention over the prompts, then each response against [its prompt, itself]."""
    heads, size = query.shape[1], query.shape[3]
    settings = {"scale": scaling, "enable_gqa": key.shape[1] != heads}
    # Prompts are filled up on the right, where a causal query never looks.
    prompt_key, prompt_value = (_gather(x, packed.prompt_places) for x in (key, value))
    outputs = [scaled_dot_product_attention(_gather(query, packed.prompt_places), prompt_key,
                                            prompt_value, is_causal=True, **settings)]
    if len(packed.lengths):
        both = [torch.cat([prompt.index_select(0, packed.prompt_of),
                           _gather(x, packed.response_places)], 2)
                for prompt, x in ((prompt_key, key), (prompt_value, value))]
        outputs.append(scaled_dot_product_attention(_gather(query, packed.response_places), *both,
                                                    attn_mask=packed.response_mask, **settings))
    rows = torch.cat([o.transpose(1, 2).reshape(-1, heads, size) for o in outputs])
    return rows.index_select(0, packed.restore)[None]


def _dense(query, key, value, packed, scaling):
    output = scaled_dot_product_attention(query, key, value, attn_mask=packed.dense_mask,
                                          scale=scaling, enable_gqa=key.shape[1] != query.shape[1])
    return output.transpose(1, 2)


def _attention(over_packed):
    """Training: `packed` alone. Prefill: `packed` and `slots`. Decoding: `slots` alone."""
    def attention(module, query, key, value, attention_mask, scaling, packed=None, slots=None, **_):
        if attention_mask is not None or (packed is None and slots is None):
            raise ValueError("an attached model takes packed= or slots=, and no attention mask")
        if packed is None:
            return slots.attend(module.layer_idx, query, key, value, scaling), None
        if slots is not None:
            slots.stage(module.layer_idx, key, value)
        return over_packed(query, key, value, packed, scaling), None  # (1, T, heads, size)
    return attention


# No entry in transformers' registry of mask functions: with one, every pass would first search its
# position ids for packed documents, which reads a value back to the host.
for _kind, _over_packed in (("shared", _shared), ("dense", _dense)):
    ALL_ATTENTION_FUNCTIONS.register(f"{_kind}_prompt", _attention(_over_packed))


def refuse(config) -> None:
    """Raise ValueError, by name, for a model that one mask in all layers cannot serve."""
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"{config.model_type} is not among the supported architectures: "
                         f"{', '.join(ARCHITECTURES)}")
    found = [f"{name}={value}" for name in ("sliding_window", "attention_chunk_size",
                                               "attn_logit_softcapping")
             if (value := getattr(config, name, None))]
    found += sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    if found:
        raise ValueError(f"this {config.model_type} model has {', '.join(found)}: a shared prompt "
                         "needs full attention in every layer")


def attach(model, kind: str = "shared"):
    """Put an implementation into a transformers model, whose forward pass then takes `packed=` or
    `slots=`, and return the model. Raises ValueError for another kind (under `eager` attention a
    boolean mask would hide nothing, without an error) and for a model that `refuse` refuses."""
    if kind not in KINDS:
        raise ValueError(f"no attention named {kind!r}; there are {', '.join(KINDS)}")
    refuse(model.config)
    model.set_attn_implementation(f"{kind}_prompt")
    return model
