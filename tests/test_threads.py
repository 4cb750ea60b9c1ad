"""Bits do not depend on the number of threads, which lent cores change from call to call: silu,
every operation of a pass, the built-in model, whole runs. And how many cores a run may use."""
import asyncio
import copy
import hashlib
import os

import numpy as np
import pytest
import torch
from conftest import ids, small_model, step
from test_periodic_async import config, hashes
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import model
import periodic_async
from attention import attach, pack
from model import (InferenceCopy, cut_into_stages, exact_threads, frozen_copy, load,
                   token_logprobs)
from periodic_async import Timeline, Worker, train, usable_cores

slow = pytest.mark.slow
DTYPES = torch.float32, torch.bfloat16, torch.float64
THREADS = 2, 3, 4, 5, 6, 7, 8, 12, 16
# More threads than elements, ends of every length, and one thread's part more or less: torch gives
# a thread 32,768 elements or more.
SIZES = [*range(130), *range(131, 5001, 97), *range(4990, 5001),
         *(32768 * c + d for c in (1, 2, 3, 4, 7, 8, 16) for d in (-64, -1, 0, 1, 64, 65, 129)),
         *np.random.default_rng(0).integers(5000, 1_000_000, 12).tolist()]


def in_threads(count, work, *args):
    torch.set_num_threads(count)
    return work(*args)


# ------------------------------------------------------------------------------------------- silu

def there_and_back(function, x, grad):
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


def assert_silu(dtype, sizes, threads):
    ours = model._SiLU()
    for n in sizes:
        x, grad = torch.randn(2, n, generator=torch.Generator().manual_seed(n)).mul(3).to(dtype)
        stock = in_threads(1, there_and_back, silu, x, grad)
        for count in threads:
            found = in_threads(count, there_and_back, ours, x, grad)
            for what, a, b in zip(("forward", "backward"), found, stock):
                assert torch.equal(a, b), f"{what}: {n} elements, {count} threads"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_is_that_of_one_thread(dtype):
    """C01: stock silu's bits at one thread, forward and backward, whatever the size. torch's own
    fails from 2 threads up."""
    assert_silu(dtype, SIZES[:130:9] + SIZES[130:], (3, 8))


@slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_of_all_sizes_and_threads(dtype):
    """As above, with more of both."""
    assert_silu(dtype, [*range(5001), *SIZES], (1, 16))
    assert_silu(dtype, SIZES, THREADS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_where_it_is_used(dtype):
    """Without gradients, in inference mode, under autocast (whose product it gets), of memory with
    gaps, under activation checkpointing, copied, of nothing; and it has no parameters to save."""
    torch.set_num_threads(3)
    ours, x = model._SiLU(), torch.randn(50, 1001).to(dtype)
    right = in_threads(1, silu, x)
    torch.set_num_threads(3)
    for context in torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with context:
            found = copy.deepcopy(ours)(x)
        assert found.dtype == dtype and torch.equal(found, right)
    with torch.inference_mode():
        assert torch.equal(ours(x.clone()), right)
    assert torch.equal(ours(x.T), in_threads(1, silu, x.T.contiguous()))
    torch.set_num_threads(3)
    assert torch.equal(ours(x[:, :512]), silu(x[:, :512].clone()))
    assert ours(x[:, :0]).shape == (50, 0) and not ours.state_dict()
    grad = torch.randn_like(x)
    plain = there_and_back(ours, x, grad)
    again = there_and_back(lambda x: checkpoint(ours, x, use_reentrant=False), x, grad)
    assert all(map(torch.equal, plain, again))
    # A gradient that is one number, expanded, is no contiguous one.
    one = there_and_back(ours, x, torch.ones((), dtype=dtype).expand_as(x))
    assert all(map(torch.equal, one, there_and_back(ours, x, torch.ones_like(x))))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_layer_has_it(architecture, tmp_path):
    """`cut_into_stages` puts it into all layers, those of every stage, and a copy and a saved
    folder are as ever; a model with another activation keeps its own."""
    cut = cut_into_stages(attach(small_model(architecture)), ["cpu", "cpu"])
    for whose in (cut, frozen_copy(cut, torch.bfloat16)):
        layers = [layer for _, stage in whose.stages for layer in stage.layers]
        assert [type(layer.mlp.act_fn) for layer in layers] == [model._SiLU] * 2
    cut.save_pretrained(tmp_path)
    again = type(cut).from_pretrained(tmp_path)
    assert again.state_dict().keys() == cut.state_dict().keys()
    other = cut_into_stages(attach(small_model(architecture, hidden_act="gelu")), ["cpu"])
    assert not any(isinstance(module, model._SiLU) for module in other.modules())


# ------------------------------------------------------------------- every operation of a pass

def digest(values):
    """Of all tensors' bits, a sparse one's indices and values, and of the rest as text."""
    found = []
    for x in tree_leaves(values):
        if not isinstance(x, torch.Tensor):
            found.append(repr(x) if isinstance(x, (int, float, bool)) else "")
        elif x.is_sparse:
            found += digest([x._indices(), x._values()])
        else:
            x = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
            found.append(hash(x.view(torch.uint8).numpy().tobytes()))
    return found


class Record(TorchDispatchMode):
    """Digests of what each operation takes in and gives. silu counts as one, though its two calls
    are other ones with other threads."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.calls = []
        in_two = getattr(model, "_in_two", None)

        def whole(kernel, name, *inputs):
            with _disable_current_modes():
                return self.called(kernel, in_two, (kernel, name, *inputs), {}, inputs)
        if in_two:
            monkeypatch.setattr(model, "_in_two", whole)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.called(function, function, args, kwargs or {}, (args, kwargs))

    def called(self, name, function, args, kwargs, given):
        before, output = digest(given), function(*args, **kwargs)
        # What an empty tensor holds, and where a copy's storage lies, is no matter of threads.
        if not str(name).startswith(("aten.empty", "aten.new_empty", "aten.set_")):
            shapes = [tuple(x.shape) for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            self.calls.append((f"{name} of {shapes}", before, digest([output, given])))
        return output


def a_pass(policy, rows):
    """Prefill and decode of `rows` responses, then a packed pass over ragged ones, with gradients,
    as the trainer's. Returns what ended, log-probs and gradients."""
    prompts = [ids(3 + n % 9, n) for n in range(-(-rows // 4))]
    wanted = [min(4, rows - 4 * n) for n in range(len(prompts))]
    generator = InferenceCopy(frozen_copy(policy), [], rows=rows, longest_prompt=12,
                              max_new_tokens=4)
    for n, (prompt, k) in enumerate(zip(prompts, wanted)):
        uniforms = np.random.default_rng(n).random((k, 4), dtype=np.float32)
        generator.submit(n, prompt, uniforms)
    ended = []
    while not generator.idle:
        ended += step(generator)
    responses = [[tokens[:1 + k % 4] for m, k, tokens, _, _ in ended if m == n]
                 for n in range(len(prompts))]
    policy.get_input_embeddings().sparse = True  # and gradients that exist: as in the trainer
    for p in policy.parameters():
        p.grad = torch.zeros_like(p)
    logprobs = token_logprobs(policy, pack(prompts, responses, multiple=8))
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return ended, logprobs.detach(), [p.grad for p in policy.parameters()]


def recorded(policy, rows):
    with pytest.MonkeyPatch.context() as monkeypatch, Record(monkeypatch) as record:
        a_pass(policy, rows)
    return record.calls


def wide_model(architecture, width):
    """Wide enough for torch to use several threads, whose parts of silu end anywhere."""
    return cut_into_stages(attach(small_model(
        architecture, hidden_size=width, intermediate_size=8 * width // 3 // 8 * 8 + 8,
        num_attention_heads=width // 32, num_key_value_heads=width // 64,
        vocab_size=3001).train()), ["cpu"])


@pytest.mark.parametrize(("architecture", "width", "rows", "threads"), [
    ("llama", 576, 16, (3,)), ("qwen2", 128, 64, (3, 8)),
    *(pytest.param(architecture, width, rows, (2, 3, 4, 6, 8, 16), marks=slow)
      for architecture in ("llama", "qwen2") for width in (128, 576) for rows in (13, 40, 64))])
def test_no_operation_depends_on_threads(architecture, width, rows, threads):
    """C01: the first operation that gives other bits for the same inputs is named. Stock silu is,
    with 3 threads."""
    policy = wide_model(architecture, width)
    one = in_threads(1, recorded, policy, rows)
    assert len(one) > 500
    for count in {min(count, exact_threads(policy, 16)) for count in threads}:
        calls = in_threads(count, recorded, policy, rows)
        for number, ((name, given, result), call) in enumerate(zip(one, calls)):
            if call[:2] == (name, given):
                assert call[2] == result, f"operation {number} with {count} threads: {name}"
        assert len(calls) == len(one)


@pytest.mark.parametrize("rows", [
    1, 2, 3, 5, 7, 8, 9, 16, 33, 64, *(pytest.param(rows, marks=slow) for rows in (
        4, 6, *range(10, 16), 23, 24, 25, 31, 32, 47, 48, 63))])
def test_bits_do_not_depend_on_threads(rows):
    """Lent cores change no bit: prefill and decode of 1 to 64 rows, and a packed pass over as many
    ragged responses, its gradient included, are the same with any number of threads."""
    policy = wide_model("llama", 192)
    one = in_threads(1, a_pass, policy, rows)
    for count in {min(count, exact_threads(policy, 16)) for count in (2, 3, 8)}:
        ended, logprobs, grads = in_threads(count, a_pass, policy, rows)
        assert ended == one[0] and torch.equal(logprobs, one[1])
        assert all(map(torch.equal, grads, one[2]))


def test_no_more_threads_than_are_exact(tmp_path):
    """Products of few columns: with the threads allowed those of a pass's fewest rows are one
    thread's, never more than asked for; and a side works on no more."""
    policy = wide_model("llama", 128)
    assert [exact_threads(policy, most) for most in (1, 2)] == [1, 2]
    most = exact_threads(policy, 16)
    weights = [layer.weight for layer in model._linears(policy)]
    for rows in (8, 16, 40, 64):
        def products():
            return [(torch.ones(rows, w.shape[1]).cumsum(0) / 7 @ w.T).detach() for w in weights]
        one = in_threads(1, products)
        for count in range(1, most + 1):
            assert all(map(torch.equal, in_threads(count, products), one)), (rows, count)
    worker = Worker("train", Timeline(tmp_path / "trace.json"), most=1)
    assert asyncio.run(worker.run("train", torch.get_num_threads)) == 1


# ------------------------------------------------------------------------------ models and runs

@pytest.mark.parametrize("counts", [(2, 3), pytest.param(range(1, 9), marks=slow)], ids=str)
def test_the_built_in_model_is_one(monkeypatch, counts):
    """C02: whatever the number of cores of the machine that warms it up. It was another one with 3
    threads than with 2."""
    monkeypatch.setattr(model, "TINY_STEPS", 8)
    seen = set()
    for count in counts:
        weights = hashlib.sha256()
        for p in in_threads(count, load, "tiny")[0].parameters():
            weights.update(p.detach().numpy().tobytes())
        seen.add(weights.hexdigest())
    assert len(seen) == 1


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory, random_folder):
    """The tokenizer of the embedded model with a random model of width 576, and a reward that tells
    its responses apart."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "reward.py").write_text(
        "async def varied(response, _):\n    return sum(map(ord, response)) % 3")
    for part in load(str(random_folder))[1], small_model(
            vocab_size=99, hidden_size=576, intermediate_size=1544, num_attention_heads=9,
            num_key_value_heads=3, bos_token_id=1, eos_token_id=2):
        part.save_pretrained(folder)
    return folder


# Enough tokens in a micro-batch for torch to use several threads.
FULL = {"prompts": 8, "samples": 16, "rows": 64, "micro_batch_groups": 8}


@pytest.mark.parametrize(("kind", "cores", "changes"), [
    ("warm", (1, 3), FULL | {"periods": 2}), ("random", (1, 3), FULL | {"periods": 1}),
    ("wide", (1, 3), {"periods": 1}),
    *(pytest.param(kind, (1, 2, 3, 4, 6, 8, 16), changes, marks=slow)
      for kind in ("warm", "random", "wide")
      for changes in ({}, FULL, FULL | {"inner_steps": 2, "loss": "dapo"}))])
def test_runs_do_not_depend_on_cores(request, tmp_path, monkeypatch, kind, cores, changes):
    """C01: both schedules with lent cores end in the same rollouts and weights for every number of
    cores. With stock silu they did not with 3, 6 and 8. The random models' responses are of all
    lengths, cut off or not."""
    folder, seen = request.getfixturevalue(f"{kind}_folder"), {}
    if kind == "wide":
        changes = {"reward": f"{folder / 'reward.py'}:varied"} | changes
    for count in cores:
        monkeypatch.setattr(periodic_async, "CORES", count)
        for schedule in ("async", "sync"):
            result = train(config(folder, tmp_path, schedule=schedule, **changes))
            seen.setdefault(hashes(result), []).append((count, schedule))
    assert len(seen) == 1, list(seen.values())


# ------------------------------------------------------------------------------------------ cores

@pytest.mark.parametrize(("quota", "threads", "right"), [
    ("", None, 6), ("100000 100000", None, 1), ("250000 100000\n", None, 3),
    ("50000 100000", "", 1), ("max 100000", None, 6), ("900000 100000", None, 6),
    ("much", "many", 6), ("1 0", "0", 6), ("-1 100000", "-2", 6), ("", "2", 2), ("", "4,2", 4),
    ("300000 100000", "2", 2), ("300000 100000", "64", 3), ("max 100000", "7", 6)])
@pytest.mark.parametrize("version", [1, 2])
def test_usable_cores(tmp_path, monkeypatch, version, quota, threads, right):
    """C03: the fewest of affinity (here 6), the container's quota, rounded up, in cgroup v1 and v2,
    and OMP_NUM_THREADS; no file, no limit, or nonsense in one is no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    if quota and version == 2:
        (tmp_path / "cpu.max").write_text(quota)
    elif quota:
        (tmp_path / "cpu").mkdir()
        for name, word in zip(("quota", "period"), quota.split()):
            (tmp_path / "cpu" / f"cpu.cfs_{name}_us").write_text(f"{word}\n")
    assert usable_cores(tmp_path) == right
    assert periodic_async.CORES <= os.cpu_count()
