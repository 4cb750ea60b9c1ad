"""One policy, three sets of weights, and a generator that samples what the trainer scores."""
import copy
import ctypes
import itertools
import resource
import shutil
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    VOCAB,
    assert_gradients_agree,
    batch,
    gradients,
    ids,
    separate_logprobs,
    small_model,
    step,
)
from safetensors.torch import load_file, save_file
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, GPT2Config, PreTrainedTokenizerFast

import model as model_module
from attention import attach, pack
from model import (
    InferenceCopy,
    Row,
    TriModel,
    copy_weights,
    find_devices,
    frozen_copy,
    load,
    stop_ids,
    token_logprobs,
)

TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
BFLOAT16 = torch.bfloat16


def attached(architecture="qwen2", **settings):
    return attach(small_model(architecture, **settings).train())


def some_batch(seed=1):
    return batch([5, 9], [[3, 6, 1], [7, 2, 8]], seed)


def perturb(model, size=0.05):
    """Another model of the same shape, in place."""
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator)


class Watch(TorchDispatchMode):
    """Every operation's name, and the tensors that it made: name, shape, dtype."""

    def __init__(self):
        super().__init__()
        self.operations, self.made = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations.append(str(operation))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.made += [(operation.__name__, tuple(x.shape), x.dtype)
                      for x in made if isinstance(x, torch.Tensor)]
        return result


# --------------------------------------------------------------------------- token log-probs

def constant_model(logits):
    """A model whose next-token logits are `logits` after any prompt."""
    model = small_model("llama", vocab_size=len(logits))
    size = model.config.hidden_size
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, size) / size)
    return attach(model)


@pytest.mark.parametrize(("temperature", "right"), [(0.5, -0.1429), (1.0, -0.4076)])
def test_temperature_reaches_every_logprob(temperature, right):
    """A12: generator, policy, old policy and reference report log softmax(logits / T)."""
    policy = constant_model([2.0, 1.0, 0.0])
    models = TriModel(policy, frozen_copy(policy), frozen_copy(policy), temperature=temperature)
    generator = InferenceCopy(frozen_copy(policy), [], rows=8, longest_prompt=4, max_new_tokens=2,
                              temperature=temperature)
    generator.submit("t", [1, 2], np.zeros((1, 2), np.float32))
    (_, _, tokens, sampled, _), = run(generator)
    assert tokens == [0, 0]
    packed = pack([[1, 2]], [[tokens]])
    for values in (*models.logprobs(packed), *models.logprobs(packed, forward_old=True),
                   models.score(models.policy, packed), torch.tensor(sampled)):
        assert values.tolist() == pytest.approx([right, right], abs=5e-5)


@TIED
@pytest.mark.parametrize("chunk", [1, VOCAB * 16, 2**24])  # rows at once: 8, 16, all
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_head_is_plain_log_softmax(tied, chunk, temperature, monkeypatch):
    """A12, A05: values, and gradients of hidden states and head, of a plain shift by one; a tied
    head collects the embedding's gradient too."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", chunk)
    stock = small_model("qwen2", tie_word_embeddings=tied)
    groups = some_batch()
    right = separate_logprobs(stock, *groups, temperature)
    grads = gradients(stock, right)
    model = attach(stock)
    found = token_logprobs(model, pack(*groups), temperature)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    assert_gradients_agree(gradients(model, found), grads, 1e-5)


def test_head_gradient_in_float64(monkeypatch):
    """The backward pass written by hand agrees with finite differences, over several chunks; and a
    float64 model's log-softmax stays float64."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", 1)
    torch.manual_seed(0)
    hidden = torch.randn(19, 6, dtype=torch.float64, requires_grad=True)
    head = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.arange(19) % 5
    def f(h, w):
        return model_module._HeadLogprobs.apply(h, w, targets, 0.7)[0]
    assert torch.autograd.gradcheck(f, (hidden, head))
    right = (hidden @ head.T / 0.7).log_softmax(-1)[range(19), targets]
    torch.testing.assert_close(f(hidden, head), right, atol=1e-13, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_head_is_its_definition(chunk, monkeypatch):
    """A05, A12: the two plain lines in the docstring of the hand-written head, run as they stand,
    give its log-probs, and through autograd its gradients."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", chunk)
    text = model_module._HeadLogprobs.__doc__.split(":\n\n", 1)[1].split("\n\n")[0]
    torch.manual_seed(0)
    hidden = torch.randn(20, 48, requires_grad=True)
    weight = torch.randn(VOCAB, 48, requires_grad=True)
    plain = {"hidden": hidden, "weight": weight, "targets": torch.arange(20), "temperature": 0.7}
    found = model_module._HeadLogprobs.apply(hidden, weight, plain["targets"], 0.7)[0]
    exec(textwrap.dedent(text), plain)
    torch.testing.assert_close(found, plain["logprobs"], atol=1e-5, rtol=0)
    factors = torch.linspace(-1, 1, 20)
    for one, other in zip(torch.autograd.grad((factors * found).sum(), (hidden, weight)),
                          torch.autograd.grad((factors * plain["logprobs"]).sum(),
                                              (hidden, weight))):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2**24])
def test_log_softmax_is_float32_under_autocast(chunk, monkeypatch):
    """The head's product is bfloat16, the log-softmax over it float32: in bfloat16 a log-prob of -4
    has steps of 0.03. Gradients are those of autograd over the same two operations."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(20, 48, requires_grad=True)
    head = torch.randn(VOCAB, 48, requires_grad=True)
    targets, weights = torch.arange(20), torch.randn(20)
    with torch.autocast("cpu", BFLOAT16):
        found = model_module._HeadLogprobs.apply(hidden, head, targets, 1.0)[0]
        right = (hidden @ head.T).float().log_softmax(-1)[range(20), targets]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-6)
    for one, other in zip(torch.autograd.grad((weights * found).sum(), (hidden, head)),
                          torch.autograd.grad((weights * right).sum(), (hidden, head))):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


