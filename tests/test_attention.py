"""Packed = separate: a row that holds a prompt once gives what every response alone gives."""
import copy
import functools
import math

import numpy as np
import pytest
import torch
from conftest import (
    assert_gradients_agree,
    batch,
    gradients,
    separate_logprobs,
    small_config,
    small_model,
)
from transformers import (
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import attention
from attention import KINDS, attach, pack, refuse, shared_prompt_mask
from model import token_logprobs

P, A, B = [11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]  # the example of all cases

BOOL = torch.empty(0, dtype=torch.bool)  # a query that wants masks as bool

MASK = """
    # . . . .  . . .  . . . .
    # # . . .  . . .  . . . .
    # # # . .  . . .  . . . .
    # # # # .  . . .  . . . .
    # # # # #  . . .  . . . .
    # # # # #  # . .  . . . .
    # # # # #  # # .  . . . .
    # # # # #  # # #  . . . .
    # # # # #  . . .  # . . .
    # # # # #  . . .  # # . .
    # # # # #  . . .  # # # .
    # # # # #  . . .  # # # #
"""

LAYOUTS = {  # prompt lengths, response lengths
    "P A B": ([5], [[3, 4]]),
    "G=1 K=1": ([4], [[6]]),
    "G=1 K=8": ([6], [[1, 2, 3, 4, 5, 6, 7, 8]]),
    "G=3 K=2, a prompt of one token": ([3, 7, 1], [[2, 5], [1, 4], [3, 1]]),
    "G=3, every response of one token": ([1, 2, 1], [[1, 1], [1], [1, 1, 1]]),
}
MODELS = [(architecture, tied) for architecture in ("llama", "qwen2", "qwen3", "mistral")
          for tied in (False, True)]


def grid(text):
    return torch.tensor([[c == "#" for c in line.split()] for line in text.strip().splitlines()])


def groups(layout):
    return batch(*LAYOUTS[layout], seed=list(LAYOUTS).index(layout) + 1)


@functools.cache
def stock_result(architecture, tied, layout, dtype=torch.float32, attention="sdpa"):
    """A stock model (never attached), its log-probs and gradients of the separate forwards."""
    model = small_model(architecture, tie_word_embeddings=tied, dtype=dtype, attention=attention)
    logprobs = separate_logprobs(model, *groups(layout))
    return model, logprobs.detach(), gradients(model, logprobs)


def packed_result(stock, kind, packed):
    model = attach(copy.deepcopy(stock), kind)
    logprobs = token_logprobs(model, packed)
    return logprobs.detach(), gradients(model, logprobs)


# ------------------------------------------------------------------------------------- layout

def test_layout_of_the_example():
    """A01: the first tokens of A and of B are both read at index 4, and nothing predicts a prompt
    token. A response that followed the row's order would be read at index 7 and start at 8."""
    packed = pack([P], [[A, B]])
    assert packed.input_ids.tolist() == [P + A + B]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]]
    assert packed.predictors.tolist() == [4, 5, 6, 4, 8, 9, 10]
    assert packed.targets.tolist() == A + B
    assert packed.response_of.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert packed.lengths.tolist() == [3, 4]


def test_second_group_starts_again():
    """A01: a second prompt starts at position 0, and its response is read at that prompt's end."""
    packed = pack([P, [16, 17]], [[A, B], [[41, 42]]])
    assert packed.input_ids[0, 12:].tolist() == [16, 17, 41, 42]
    assert packed.position_ids[0, 12:].tolist() == [0, 1, 2, 3]
    assert packed.predictors.tolist() == [4, 5, 6, 4, 8, 9, 10, 13, 14]
    assert packed.response_of.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert not shared_prompt_mask(packed)[12:, :12].any()
    assert not shared_prompt_mask(packed)[:12, 12:].any()


