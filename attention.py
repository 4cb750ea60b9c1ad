"""Shared-prompt attention: the K responses to a prompt are one row that holds the prompt once.

Where this departs from stock transformers:
1. A packed row is `p1 r11 .. r1K p2 r21 ..`. Each response continues from its own prompt's end, so
   position ids restart; a stock implementation would take the restart for a new document and cut
   the responses off from their prompt, silently. Only the functions below may see a packed row.
2. `shared` (the default) never computes a response-to-response block: causal attention over the
   prompts, and each response against [its prompt, itself]: p*p + K*r*(p + r) pairs for a prompt of
   p tokens and K responses of r. Those of about one length are one call, each filled up by a
   factor below sqrt(2), and beyond that to a multiple of 8; `cost` counts what that computes.
   `dense` runs the T x T mask that *defines* the idea; with long responses it is slower than no
   sharing at all, and is kept as the oracle and the ablation.
3. Decoding runs through the same registered function, against key/value slots of fixed size.

    pack(prompts, responses) -> Packed -> attach(model, kind)'s model(packed=...) -> hidden states
"""
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = ("cpu", "npu")  # devices whose fused kernels take grouped queries, see _fused
BOOLEAN = ("npu",)        # and those that want a mask as bool, see Packed.masks


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, launched: from memory of the host that is not pinned, the host would
    wait until the device has done all it has to do."""
    to_pin = x.device.type == "cpu" and device.type != "cpu"
    return (x.pin_memory() if to_pin else x).to(device, non_blocking=True)


class Piece(NamedTuple):
    """A prompt (before is 0) or a response in a packed row."""
    start: int    # its first place
    length: int
    prompt: int   # the first place of its prompt
    before: int   # and the places of that, which all its tokens see


class Call(NamedTuple):
    """One call of attention: pieces of about one length, prompts (before is 0) or responses to
    prompts of one length. A piece's keys are its prompt's places, then its own."""
    pieces: int
    before: int   # places of the prompt, which all queries of a piece see
    queries: int  # places of the longest piece, filled up
    keys: int     # before + queries, filled up

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(1, 1, queries, keys): True or 0 where a query may see a key, False or -inf elsewhere."""
        query, key = (torch.arange(n, device=device) for n in (self.queries, self.keys))
        seen = (key <= self.before + query[:, None])[None, None]
        if dtype == torch.bool:
            return seen
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one row, and the indices attention needs. Made by `pack`, on the host."""
    input_ids: Tensor          # (1, T)
    position_ids: Tensor       # (1, T)
    predictors: Tensor         # (A,) the place whose hidden state predicts a response token
    targets: Tensor            # (A,) that token
    response_of: Tensor        # (A,) the response it belongs to, 0 .. N-1
    lengths: Tensor            # (N,) tokens of each response
    prompt_of: Tensor          # (N,) the prompt of each response, 0 .. G-1
    prompt_lengths: Tensor     # (G,)
    prompt_of_place: Tensor     # (T,) the prompt of a place; padding is a group of its own
    response_of_place: Tensor  # (T,) the response of a place, -1 in a prompt
    query_places: Tensor       # (Q,) the queries of all calls, end to end, filled up with place 0
    key_places: Tensor         # (M,) their keys and values
    restore: Tensor            # (T,) where a place went in query_places
    calls: tuple[Call, ...]    # known on the host: no shape waits for a device
    made: dict = field(default_factory=dict)  # masks, by dtype

    def to(self, device) -> "Packed":
        """To be called on what `pack` made: from another device a copy would wait for its queue."""
        moved = {f.name: upload(getattr(self, f.name), torch.device(device))
                 for f in fields(self) if f.name not in ("calls", "made")}
        return Packed(**moved, calls=self.calls)

    def cost(self) -> dict[str, int]:
        """Tokens, and query-key pairs that may attend: `shared` as here, `repeated` with a prompt a
        response; `computed` is what `shared` attention computes of them, with its filling."""
        prompt, response = self.prompt_lengths, self.lengths
        own, triangle = prompt[self.prompt_of], lambda n: n * (n + 1) // 2
        return {"tokens_shared": int(prompt.sum() + response.sum()),
                "tokens_repeated": int((own + response).sum()),
                "tokens_computed": len(self.query_places),
                "pairs_shared": int(triangle(prompt).sum() + triangle(response).sum()
                                    + (response * own).sum()),
                "pairs_repeated": int(triangle(own + response).sum()),
                "pairs_computed": sum(c.pieces * c.queries * c.keys for c in self.calls)}

    @cached_property
    def dense_mask(self) -> Tensor:
        return shared_prompt_mask(self)[None, None]  # (1, 1, T, T)

    def masks(self, query: Tensor) -> list[Tensor | None]:
        """For each call (1, 1, queries, keys): a token sees its whole prompt and its own response
        so far. None for prompts: the causal mask. No row is empty, not even padding's: a softmax
        over nothing would be NaN. Ascend's kernels take bool alone; for others PyTorch would make
        numbers of bool in every layer, and keep all of them: here one set serves all layers."""
        dtype = torch.bool if query.device.type in BOOLEAN else product_dtype(query)
        if dtype not in self.made:
            self.made[dtype] = [call.mask(dtype, query.device) if call.before else None
                                for call in self.calls]
        return self.made[dtype]


def shared_prompt_mask(packed: Packed) -> Tensor:
    """The definition, (T, T) bool, True = may attend: an earlier place of the same group that is in
    the prompt or in the same response."""
    group, response = packed.prompt_of_place, packed.response_of_place
    place = torch.arange(len(group), device=group.device)
    visible = (response[None, :] == -1) | (response[:, None] == response[None, :])
    return (place[:, None] >= place[None, :]) & (group[:, None] == group[None, :]) & visible


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
    ids, position, group_of, response_of_place = [], [], [], []   # of every place
    predictors, targets, response_of = [], [], []                 # of every response token
    lengths, prompt_of, pieces = [], [], []                       # of every response; of both
    for group, (prompt, samples) in enumerate(zip(prompts, responses, strict=True)):
        first, before = len(ids), len(prompt)
        pieces.append(Piece(first, before, first, 0))
        ids += prompt
        position += range(before)
        response_of_place += [-1] * before
        for response in samples:
            number, start, length = len(lengths), len(ids), len(response)
            pieces.append(Piece(start, length, first, before))
            ids += response
            position += range(before, before + length)
            response_of_place += [number] * length
            # The first token is predicted by the prompt's last place, not by the place before it,
            # which for all responses but a prompt's first holds the end of another response.
            predictors += [first + before - 1, *range(start, start + length - 1)]
            targets += response
            response_of += [number] * length
            lengths.append(length)
            prompt_of.append(group)
        group_of += [group] * (len(ids) - first)
    if not all(piece.length for piece in pieces):
        raise ValueError("a prompt or response without tokens cannot be packed")
    calls, query_places, key_places, restore = _calls(pieces, multiple)
    filling = -len(ids) % multiple
    indices = {
        "input_ids": [ids + [0] * filling], "position_ids": [position + [0] * filling],
        "predictors": predictors, "targets": targets, "response_of": response_of,
        "lengths": lengths, "prompt_of": prompt_of, "prompt_lengths": [*map(len, prompts)],
        "prompt_of_place": group_of + [len(prompts)] * filling,
        "response_of_place": response_of_place + [-1] * filling,
        "query_places": query_places, "key_places": key_places,
        "restore": restore + [0] * filling}
    return Packed(calls=calls, **{name: torch.tensor(x, dtype=torch.int64)
                                  for name, x in indices.items()})


def length_class(before: int, length: int) -> tuple[int, int]:
    """Pieces of one class share a call of attention: they follow prompts of one length, and their
    own lengths, filled up, differ by less than a factor of sqrt(2)."""
    return before, int(2 * math.log2(length))


def _calls(pieces: list[Piece], multiple: int) -> tuple:
    """The calls of attention over the pieces, their places of queries and of keys, and where each
    place went among the queries."""
    classes = defaultdict(list)
    for piece in pieces:
        kind = length_class(piece.before, round_up(piece.length, multiple))
        classes[kind].append(piece)
    calls, query_places, key_places = [], [], []
    restore = [0] * sum(piece.length for piece in pieces)
    for (before, _), members in classes.items():
        queries = round_up(max(piece.length for piece in members), multiple)
        keys = round_up(before + queries, multiple)
        calls.append(Call(len(members), before, queries, keys))
        for start, length, prompt, _ in members:
            own = range(start, start + length)
            restore[start:start + length] = range(len(query_places), len(query_places) + length)
            query_places += [*own, *[0] * (queries - length)]
            key_places += [*range(prompt, prompt + before), *own, *[0] * (keys - before - length)]
    return tuple(calls), query_places, key_places, restore


class Slots:
    """Keys and values of the prompts and of the responses in flight, allocated once. A prompt's are
    stored once and read once a step, by all its responses together. A step works on the first slots
    and places that `aim_decode` set: a few static shapes, so that it can be captured as a graph."""

    def __init__(self, layers: int, rows: int, heads: int, prompt: int, response: int, size: int,
                 *, dtype: torch.dtype, device: torch.device):
        self.prompts, self.responses = (  # keys and values
            [torch.zeros(layers, rows, heads, places, size, dtype=dtype, device=device)
             for _ in range(2)] for places in (prompt, response))

    def aim(self, stored: Sequence[Tensor], index: Tensor, place: Tensor) -> None:
        """Aim the next pass: token i is written to place[i] of prompt slot, or of row, index[i]."""
        self.stored, self.index, self.place = stored, index, place

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values, (n, heads, size), of the tokens that `aim` chose."""
        for stored, x in zip(self.stored, (key, value)):
            x = x[:len(self.index)]  # the rest is filling
            stored[layer][self.index, :, self.place] = x.to(stored.dtype)

    def aim_decode(self, lengths: Tensor, places: Tensor, slot: Tensor, lane: Tensor,
                   lanes: Tensor, widths: tuple[int, int]) -> None:
        """Aim a decode step. Row i has a prompt of lengths[i] tokens and writes its places[i];
        lanes (slots, k) are the rows that read each prompt slot: row i is lanes[slot[i], lane[i]].
        No row is without a key: one that is filling has place 0.
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
        x = x.flatten(0, 1).index_select(0, self.to_lanes)      # (slots * heads * k, g, n)
        x = x.view(len(self.lanes), heads, -1, n) @ stored      # (slots, heads, k * g, m)
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


def _fused(query, key, value, scaling, **mask):
    """Grouped-query attention. CUDA's kernels for a mask or float32 know no grouped queries: there
    PyTorch would silently keep all scores of a layer, so keys and values are repeated."""
    if (queries := query.shape[1] // key.shape[1]) > 1 and query.device.type not in GROUPED:
        key, value = (x.repeat_interleave(queries, 1) for x in (key, value))
    return scaled_dot_product_attention(query, key, value, scale=scaling, **mask,
                                        enable_gqa=key.shape[1] != query.shape[1])


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """(1, heads, T, size) at places (Q,) -> (Q, heads, size). For all calls at once: the gradient
    of each gather is as large as x."""
    return x[0].transpose(0, 1).index_select(0, places)


def _shared(query, key, value, packed, scaling):
    """Causal attention over the prompts, and of each response over [its prompt, itself]."""
    query = _gather(query, packed.query_places)
    key, value = (_gather(x, packed.key_places) for x in (key, value))
    masks = packed.masks(query)
    query = query.split([call.pieces * call.queries for call in packed.calls])
    key, value = (x.split([call.pieces * call.keys for call in packed.calls]) for x in (key, value))
    outputs = []
    for call, mask, *places in zip(packed.calls, masks, query, key, value):
        # (pieces * places, heads, size) -> (pieces, heads, places, size)
        q, k, v = (x.unflatten(0, (call.pieces, -1)).transpose(1, 2) for x in places)
        output = _fused(q, k, v, scaling, attn_mask=mask, is_causal=mask is None)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.restore)[None]


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


# ---- The method ends here. What follows: what a micro-batch costs; which models are served.

def round_up(n: int, step: int) -> int:
    """n, filled up to a multiple of step."""
    return -(-int(n) // step) * step


def product_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product with x computes in: that of autocast, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class ComputedTokens:
    """`cost()["tokens_computed"]` of pieces that are added one by one, with `multiple` 8."""

    def __init__(self):
        self.count, self.longest = Counter(), Counter()  # of each class

    def add(self, before: int, length: int) -> None:
        """A prompt (before is 0), or a response to a prompt of `before` tokens."""
        filled = round_up(length, 8)
        kind = length_class(before, filled)
        self.count[kind] += 1
        self.longest[kind] = max(self.longest[kind], filled)

    def total(self) -> int:
        return sum(self.count[kind] * self.longest[kind] for kind in self.count)


# One mask must serve all layers. Add an architecture once tests/test_attention.py holds for it.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


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