def separate_entropies(model, prompts, responses, temperature):
    """The oracle: of a stock model's whole distributions, one response at a time."""
    return torch.cat([
        Categorical(logits=model(torch.tensor([[*prompt, *sample]]), use_cache=False)
                    .logits[0, len(prompt) - 1:-1] / temperature).entropy()
        for prompt, samples in zip(prompts, responses) for sample in samples]).detach()


@pytest.mark.parametrize("chunk", [1, VOCAB * 16, 2**24])  # rows at once: 8, 16, all
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_entropy_is_the_plain_formula(dtype, tolerance, temperature, chunk, monkeypatch):
    """A12: the sum over 27 response tokens, not over the 32 rows that the head sees; at the
    temperature of the log-probs. It has no gradient, and changes no bit of theirs."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", chunk)
    stock = small_model("qwen2", dtype=dtype)
    right = separate_entropies(stock, *some_batch(), temperature)
    assert len(right) == 27
    model, packed, sums = attach(stock), pack(*some_batch(), multiple=8), {"entropy_sum": 5.0}
    found = token_logprobs(model, packed, temperature, sums)
    assert sums.keys() == {"entropy_sum"} and sums["entropy_sum"].dtype == dtype
    assert sums["entropy_sum"].item() == pytest.approx(right.sum().item(), rel=tolerance)
    assert not sums["entropy_sum"].requires_grad
    without = token_logprobs(model, packed, temperature)
    assert torch.equal(found, without)
    assert_gradients_agree(gradients(model, found), gradients(model, without), 0)


@pytest.mark.parametrize(("logits", "right"), [
    ([0.0] * 8, np.log(8)), ([7.0] * 8, np.log(8)), ([0.0] + [1000.0] * 4, np.log(4)),
    ([1000.0, 0.0, -1000.0], 0.0), ([np.log(2), 0.0, 0.0], 1.5 * np.log(2))])
def test_entropy_by_hand(logits, right):
    """Neither large logits nor tokens without probability make it inf or NaN."""
    sums = {}
    token_logprobs(constant_model(logits), pack([[1]], [[[0, 1], [2]]]), sums=sums)
    assert sums["entropy_sum"].item() == pytest.approx(3 * right, rel=1e-4, abs=1e-4)


@TIED
@pytest.mark.parametrize("begin", ["none", "zeros", "another gradient"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (BFLOAT16, 0.05)])
def test_micro_batches_add_up_in_place(dtype, tolerance, begin, tied):
    """A17, A05: three backward passes leave the sum of three fresh gradients, which is that of one
    over all, whatever stood there before: the head, tied or not, adds to its gradient in place."""
    policy = attached("llama", tie_word_embeddings=tied)
    models = TriModel(policy, dtype=dtype)
    prompts, responses = batch([5, 9, 4], [[3, 6, 1], [7, 2, 8], [2, 5]])
    weights = torch.randn(34, generator=torch.Generator().manual_seed(0)).split([10, 17, 7])

    def backward(first, last):
        logprobs = models.score(policy, pack(prompts[first:last], responses[first:last]))
        (torch.cat(weights[first:last]) * logprobs).sum().backward()

    def fresh(first, last):
        policy.zero_grad(set_to_none=True)
        backward(first, last)
        return {name: p.grad.clone() for name, p in policy.named_parameters()}
    at_once, *parts = fresh(0, 3), fresh(0, 1), fresh(1, 2), fresh(2, 3)
    before = fresh(0, 2)
    if begin != "another gradient":
        before = dict.fromkeys(before, 0)
        policy.zero_grad(set_to_none=begin == "none")
    policy.get_input_embeddings().sparse = begin != "none"  # as in the trainer, whose grads exist
    for number in range(3):
        backward(number, number + 1)
    found = {name: p.grad - before[name] for name, p in policy.named_parameters()}
    assert_gradients_agree(found, {name: sum(p[name] for p in parts) for name in found}, 2e-6)
    assert_gradients_agree(found, at_once, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BFLOAT16])
def test_dtype_of_logprobs(dtype):
    """float64 for a float64 model; float32 for all others, even for parameters in bfloat16."""
    logprobs = token_logprobs(attached(dtype=dtype), pack(*some_batch()))
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_no_tensor_of_all_logits(monkeypatch):
    """No prompt token meets the head, and no (A, V) tensor is made, forwards or backwards."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", 1)
    model, packed = attached(), pack(*some_batch())
    with Watch() as watch:
        token_logprobs(model, packed).sum().backward()
    rows = {shape[0] for _, shape, _ in watch.made if shape[1:] == (VOCAB,)}
    rows.discard(model.config.hidden_size)  # the head itself, turned over
    assert rows == {8}  # chunks of 8, the last one filled up