def test_unshared_layout_repeats_the_prompt():
    """A01 in the baseline: with share=False every response has a prompt of its own."""
    packed = pack([P], [[A, B]], share=False)
    assert packed.input_ids.tolist() == [P + A + P + B]
    assert packed.position_ids.tolist() == [[*range(8), *range(9)]]
    assert packed.predictors.tolist() == [4, 5, 6, 12, 13, 14, 15]
    assert packed.targets.tolist() == A + B
    assert packed.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("share", (True, False))
def test_padding_adds_places_and_no_terms(share):
    """A13: what `multiple` fills up is in no response, whatever token stands there."""
    plain, filled = (pack([P], [[A, B]], share=share, multiple=n) for n in (1, 8))
    assert filled.input_ids.shape[1] % 8 == 0 and filled.input_ids.shape[1] > len(P + A + B)
    assert all(call.queries % 8 == call.keys % 8 == 0 for call in filled.calls)
    for name in ("predictors", "targets", "response_of", "lengths", "prompt_lengths"):
        assert getattr(filled, name).tolist() == getattr(plain, name).tolist()


@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize(("prompts", "responses"), [
    ([[]], [[A]]), ([P], [[A, []]]), ([P, P], [[A]]), ([P], [[A], [B]])])
def test_what_cannot_be_packed_is_refused(prompts, responses, share):
    """A01: an empty prompt has no place that predicts, and a prompt without its list of responses
    would drop out of the batch in silence."""
    with pytest.raises(ValueError):
        pack(prompts, responses, share=share)


# --------------------------------------------------------------------------------------- mask

def test_shared_prompt_mask_of_the_example():
    """A24: the mask that leaves the builder is bool, True = may attend; A04: its exact values."""
    mask = shared_prompt_mask(pack([P], [[A, B]]))
    assert mask.dtype == torch.bool
    assert torch.equal(mask, grid(MASK))


@pytest.mark.parametrize("multiple", (1, 8))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_the_definition(layout, multiple):
    """A24: every place but padding is a query of one call, and sees there what the definition says:
    its whole prompt, and its own response so far."""
    packed = pack(*groups(layout), multiple=multiple)
    queries, keys, seen = 0, 0, {}
    for call, mask in zip(packed.calls, packed.masks(BOOL)):
        assert (mask is None) == (call.before == 0)
        for _ in range(call.pieces):
            own = packed.key_places[keys:keys + call.keys]
            for i in range(call.queries):
                visible = own[:i + 1] if mask is None else own[mask[0, 0, i]]
                seen[queries + i] = int(packed.query_places[queries + i]), visible.tolist()
            queries, keys = queries + call.queries, keys + call.keys
    assert (queries, keys) == (len(packed.query_places), len(packed.key_places))
    definition = shared_prompt_mask(packed)
    for place in range(packed.cost()["tokens_shared"]):
        query, visible = seen[int(packed.restore[place])]
        assert query == place and visible == definition[place].nonzero()[:, 0].tolist()