class Chunks(TorchDispatchMode):
    """How many tensors of a chunk of logits there are whenever the head makes the next."""

    def __init__(self):
        super().__init__()
        self.made, self.alive = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        alive = sum(made() is not None for made in self.made)
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == (8, VOCAB):
            self.made.append(weakref.ref(result))
            if operation is torch.ops.aten.mm.default:
                self.alive.append(alive)
        return result


def test_a_chunk_of_logits_is_gone_before_the_next(monkeypatch):
    """Forwards and backwards: the peak is one chunk and one temporary, not two of each."""
    monkeypatch.setattr(model_module, "HEAD_CHUNK", 1)
    with Chunks() as chunks:
        token_logprobs(attached(), pack(*some_batch())).sum().backward()
    assert len(chunks.alive) > 4 and not any(chunks.alive)


# ---------------------------------------------------------------------------------- tri-model

def test_old_is_the_policy_until_the_first_step():
    """A27: `old` is the policy's own value, so the ratio is exactly 1 and has the policy's
    gradient; the forward pass of old weights agrees with it, in other batch shapes too."""
    policy = attached()
    models = TriModel(policy, frozen_copy(policy))
    packed = pack(*some_batch())
    new, old, reference = models.logprobs(packed)
    assert reference is None
    assert torch.equal(new, old) and new.requires_grad and not old.requires_grad
    new, forward, _ = models.logprobs(packed, forward_old=True)
    torch.testing.assert_close(new.detach(), forward, atol=1e-6, rtol=0)
    alone = torch.cat([models.logprobs(pack([p], [r]), forward_old=True)[1]
                       for p, r in zip(*some_batch())])
    assert ((new - alone).exp() - 1).abs().max() < 1e-5


def test_forward_old_runs_the_old_weights():
    """A27: forward_old must not hide a policy that has moved, nor use the reference."""
    policy = attached()
    old, reference = frozen_copy(policy), frozen_copy(policy)
    perturb(reference)
    perturb(policy, 0.01)
    packed = pack(*some_batch())
    new, found, ref = TriModel(policy, old, reference).logprobs(packed, forward_old=True)
    assert torch.equal(found, token_logprobs(old, packed))
    assert torch.equal(ref, token_logprobs(reference, packed))
    assert (new - found).abs().max() > 1e-3 and (ref - found).abs().max() > 1e-3


def test_no_gradient_reaches_old_and_reference():
    """A05: of the three the policy alone has gradients and is in train mode."""
    policy = attached()
    models = TriModel(policy, frozen_copy(policy), frozen_copy(policy))
    new, old, reference = models.logprobs(pack(*some_batch()), forward_old=True)
    assert not old.requires_grad and not reference.requires_grad
    ((new - old).exp() + (reference - new).square()).sum().backward()
    assert all(p.grad is not None for p in policy.parameters()) and policy.training
    for model in (models.old, models.reference):
        assert all(p.grad is None and not p.requires_grad for p in model.parameters())
        assert not model.training


@TIED
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_bfloat16_reference_is_the_policy_bit_for_bit(architecture, tied):
    """A27 in bfloat16: `Linear` weights kept in bfloat16 are what autocast makes of the policy's,
    so an untrained policy has ratio 1 and KL 0 exactly."""
    policy = attached(architecture, tie_word_embeddings=tied)
    reference = frozen_copy(policy, BFLOAT16)
    assert reference.model.layers[0].mlp.up_proj.weight.dtype == BFLOAT16
    models = TriModel(policy, reference, reference, dtype=BFLOAT16)
    packed = pack(*some_batch(), multiple=8)
    new, old, ref = models.logprobs(packed, forward_old=True)
    assert new.dtype == torch.float32
    assert torch.equal(new, ref) and torch.equal(new, old)
    assert not torch.equal(new, token_logprobs(policy, packed))  # autocast was on
    new.sum().backward()
    assert {p.grad.dtype for p in policy.parameters()} == {torch.float32}


# ------------------------------------------------------------------------ frozen copy, weight copy

@TIED
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_snapshot_is_a_copy(tied, dtype):
    """A05: adding 1 to the policy's embedding moves no snapshot, and a tied head stays one object
    with the embedding in policy, reference and inference copy."""
    policy = attached(tie_word_embeddings=tied)
    copies = frozen_copy(policy, dtype), generator_of(policy, dtype=dtype).model
    before = [copy.deepcopy(c.state_dict()) for c in copies]
    with torch.no_grad():
        policy.get_input_embeddings().weight += 1
    for model, state in zip(copies, before):
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name
    for model in (policy, *copies):
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == tied


@TIED
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_copied_weights_are_equal(tied, dtype):
    """A05: every parameter and buffer (rotary frequencies are in no state dict) arrives, up to the
    cast; dtypes and ties of the copy stay; the version is stamped."""
    policy = attached(tie_word_embeddings=tied)
    target = generator_of(policy, dtype=dtype)
    dtypes = {n: p.dtype for n, p in target.model.named_parameters()}
    perturb(policy)
    for buffer in policy.buffers():
        buffer.mul_(1.5)
    copy_weights(policy, target, 7)
    assert target.version == 7
    sources = dict([*policy.named_parameters(), *policy.named_buffers()])
    copied = dict([*target.model.named_parameters(), *target.model.named_buffers()])
    assert copied.keys() == sources.keys() and any("inv_freq" in name for name in copied)
    for name, value in copied.items():
        assert torch.equal(value, sources[name].to(value.dtype)), name
        assert value.data_ptr() != sources[name].data_ptr()
    assert {n: p.dtype for n, p in target.model.named_parameters()} == dtypes
    assert (target.model.get_output_embeddings().weight
            is target.model.get_input_embeddings().weight) == tied
    assert not any(p.requires_grad for p in target.model.parameters())
    packed = pack(*some_batch())
    models = TriModel(policy, target.model, dtype=dtype)
    new, old, _ = models.logprobs(packed, forward_old=True)
    assert torch.equal(new, old) if dtype == BFLOAT16 else (new - old).abs().max() < 1e-6


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["waiting", "just started", "half done"])
def test_weights_are_not_copied_under_a_request(steps):
    """A15: tokens of one response would come from two policies; and the refusal changes nothing."""
    policy = attached()
    generator = generator_of(policy)
    generator.submit("t", [1, 2, 3], uniforms(10))  # K=10 > 8 rows: some wait in every state
    ended = [e for _ in range(steps) for e in step(generator)]
    perturb(policy)
    before = copy.deepcopy(generator.model.state_dict())
    with pytest.raises(RuntimeError, match="in flight"):
        copy_weights(policy, generator, 1)
    assert generator.version == 0
    assert all(torch.equal(v, before[n]) for n, v in generator.model.state_dict().items())
    assert len(ended) + len(run(generator)) == 10
    copy_weights(policy, generator, 1)
    assert generator.version == 1


def test_no_request_is_submitted_under_a_weight_copy(monkeypatch):
    """A15: one that came between the look at what is in flight and the last weight would be
    prefilled with weights of two versions. It is refused; after the copy, and after a copy that was
    refused itself, requests are welcome."""
    policy, request = attached(), ("t", [1, 2, 3], uniforms(2))
    generator, refused = generator_of(policy), []

    class Spied(torch.nn.Module):
        """The copied weights; somebody submits before each."""

        def named_parameters(self):
            for item in model.named_parameters():
                with pytest.raises(RuntimeError, match="while weights were copied") as error:
                    generator.submit(*request)
                refused.append(error)
                yield item

        def named_buffers(self):
            return model.named_buffers()
    model = generator.model
    monkeypatch.setattr(generator, "model", Spied())
    copy_weights(policy, generator, 1)
    monkeypatch.undo()
    assert len(refused) == len(list(model.parameters())) and generator.version == 1
    assert generator.idle
    generator.submit(*request)
    with pytest.raises(RuntimeError, match="in flight"):
        copy_weights(policy, generator, 2)
    generator.submit(*request)
    assert len(run(generator)) == 4


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_no_cache_survives_a_weight_copy(dtype):
    """A15: after the copy the same prompt with the same uniforms gives what a fresh generator with
    the new weights gives, to the last bit."""
    policy = attached()
    generator = generator_of(policy, dtype=dtype)
    first = generate(generator, [("t", [1, 2, 3], uniforms(6))])
    perturb(policy)
    copy_weights(policy, generator, 1)
    second = generate(generator, [("t", [1, 2, 3], uniforms(6))])
    fresh = generate(generator_of(policy, dtype=dtype), [("t", [1, 2, 3], uniforms(6))])
    assert second == fresh
    assert second != first


# ----------------------------------------------------------------------------- inference copy

NEW = 12  # tokens a response


def generator_of(policy, stop=(), *, rows=8, limit=NEW, longest=12, dtype=torch.float32, **more):
    return InferenceCopy(frozen_copy(policy, dtype), stop, rows=rows, longest_prompt=longest,
                         max_new_tokens=limit, dtype=dtype, **more)


def uniforms(samples, seed=0, limit=NEW):
    return np.random.default_rng(seed).random((samples, limit), dtype=np.float32)


def run(generator, requests=(), every=0):
    """Step until all is done; the first request is submitted at once and one more each `every`
    steps (0: all at once). Returns what ended, in that order."""
    ended = []
    for request in requests:
        generator.submit(*request)
        for _ in range(every):
            ended += [] if generator.idle else step(generator)
    for _ in range(1000):
        if generator.idle:
            return ended
        ended += step(generator)
    raise AssertionError("the generator does not come to an end")