RAGGED = {  # prompt, lengths of its responses: even, one long, log-normal (mean 300, sigma 0.8)
    "8 x 64": (256, [64] * 8), "32 x 61": (64, [61] * 32),
    "31 x 30, 1024": (64, [30] * 31 + [1024]),
    "log-normal": (200, np.random.default_rng(0).lognormal(math.log(300) - 0.32, 0.8, 32)
                   .astype(int).clip(1).tolist())}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_responses_cost_what_the_formula_says(name):
    """C04: at most twice the pairs of the definition, whatever the longest response is; C05: and
    places within sqrt(2) of the tokens, each length filled up to a multiple of 8 first."""
    prompt, lengths = RAGGED[name]
    cost = pack([range(prompt)], [[range(n) for n in lengths]], multiple=8).cost()
    assert cost["pairs_computed"] <= 2 * cost["pairs_shared"] + 8 * cost["tokens_repeated"]
    filled = sum(-(-n // 8) * 8 for n in (prompt, *lengths))
    assert cost["tokens_computed"] <= 2 ** 0.5 * filled


def test_one_long_response_does_not_lengthen_the_others():
    """C04: attention over 31 responses of 30 tokens and one of 1,024 keeps no more memory, within a
    factor of 2, than over as many tokens in even responses, and returns what the mask gives."""
    kept = {}
    for name, lengths in {"ragged": [30] * 31 + [1024], "even": [61] * 32}.items():
        packed = pack([range(64)], [[range(n) for n in lengths]], multiple=8)
        given = [torch.randn(1, heads, packed.input_ids.numel(), 64, requires_grad=True)
                 for heads in (9, 3, 3)]
        sizes = {}  # of what two layers keep: they share one set of masks

        def keep(x, sizes=sizes):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output, _ = (attention._shared(*given, packed, 0.25) for _ in range(2))
        dense = attention._dense(*given, packed, 0.25)
        tokens = packed.cost()["tokens_shared"]
        assert torch.allclose(output[:, :tokens], dense[:, :tokens], atol=1e-5)
        kept[name] = sum(sizes.values())
    assert kept["ragged"] < 2 * kept["even"]


@pytest.mark.parametrize("multiple", (1, 8))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_query_is_left_without_a_key(layout, multiple):
    """A24: a fully masked row is NaN on one device and a mean on another; padding has none."""
    packed = pack(*groups(layout), multiple=multiple)
    assert shared_prompt_mask(packed).any(-1).all()
    assert all(mask.any(-1).all() for mask in packed.masks(BOOL) if mask is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_repeated_where_no_kernel_groups_queries(kind, monkeypatch):
    """On CUDA a mask and fewer key heads than query heads, together, leave the fused kernels: then
    all scores would be kept, silently. With repeated keys the results are the same."""
    model, packed = attach(small_model(), kind), pack([P, P[1:]], [[A, B], [A]])
    expected = gradients(model, token_logprobs(model, packed))
    monkeypatch.setattr(attention, "GROUPED", ())
    plain = attention.scaled_dot_product_attention

    def spy(query, key, value, **settings):
        assert query.shape[1] == key.shape[1] == value.shape[1] and not settings["enable_gqa"]
        return plain(query, key, value, **settings)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    assert_gradients_agree(gradients(model, token_logprobs(model, packed)), expected, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_reach_the_kernel_as_bool(kind, monkeypatch):
    """A24: an Ascend NPU runs its fused kernel for no mask or a 4-D bool mask only, and reads
    is_causal as wanted only with as many queries as keys."""
    seen = []

    def spy(query, key, value, attn_mask=None, is_causal=False, **settings):
        seen.append(attn_mask)
        assert attn_mask is not None or (is_causal and query.shape[2] == key.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    token_logprobs(attach(small_model(), kind), pack([P], [[A, B]], multiple=8))
    masks = [m for m in seen if m is not None]
    assert len(masks) == 2  # one a layer
    if kind == "shared":  # as numbers, made once; an NPU gets them as bool
        assert masks[0] is masks[1]
        assert masks[0].unique().tolist() == [-math.inf, 0]
        monkeypatch.setattr(attention, "BOOLEAN", ("cpu",))
        token_logprobs(attach(small_model(), kind), pack([P], [[A, B]], multiple=8))
        masks = [m for m in seen[4:] if m is not None]
    for mask in masks:
        assert mask.dtype == torch.bool
        assert mask.shape == {"shared": (1, 1, 8, 16), "dense": (1, 1, 16, 16)}[kind]


# -------------------------------------------------------------------------- packed = separate

@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("architecture", "tied"), MODELS)
def test_packed_is_separate(architecture, tied, kind, layout):
    """A01, A04: log-probs and the gradients of all parameters of a packed row are those of each
    prompt + response alone in the stock model, so a prompt's gradient is the sum over responses.
    (2e-5 is a key bias: its gradient nearly cancels. In float64 the bound is tight.)"""
    stock, logprobs, grads = stock_result(architecture, tied, layout)
    found, found_grads = packed_result(stock, kind, pack(*groups(layout)))
    torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    assert_gradients_agree(found_grads, grads, 2e-5)


@pytest.mark.parametrize("share", (True, False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["P A B", "G=3 K=2, a prompt of one token"])
def test_packed_is_separate_padded_and_unshared(layout, kind, share):
    """A01, A13: neither padding nor the unshared baseline changes a value; the oracle here is stock
    eager attention."""
    stock, logprobs, grads = stock_result("qwen2", False, layout, attention="eager")
    found, found_grads = packed_result(stock, kind, pack(*groups(layout), share=share, multiple=8))
    torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    assert_gradients_agree(found_grads, grads, 1e-5)


def wide_norm(self, hidden):
    """RMSNorm in the dtype of its input; stock ones compute in float32."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("norms", ["stock", "float64"])
def test_packed_is_separate_in_float64(architecture, kind, norms, monkeypatch):
    """A01: without rounding the two agree to 1e-10, so no small term is missing. Stock RMSNorm is
    float32 inside, which leaves 1e-6."""
    layout = "G=3 K=2, a prompt of one token"
    stock = small_model(architecture, dtype=torch.float64)
    if norms == "float64":
        for module in {type(m) for m in stock.modules() if type(m).__name__.endswith("RMSNorm")}:
            monkeypatch.setattr(module, "forward", wide_norm)
    logprobs = separate_logprobs(stock, *groups(layout))
    grads = gradients(stock, logprobs)
    found, found_grads = packed_result(stock, kind, pack(*groups(layout)))
    tolerance = 1e-10 if norms == "float64" else 1e-6
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, logprobs.detach(), atol=tolerance, rtol=0)
    assert_gradients_agree(found_grads, grads, tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompts", "responses", "kept"), [
    pytest.param([P, [16, 17]], [[A, [51, 52, 53, 54]], [[41, 42]]], range(3), id="other response"),
    pytest.param([P, [18, 19]], [[A, B], [[41, 42]]], range(7), id="other prompt"),
    pytest.param([P, [16, 17]], [[A, [31, 39, 33, 34]], [[41, 42]]], range(4), id="later token"),
])
def test_nothing_leaks(prompts, responses, kept, kind):
    """A04: a value does not move when what its token may not see changes."""
    model = attach(small_model(), kind)
    with torch.no_grad():
        before = token_logprobs(model, pack([P, [16, 17]], [[A, B], [[41, 42]]]))
        change = (token_logprobs(model, pack(prompts, responses)) - before).abs()
    assert change[kept].max() < 1e-6
    assert change[kept.stop] > 1e-3  # the first one that may see it


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads(kind):
    """Lengths that are multiples of 8 give the same bits, gradients too, on 1 and on 2 threads."""
    packed = pack(*batch([5, 11], [[3, 9], [1, 6]]), multiple=8)
    results = []
    for threads in (1, 2):
        try:
            torch.set_num_threads(threads)
            results.append(packed_result(small_model(hidden_size=96), kind, packed))
        finally:
            torch.set_num_threads(1)
    (one, one_grads), (two, two_grads) = results
    assert torch.equal(one, two)
    for name, grad in one_grads.items():
        assert torch.equal(grad, two_grads[name]), name


# ------------------------------------------------------------------------------------ refusals

@pytest.mark.parametrize("kind", ["eager", "sdpa", "flash_attention_2", "flex_attention", "Shared"])
def test_other_kinds_are_refused(kind):
    """A04: under eager a bool mask hides nothing; flash attention has no 4-D mask at all."""
    with pytest.raises(ValueError, match=f"{kind}.*shared, dense"):
        attach(small_model(), kind)


def test_an_attention_mask_is_refused():
    """A04: a mask given to an attached model would be ignored: the layout decides who sees whom."""
    packed = pack([P], [[A, B]])
    mask = packed.dense_mask
    with pytest.raises(ValueError, match="attention mask"):
        attach(small_model()).base_model(packed.input_ids, position_ids=packed.position_ids,
                                         attention_mask=mask, packed=packed)


def test_a_forward_without_a_layout_is_refused():
    """A04: a plain forward of an attached model has no mask, and must not run without one."""
    with pytest.raises(ValueError, match="packed= or slots="):
        attach(small_model())(torch.tensor([P]))


REFUSED = {
    "llama with angles that depend on the length": (lambda: LlamaConfig(rope_parameters={
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "llama.*rope_type=dynamic"),
    "mistral with a window": (lambda: MistralConfig(sliding_window=4096),
                              "mistral.*sliding_window=4096"),
    "qwen2 with a window": (lambda: Qwen2Config(use_sliding_window=True, sliding_window=32,
                                                max_window_layers=0), "qwen2.*sliding_window"),
    "llama with a cap": (lambda: small_config(attn_logit_softcapping=50.0), "softcapping=50"),
    "llama with chunks": (lambda: small_config(attention_chunk_size=8), "attention_chunk_size=8"),
    "a mixture of layers": (lambda: small_config("qwen3", layer_types=[
        "full_attention", "sliding_attention"]), "qwen3.*sliding_attention"),
    "gemma2": (Gemma2Config, "gemma2.*supported"),
    "gpt_oss": (GptOssConfig, "gpt_oss.*supported"),
    "gpt2": (GPT2Config, "gpt2.*supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_need_more_than_one_mask_are_refused(case):
    """A04: windows, chunks, caps and sinks would be dropped in silence; the error names them."""
    config, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        refuse(config())


def test_attach_refuses_the_model_too():
    """A04: the check stands where the implementation is put in, not in the loader alone."""
    model = small_model("mistral")
    model.config.sliding_window = 4096
    with pytest.raises(ValueError, match="sliding_window=4096"):
        attach(model)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_full_attention_models_are_accepted(architecture):
    """A04: defaults of Llama, Qwen2, Qwen3 and a Mistral without a window pass."""
    config = small_config(architecture)
    refuse(type(config)(**({"sliding_window": None} if architecture == "mistral" else {})))


# ---------------------------------------------------------------------------------------- cost

def test_cost_by_hand():
    """P A B: 15 pairs in the prompt, 3 * 5 + 6 of A, 4 * 5 + 10 of B; alone rows of 8 and 9."""
    assert pack([P], [[A, B]]).cost() == {
        "tokens_shared": 12, "tokens_repeated": 17, "tokens_computed": 12,
        "pairs_shared": 15 + (15 + 6) + (20 + 10), "pairs_repeated": 8 * 9 // 2 + 9 * 10 // 2,
        "pairs_computed": 5 * 5 + 3 * (5 + 3) + 4 * (5 + 4)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cost_counts_the_mask(layout):
    """The pairs are those of the definition, shared and repeated; padding is not counted."""
    row, repeated = (pack(*groups(layout), share=share) for share in (True, False))
    cost = row.cost()
    assert cost["pairs_shared"] == shared_prompt_mask(row).sum()
    assert cost["pairs_repeated"] == shared_prompt_mask(repeated).sum()
    assert cost["tokens_shared"] == row.input_ids.numel()
    assert cost["tokens_repeated"] == repeated.input_ids.numel()
    filled = pack(*groups(layout), multiple=8).cost()
    assert all(filled[name] == cost[name] for name in cost if not name.endswith("computed"))
    assert cost["tokens_computed"] >= cost["tokens_shared"]


def test_packed_moves_whole(monkeypatch):
    """`.to` moves every tensor, and with it the masks that are made from them."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # needs an accelerator
    monkeypatch.setattr(attention, "BOOLEAN", ("meta",))
    whole = pack([P], [[A, B]])
    packed = whole.to("meta").to("meta")
    tensors = [x for x in vars(packed).values() if isinstance(x, torch.Tensor)]
    masks = packed.dense_mask, packed.masks(BOOL.to("meta"))[1]
    assert len(tensors) == 13 and {x.device.type for x in [*tensors, *masks]} == {"meta"}