def generate(generator, requests, every=0):
    """{(ticket, sample): (ids, logprobs, finished)}"""
    ended = run(generator, requests, every)
    results = {(ticket, sample): rest for ticket, sample, *rest in ended}
    assert len(results) == len(ended) == sum(len(u) for _, _, u in requests)
    return results


def greedy(stock, prompt, stop, limit=NEW):
    """The likeliest tokens of a stock model on one prompt, without a cache."""
    tokens = []
    while len(tokens) < limit and not (tokens and tokens[-1] in stop):
        logits = stock(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


def assert_scored_as_sampled(policy, requests, results, temperature):
    """Stored log-probs are those of a full forward pass over prompt and response."""
    prompts = [prompt for _, prompt, _ in requests]
    responses = [[results[ticket, k][0] for k in range(len(u))] for ticket, _, u in requests]
    with torch.no_grad():
        full = token_logprobs(policy, pack(prompts, responses), temperature)
    sampled = [x for ticket, _, u in requests for k in range(len(u)) for x in results[ticket, k][1]]
    torch.testing.assert_close(torch.tensor(sampled), full, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def three():
    """Prompts of 3, 7 and 5 tokens, and what the stock model says to each alone, greedily."""
    stock = small_model("qwen2", seed=3)
    prompts = [ids(n, n) for n in (3, 7, 5)]
    stop = [greedy(stock, prompts[1], [])[3]]  # the second prompt's responses end early
    return SimpleNamespace(policy=attach(copy.deepcopy(stock)), prompts=prompts, stop=stop, alone={
        stops: [greedy(stock, p, stop if stops else []) for p in prompts]
        for stops in (False, True)})


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_cached_is_uncached(three, order, every, stops):
    """A11: 12 responses over 8 rows, so later ones join when a row frees, among rows of other
    lengths; each is the greedy continuation of its prompt alone, in every order of submission."""
    generator = generator_of(three.policy, three.stop if stops else [], temperature=0)
    requests = [(p, three.prompts[p], uniforms(4)) for p in order]
    results = generate(generator, requests, every)
    for (p, _), (tokens, _, finished) in results.items():
        assert tokens == three.alone[stops][p]
        assert finished == (stops and tokens[-1] in three.stop)
    assert_scored_as_sampled(three.policy, requests, results, 1.0)


def test_the_three_prompts_are_a_test(three):
    """A11: the greedy texts differ, do not repeat one token, and stop at different places."""
    assert len({tuple(tokens) for tokens in three.alone[False]}) == 3
    assert all(len(set(tokens)) > 3 for tokens in three.alone[False])
    assert len({len(tokens) for tokens in three.alone[True]}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_samples_do_not_depend_on_rows_or_order(architecture, temperature):
    """A11, A12: a request's tokens are a function of its uniforms and the weights, and each is
    drawn from softmax(logits / T): its uniform lies in its own piece of the cumulative sum."""
    policy = attached(architecture)
    requests = [(n, ids(n, n), uniforms(k, seed=n)) for n, k in ((3, 5), (7, 11), (12, 1), (5, 4))]
    stop = [4, 9, 17]
    first = None
    for rows, every, order in ((8, 0, 1), (16, 0, 1), (16, 3, -1), (8, 2, -1), (8, 5, 1)):
        results = generate(generator_of(policy, stop, rows=rows, temperature=temperature),
                           requests[::order], every)
        first = first or results
        assert {k: r[0] for k, r in results.items()} == {k: r[0] for k, r in first.items()}
        assert_scored_as_sampled(policy, requests, results, temperature)
    assert {finished for _, _, finished in first.values()} == {False, True}
    stock = small_model(architecture)
    for ticket, prompt, drawn in requests:
        for k, u in enumerate(drawn):
            tokens = first[ticket, k][0]
            with torch.no_grad():
                logits = stock(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1:-1]
            above = (logits / temperature).softmax(-1).cumsum(-1)[range(len(tokens)), tokens]
            below = above - (logits / temperature).softmax(-1)[range(len(tokens)), tokens]
            u = torch.from_numpy(u[:len(tokens)])
            assert (below - 1e-5 <= u).all() and (u <= above + 1e-5).all()


def counting_model():
    """After token i comes i + 1, all but surely, whatever stood before."""
    model = small_model("llama", hidden_size=64, num_attention_heads=4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, 64))
        model.lm_head.weight.copy_(10 * torch.eye(VOCAB, 64).roll(1, 0))
    return attach(model)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(("prompt", "stop", "tokens", "finished"), [
    ([30, 1], [2, 9], [2], True),
    ([5], [2, 9], [6, 7, 8, 9], True),
    ([1], [9], [2, 3, 4, 5, 6, 7, 8, 9], True),  # in the very last place
    ([9, 2, 9], [2, 9], [10, 11, 12, 13, 14, 15, 16, 17], False),  # stop ids in the prompt
    ([57], [0], [58, 59, 0], True),  # id 0, which is also what padding is made of
    ([57], [], [58, 59, 0, 1, 2, 3, 4, 5], False),
])
def test_stop_tokens(prompt, stop, tokens, finished, temperature):
    """A14, A13: any listed id ends a response, is its last token, and makes it finished, in the
    last allowed place too; without one it is truncated. A stop id in the prompt ends nothing."""
    generator = generator_of(counting_model(), stop, limit=8, temperature=temperature)
    results = generate(generator, [("t", prompt, uniforms(3, limit=8))])
    for ids_, logprobs, ended in results.values():
        assert (ids_, ended) == (tokens, finished)
        assert len(logprobs) == len(tokens)


def test_eos_is_pad_and_part_of_the_response():
    """A13: with pad = eos = 0 and padded rows the lengths alone decide what is scored, the EOS is,
    and an EOS inside the prompt stays visible."""
    stock = small_model()
    prompts, responses = [[5, 0, 6]], [[[7, 8, 0], [7, 0]]]
    packed = pack(prompts, responses, multiple=8)
    assert packed.targets.tolist() == [7, 8, 0, 7, 0] and packed.lengths.tolist() == [3, 2]
    right = separate_logprobs(stock, prompts, responses).detach()
    model = attach(stock)
    torch.testing.assert_close(token_logprobs(model, packed).detach(), right, atol=1e-5, rtol=0)
    other = token_logprobs(model, pack([[5, 1, 6]], responses, multiple=8))
    assert (other - right).abs().min() > 1e-5


@pytest.mark.parametrize(("configured", "own", "right"), [
    ([2, 9], 2, [2, 9]), ([9, 2], 5, [2, 5, 9]), (7, None, [7]), (None, 3, [3]), (None, None, [])])
def test_stop_ids(configured, own, right):
    """A14: all ids of the generation config and the tokenizer's, each once."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_ids(model, SimpleNamespace(eos_token_id=own)) == right


def test_more_samples_than_rows():
    """A11: K = 21 over 8 rows: every sample ends once, from its own uniforms, and the prompt is
    prefilled once."""
    policy = attached()
    generator = generator_of(policy, [4, 9, 17])
    prefilled = []
    prefill = generator.prefill
    generator.prefill = lambda: (prefilled.append(1), prefill())[1]
    requests = [("t", [1, 2, 3], uniforms(21))]
    results = generate(generator, requests)
    assert len(prefilled) == 1
    assert_scored_as_sampled(policy, requests, results, 1.0)
    one = generate(generator_of(policy, [4, 9, 17]), [("t", [1, 2, 3], uniforms(21)[13:14])])
    assert one["t", 0][0] == results["t", 13][0]


def test_prefill_in_several_passes(monkeypatch):
    """A11: prompts that are too many tokens for one packed pass take several, and do not mix."""
    monkeypatch.setattr(model_module, "PREFILL_TOKENS", 10)
    policy = attached()
    requests = [(n, ids(n, n), uniforms(2, seed=n)) for n in (4, 12, 5, 6, 1)]
    results = generate(generator_of(policy, [4, 9]), requests)
    assert_scored_as_sampled(policy, requests, results, 1.0)


@pytest.mark.parametrize("length", [0, 13])
def test_prompts_that_do_not_fit_are_refused_at_once(length):
    """A11: a prompt beyond its slots would overwrite a neighbour, and an empty one has no place to
    sample from: `submit` says so, to the one who asks, and the generator goes on."""
    generator = generator_of(attached())
    with pytest.raises(ValueError, match="prompt"):
        generator.submit("t", [1] * length, uniforms(1))
    assert generator.idle
    assert len(generate(generator, [("u", [1] * 12, uniforms(2))])) == 2  # as long as allowed


@pytest.mark.parametrize(("longest", "limit"), [(16, 48), (17, 49)])
def test_longest_prompt_and_longest_response(longest, limit):
    """A11: 16 and 48 places fill the width of a decode step exactly; one more makes it wider."""
    policy = attached()
    requests = [("t", ids(longest, 0), uniforms(2, limit=limit)),
                ("u", [1], uniforms(1, limit=limit))]
    results = generate(generator_of(policy, limit=limit, longest=longest), requests)
    assert [len(r[0]) for r in results.values()] == [limit] * 3
    assert_scored_as_sampled(policy, requests, results, 1.0)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0))])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_uniforms_at_the_ends(uniform, temperature):
    """The smallest and largest uniform give a token of positive probability, though the float32
    cumulative sum ends beside 1 and the first and last tokens have none."""
    generator = generator_of(attached(), temperature=temperature)
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, :7] = logits[:, -9:] = -torch.inf
    logits[:50, 7:2000] = -200.0  # exp underflows
    row = Row("t", 0, 0, 1, np.full(1, uniform, np.float32))
    tokens, logprobs = generator._sample(logits, [row] * 200).numpy().T
    probability = (logits / temperature).softmax(-1)[range(200), tokens.astype(int)]
    assert (probability > 0).all()
    assert np.allclose(np.exp(logprobs), probability, rtol=1e-3)


@pytest.mark.parametrize("capability, columns", [("AVX512", True), ("AVX2", False)])
@TIED
def test_matrices_are_stored_as_the_cpu_likes_them(monkeypatch, tied, capability, columns):
    """By columns with AVX-512: the values, the samples and a weight copy are the same, and neither
    a head that is the embedding, too, nor the policy is stored in another way."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    policy = attached(tie_word_embeddings=tied)
    generator = generator_of(policy)
    stored = {name: p.T.is_contiguous() for name, p in generator.model.named_parameters()
              if name.endswith("proj.weight") or name == "lm_head.weight"}
    assert set(stored.values()) == {columns}
    assert ("lm_head.weight" in stored) == (not tied)
    assert generator.model.get_input_embeddings().weight.is_contiguous()
    assert all(p.is_contiguous() for p in policy.parameters())
    requests = [("t", ids(5, 1), uniforms(4))]
    for version in (1, 2):
        perturb(policy)
        copy_weights(policy, generator, version)
        for (_, p), (_, q) in zip(policy.named_parameters(), generator.model.named_parameters()):
            assert torch.equal(p, q)
        results = generate(generator, requests)
        assert_scored_as_sampled(policy, requests, results, 1.0)


def test_nearly_empty_batch():
    """One response in 16 rows works on 8 of them, and ends with a tuple of plain Python values."""
    policy = attached()
    generator = generator_of(policy, rows=16)
    shapes = []
    generator.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    generator.submit("t", [1, 2, 3], uniforms(1))
    assert generator.admits and not generator.idle
    ended = [step(generator) for _ in range(NEW)]
    assert ended[:-1] == [[]] * (NEW - 1) and generator.idle
    (ticket, sample, tokens, logprobs, finished), = ended[-1]
    assert (ticket, sample, finished) == ("t", 0, False)
    assert len(tokens) == len(logprobs) == NEW
    assert {type(x) for x in tokens} == {int} and {type(x) for x in logprobs} == {float}
    assert shapes == [(1, 8)] + [(8, 1)] * (NEW - 1)
    full = generate(generator, [("t", [1, 2, 3], uniforms(1)), ("u", [4], uniforms(15, seed=1))])
    assert full["t", 0][0] == tokens


def test_freed_slots_leave_nothing_behind():
    """A11: what an earlier request left in a row's slots has no part in the next one."""
    policy = attached()
    generator = generator_of(policy, [4, 9])
    for stored in [*generator.slots.prompts, *generator.slots.responses]:
        stored.fill_(1e4)
    request = [("t", [1, 2, 3], uniforms(6)), ("u", [1], uniforms(6, seed=1))]
    assert generate(generator, request) == generate(generator_of(policy, [4, 9]), request)


def test_training_after_generation():
    """A27: `step` runs under inference mode and changes no mode: the copy's weights can be written
    and scored, and the policy trained, afterwards."""
    policy = attached()
    generator = generator_of(policy)
    requests = [("t", [1, 2, 3], uniforms(2))]
    results = generate(generator, requests)
    models = TriModel(policy, generator.model)
    packed = pack([[1, 2, 3]], [[r[0] for r in results.values()]])
    new, old, _ = models.logprobs(packed, forward_old=True)
    (new - old).exp().sum().backward()
    assert policy.training and not generator.model.training and not torch.is_inference(new)
    copy_weights(policy, generator, 1)


# ------------------------------------------------------------------------------------- loading

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedded model after three steps of warm-up, saved; dropout in its config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "TINY_STEPS", 3)
        model, tokenizer = load("tiny")
    path = tmp_path_factory.mktemp("tiny")
    model.config.attention_dropout = 0.1
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return SimpleNamespace(path=path, model=model, tokenizer=tokenizer)


def test_tiny_tokenizer_round_trip(folder):
    """A25: every character of ASCII is one token and comes back; no BOS is added."""
    text = "".join(map(chr, range(32, 127))) + "\nspaces  stay , as . they 're\n"
    for tokenizer in (folder.tokenizer, load(str(folder.path))[1]):
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        encoded = tokenizer(text).input_ids
        assert type(encoded) is list and len(encoded) == len(text)
        assert tokenizer.decode(encoded) == text
        assert tokenizer("1<eos>").input_ids[-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
        assert tokenizer.decode(tokenizer("1<eos>").input_ids, skip_special_tokens=True) == "1"
    assert stop_ids(folder.model, folder.tokenizer) == [folder.tokenizer.eos_token_id]


def test_tiny_is_a_function_of_its_seed(monkeypatch):
    """The embedded model is the same for the same seed, whatever torch drew before, and leaves
    torch's own stream alone."""
    monkeypatch.setattr(model_module, "TINY_STEPS", 2)
    states = []
    for seed in (0, 0, 1):
        before = torch.random.get_rng_state()
        states.append(load("tiny", seed=seed)[0].state_dict())
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(3)
    equal = [all(torch.equal(v, other[n]) for n, v in states[0].items()) for other in states[1:]]
    assert equal == [True, False]


def test_saved_and_loaded_is_equal(folder):
    """A05: a folder written with save_pretrained gives the same log-probs, in train mode, attached,
    with its head still tied."""
    model, _ = load(str(folder.path))
    packed = pack(*some_batch())
    assert torch.equal(token_logprobs(model, packed), token_logprobs(folder.model, packed))
    assert model.training
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_ratio_is_one_with_dropout_in_the_config(folder, dtype):
    """A27: a model saved with attention dropout 0.1 is trained without: two passes in train mode
    agree, old weights in eval mode too; per group or in one micro-batch within 1e-5 in float32."""
    assert AutoConfig.from_pretrained(folder.path).attention_dropout == 0.1
    model, _ = load(str(folder.path))
    assert model.config.attention_dropout == 0
    assert {m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")} == {0}
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    models = TriModel(model, frozen_copy(model, dtype), dtype=dtype)
    groups = some_batch()
    new, old, _ = models.logprobs(pack(*groups), forward_old=True)
    assert torch.equal(new, models.score(models.policy, pack(*groups)))
    bound = 1e-5 if dtype == torch.float32 else 0  # the same shapes: the same bits
    assert ((new - old).exp() - 1).abs().max() <= bound
    alone = torch.cat([models.score(models.policy, pack([p], [r])) for p, r in zip(*groups)])
    assert ((new - alone).exp() - 1).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


def without(*names):
    return lambda path: [next(path.glob(name)).unlink() for name in names]


def cut_weights(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50_000])


def drop_a_tensor(path):
    state = load_file(path / "model.safetensors")
    del state["model.layers.1.mlp.gate_proj.weight"]
    save_file(state, path / "model.safetensors", {"format": "pt"})


def pickle_weights(path):
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


BROKEN = {
    "no weights": without("model.safetensors"),
    "pickled weights": pickle_weights,
    "half the weights": cut_weights,
    "a tensor is missing": drop_a_tensor,
    "no config": without("config.json"),
    "a broken config": lambda path: (path / "config.json").write_text('{"model_type": '),
    "no tokenizer": without("tokenizer.json", "tokenizer_config.json"),
    "another architecture": lambda path: GPT2Config().save_pretrained(path),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(folder, case, tmp_path):
    """A20, A05: a folder that is not whole is one clear line that names it (or the architecture),
    and never a model with random weights in it."""
    path = tmp_path / "broken"
    shutil.copytree(folder.path, path)
    BROKEN[case](path)
    with pytest.raises(ValueError) as error:
        load(str(path))
    assert len(str(error.value).splitlines()) == 1
    assert ("gpt2" if case == "another architecture" else str(path)) in str(error.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere", "~/nowhere", "a/b/c"])
def test_no_such_folder(name):
    """A mistyped path is refused at once, before anybody asks a hub for it."""
    with pytest.raises(ValueError, match=f"no model {name}: .*tiny, a folder or a hub id"):
        load(name)


# ------------------------------------------------------------------------------------- devices

@pytest.mark.parametrize("found", ["meta", "cuda", None])
def test_default_device(found, monkeypatch):
    """A24's other half needs an NPU: a tensor is put on whatever accelerator torch finds."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available=False: found and torch.device(found))
    monkeypatch.setattr(torch, "empty", lambda *_, device: SimpleNamespace(device=str(device)))
    assert find_devices("") == [found or "cpu"]


def test_sources_name_no_vendor():
    """A24: one code path for CUDA, NPU and CPU."""
    for name in ("attention", "grpo", "model", "periodic_async"):
        source = (Path(model_module.__file__).parent / f"{name}.py").read_text()
        assert "torch.cuda" not in source, name
        assert ".double()" not in source, name


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_device_work_has_no_float64_and_no_host_reads(dtype):
    """A24: an NPU has no float64, and nothing in a step may wait for the device: sampling, scoring
    and the backward pass neither make a float64 tensor nor read a value back."""
    policy = attached()
    generator = generator_of(policy, [4], dtype=dtype)
    models = TriModel(policy, generator.model, generator.model, dtype=dtype)
    with Watch() as watch:
        generate(generator, [("t", [1, 2, 3], uniforms(9)), ("u", [4], uniforms(3))])
        packed = pack(*some_batch(), multiple=8)
        models.logprobs(packed, forward_old=True)[0].sum().backward()
        copy_weights(policy, generator, 1)
    assert torch.float64 not in {dtype for _, _, dtype in watch.made}
    reads = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal"}
    assert not reads & {name.split(".")[1] for name in watch.operations}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept_for_the_next_block_of_its_size():
    """Otherwise every micro-batch pays page faults for the activations of the one before it."""
    def faults(blocks):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(blocks):
            torch.ones(2**23)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with ThreadPoolExecutor(1) as thread:  # as the trainer's
        thread.submit(faults, 10).result()  # until the heap has its holes
        assert thread.submit(faults, 10).result() <= 2 * 2**25 // resource.getpagesize()
