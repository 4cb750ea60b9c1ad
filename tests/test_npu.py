"""What a node of NPUs demands, on a machine that has none: a stub of the device, masks, host reads,
dtypes, memory while loading, and a model of the size of Qwen2.5-0.5B in stages.

The stub is PyTorch's own private backend under the name `npu`. A tensor on `npu:0` holds a tensor
of the host and hands every operation to it, and refuses what the hardware or PyTorch refuses:
float64, operands on two devices or on device and host, an operation without a device argument that
would make one. It counts what makes the host wait, and tells on which stream it computed. What it
is not: kernels of its own, streams that run beside each other, autocast (so float32 only),
`inference_mode` (here `no_grad`)."""
import ast
import collections
import itertools
import json
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import small_config
from test_periodic_async import ROOT, config
from torch.utils import backend_registration
from transformers import AutoModelForCausalLM

import attention
from model import InferenceCopy, cut_into_stages, find_devices, load
from periodic_async import Worker, train

aten = torch.ops.aten
READS = collections.Counter()  # (span, operation) -> how often the host waited for a device
STREAMS = collections.defaultdict(set)  # (span, device) -> the streams it computed on; 0: default
SPAN = threading.local()       # of the work, and the current stream of each device
OURS = ("grpo.py", "attention.py", "model.py", "periodic_async.py")


# ---------------------------------------------------------------------------- the stub of a device

class Npu(torch.Tensor):
    """A tensor on a stub device."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, device):
        if host.dtype == torch.float64:
            raise TypeError("float64 on the device")
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=device)
        made.host = host
        return made

    def data_ptr(self):
        return self.host.data_ptr()  # by which libraries tell tensors apart

    def __deepcopy__(self, memo):
        memo[id(self)] = made = Npu(self.host.clone(), self.device)
        vars(made).update({k: v for k, v in vars(self).items() if k != "host"})
        return made.requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op._can_decompose():
            return op.decompose(*args, **kwargs)
        if op is aten.copy_.default and isinstance(args[0], Npu):
            return copied(*args)
        return computed(op, args, dict(kwargs))


def copied(target, source, non_blocking=False):
    """The one operation between devices, for which the host need not wait if it is non_blocking,
    and from pinned memory. A target without memory, see `be_npus`, takes nothing."""
    if isinstance(source, Npu):
        used(source.device)
        source = source.host
    elif not (non_blocking and getattr(source, "pinned", False)):
        READS[span(), "copy to the device"] += 1
    if target.host.is_meta:
        source.sum()  # reads its pages
    else:
        target.host.copy_(source)
    return target


def each(function, x):
    if isinstance(x, (list, tuple)):
        return type(x)([each(function, part) for part in x])
    return function(x) if isinstance(x, torch.Tensor) else x


def waits(op, args, wanted):
    """Does the host wait for the device here?"""
    masks = args[1] if op in (aten.index.Tensor, aten.index_put_.default,
                              aten._index_put_impl_.default) else ()
    return (op in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default,
                   aten.masked_select.default, aten.copy_.default, aten._unique2.default)
            or (wanted is not None and wanted.type == "cpu")
            or any(mask is not None and mask.dtype == torch.bool for mask in masks))


def computed(op, args, named):
    """An operation on one device, through the tensors of the host that its tensors hold."""
    wrapper_of, places = {}, set()

    def host(x):
        if isinstance(x, Npu):
            places.add(x.device)
            wrapper_of[id(x.host)] = x
            return x.host
        if x.dim() and op is not aten.copy_.default:
            raise RuntimeError(f"{op} on a tensor of the host beside one of the device")
        return x

    def wrapped(x):
        return wrapper_of[id(x)] if id(x) in wrapper_of else Npu(x, where)
    wanted = named.pop("device", None)
    wanted = None if wanted is None else torch.device(wanted)
    given, named = each(host, args), {name: each(host, x) for name, x in named.items()}
    if len(places) > 1:
        raise RuntimeError(f"{op} on tensors of {sorted(map(str, places))}")
    where = wanted or places.pop()
    for device in {where, *places}:
        used(device)
    if waits(op, args, wanted):
        READS[span(), op.name()] += 1
    with torch.no_grad():
        found = op(*given, **named)
    if op is aten.copy_.default:
        return args[0]
    return found if where.type == "cpu" else each(wrapped, found)


def span():
    return getattr(SPAN, "name", "outside")


def used(where):
    STREAMS[span(), str(where)].add(getattr(SPAN, str(where), 0))


def pinned(x):
    made = x.clone()
    made.pinned = True
    return made


class Stream:
    """What stands for `torch.Stream`: each has a number."""
    numbers = itertools.count(1)

    def __init__(self, device):
        self.device, self.number = str(device), next(self.numbers)

    def __enter__(self):
        self.before = getattr(SPAN, self.device, 0)
        setattr(SPAN, self.device, self.number)

    def __exit__(self, *_):
        setattr(SPAN, self.device, self.before)


class Backend(backend_registration._DummyBackendModule):
    """What stands for `torch.npu`."""

    def device_count(self):
        return 4

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


LIBRARIES = []  # what is registered lasts as long as these


def be_npus(memory="cpu"):
    """Make this process one with four NPUs. With `memory` "meta" they keep nothing of what is
    copied to them, as a real one keeps nothing on the host."""
    backend_registration._setup_privateuseone_for_python_backend("npu", Backend())

    def made(function):
        def call(*shape, dtype=None, device=None, memory_format=None, **_):
            device = torch.device(device)
            return Npu(function(*shape, dtype=dtype, device=memory),
                       torch.device("npu", device.index or 0))
        return call
    library, rest = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name, function in (("empty.memory_format", torch.empty),
                           ("empty_strided", torch.empty_strided), ("arange", torch.arange),
                           ("arange.start", torch.arange), ("arange.start_step", torch.arange)):
        library.impl(name, made(function), "PrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    LIBRARIES.extend((library, rest))
    backward = torch.Tensor.backward

    def here(*args, **kwargs):  # autograd has a thread for npu:0 alone
        with torch.autograd.set_multithreading_enabled(False):
            backward(*args, **kwargs)
    torch.Tensor.backward = here
    torch.accelerator.synchronize = lambda device=None: None
    torch.inference_mode = torch.no_grad
    torch.Stream = Stream
    torch.Tensor.pin_memory = pinned


def watched_run():
    """Prints at the end of a run in which span the host waited, how often a copy's step was ended,
    and which streams of which devices were used in which span."""
    import periodic_async
    run, finish, whole, ended = Worker.run, InferenceCopy.finish, periodic_async.train, []

    async def spanned(worker, name, function, *args):
        def call():
            SPAN.name = name
            try:
                return function(*args)
            finally:
                SPAN.name = "outside"
        return await run(worker, name, call)

    def counted(copy):
        ended.append(copy.device)
        return finish(copy)

    def reported(*given):
        result = whole(*given)
        print("SEEN", json.dumps({"reads": [[*what, n] for what, n in READS.items()],
                                  "finished": len(ended),
                                  "streams": [[*what, *n] for what, n in STREAMS.items()]}))
        return result
    Worker.run, InferenceCopy.finish, periodic_async.train = spanned, counted, reported


PLANT = "sys.path.insert(0, 'tests'); import test_npu; test_npu."


def refused(call, *words):
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not refused: {words}")


def refusals():
    """Runs in a process with the stub: what it refuses, what it counts, and names of devices."""
    first, second = find_devices("npu:0, npu:1")
    assert (str(first), str(second)) == ("npu:0", "npu:1")
    assert [str(where) for where in (*find_devices("npu"), *find_devices(""))] == ["npu:0", "npu:0"]
    refused(lambda: find_devices("0"), "no device 0")
    x, y = torch.ones(2, device=first), torch.ones(2, device=second)
    refused(lambda: torch.zeros(2, dtype=torch.float64, device=first), "float64")
    refused(lambda: x.double(), "float64")
    refused(lambda: torch.tensor([1.0], dtype=torch.float64).to(first), "float64")
    refused(lambda: x + y, "npu:1")
    refused(lambda: x + torch.ones(2), "host")
    assert not READS
    for number, wait in enumerate((lambda: x[0].item(), x.cpu, lambda: x[x > 0],
                                   lambda: bool((x > 0).any()), x.nonzero), 1):
        wait()
        assert sum(READS.values()) >= number, number
    print("REFUSED", flush=True)
    os._exit(0)


def test_the_stub_refuses(child):
    """A stub that lets everything pass: float64, two devices, device and host are refused, reads
    are counted; `find_devices` finds its devices by their names."""
    started = child(f"{PLANT}be_npus(); test_npu.refusals()", config("tiny", ""))
    assert started.ended()[0] == 0, started.text("err")
    assert "REFUSED" in started.text("out")


# ------------------------------------------------------------------------------- runs on the stub

def settings(folder, out, kind, **changes):
    """Two stages, and two copies on devices of their own."""
    return config(folder, out, **{
        "prompts": 2, "samples": 3, "periods": 2, "seed": 1,
        "max_new_tokens": 3, "micro_batch_groups": 1,
        "prompt_template": "{question}", "reward": f"{folder}/reward.py:reward",
        "learning_rate": 1e-2, "train_devices": f"{kind}:0,{kind}:1",
        "rollout_devices": f"{kind}:2,{kind}:3", **changes})


def result_of(started, seconds=60):
    code, errors = started.ended(seconds)
    assert code == 0, errors[-4:]
    return json.loads(started.text("out").splitlines()[-1])


@pytest.mark.parametrize("tied, changes", [
    (True, {}), *(pytest.param(tied, changes, marks=pytest.mark.slow) for tied, changes in (
        (False, {"inner_steps": 2, "loss": "dapo"}), (False, {"inner_steps": 2, "loss": "dr_grpo"}),
        (True, {"attention": "dense", "beta": 0.0}), (False, {"attention": "repeat"}),
        (False, {"rollout_devices": "npu:1,npu:1"}),
        (False, {"micro_batch_tokens": 16, "micro_batch_groups": 2, "temperature": 0.7})))],
    ids=str)
def test_a_run_on_stub_npus(child, folders, tmp_path, tied, changes):
    """Tensors of two devices or of host and device in one operation, float64 on a device, an
    operation that makes the host wait in the middle of a pass: a run on four stub devices, two
    stages and two copies, samples the tokens of a CPU. While training nothing is read back, and in
    generation one tensor a step and copy. One stream for two sides or copies, which would wait for
    each other: a copy has one, beside the trainer's, and every update of a copy has others."""
    started = child(f"{PLANT}be_npus(); test_npu.watched_run()",
                    settings(folders[tied], tmp_path / "npu", "npu", **changes))
    expected = train(settings(folders[tied], tmp_path / "cpu", "cpu", **changes | {
        "train_devices": "cpu,cpu", "rollout_devices": "cpu,cpu"}))
    result = result_of(started)
    seen, = (json.loads(line[5:]) for line in started.text("out").splitlines()
             if line.startswith("SEEN"))
    streams = {(span, device): numbers for span, device, *numbers in seen["streams"]}
    shared = "rollout_devices" in changes
    assert {device for _, device in streams} == {"cpu", "npu:0", "npu:1"} | (
        set() if shared else {"npu:2", "npu:3"})
    generating = [streams.pop((span, device)) for device in (
        ["npu:1"] if shared else ["npu:2", "npu:3"]) for span in ("prefill", "decode")]
    copies = [{*numbers} for numbers in generating[::2]]
    assert copies == [{*numbers} for numbers in generating[1::2]] and 0 not in set().union(*copies)
    assert [len(numbers) for numbers in copies] == ([2] if shared else [1, 1])
    assert len(set().union(*copies)) == 2
    for device in ("npu:0", "npu:1"):
        assert streams["train", device] == streams["step", device] == [0]
        updates = streams["copy", device]
        assert len(updates) == 2 * 2 and not {0, *set().union(*copies)} & {*updates}
    reads = [(span, op, count) for span, op, count in seen["reads"]
             if span not in ("step", "outside")]
    assert {span for span, *_ in reads} <= {"prefill", "decode"}, reads
    assert {op for _, op, _ in reads} == {"aten::_to_copy"}
    assert sum(count for *_, count in reads) == seen["finished"] > 0
    assert result["logp_gap_max"] < 1e-4 and expected["logp_gap_max"] < 1e-4
    (found, later), (right, _) = (lines(tmp_path / kind / "metrics.jsonl")
                                  for kind in ("npu", "cpu"))
    for name in ("reward", "tokens", "entropy", "gradient_norm", "loss", "kl"):
        assert found[name] == pytest.approx(right[name], rel=1e-3, abs=1e-6), name
    assert later["kl"] > 1e-6 or changes.get("beta") == 0.0
    assert rolled(tmp_path / "npu") == rolled(tmp_path / "cpu")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rolled(folder):
    """The rollouts of the first period: later ones hang on how sums were rounded."""
    return [rollout for rollout in lines(folder / "rollouts.jsonl") if rollout["period"] == 0]


def test_place_keeps_a_tie_on_the_way_to_an_npu(child, folders):
    """An embedding and a head that were one weight on the CPU and are trained apart on the
    device: PyTorch's own rule for private backends, which `Module.to` follows."""
    started = child(f"{PLANT}be_npus(); test_npu.tied_and_placed({str(folders[True])!r})",
                    config("tiny", ""))
    assert started.ended() == (0, []) and "TIED" in started.text("out")


def tied_and_placed(folder):
    policy = cut_into_stages(load(folder)[0], find_devices("npu:0,npu:1"))
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    print("TIED", flush=True)
    os._exit(0)


# ---------------------------------------------------------------------------------- masks, names

@pytest.mark.parametrize("kind", [
    "shared", "dense", pytest.param("repeat", marks=pytest.mark.slow)])
def test_masks_for_the_fused_kernel(folders, tmp_path, monkeypatch, kind):
    """A float mask, which the kernels of an NPU refuse; a row that sees nothing, which is NaN; a
    causal flag with fewer queries than keys, which means another mask there; a head of queries
    that the keys do not divide: what every call of a run is given, recompute included."""
    calls, plain = [], attention.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        calls.append((attn_mask is None, is_causal))
        assert attn_mask is None or not is_causal
        assert dropout_p == 0.0 and query.dtype == key.dtype == value.dtype
        assert query.shape[-1] <= 512 and query.shape[1] % key.shape[1] == 0
        if is_causal:
            assert query.shape[2] == key.shape[2]
        else:
            assert attn_mask is not None, "a packed row needs a mask"
            assert attn_mask.dtype == torch.bool and attn_mask.device == query.device
            assert attn_mask.shape[-2:] == (query.shape[2], key.shape[2])
            assert attn_mask.any(-1).all(), "a row without a visible key"
            assert attn_mask[..., 0, 0].all() or attn_mask.shape[2] > key.shape[2]
        return plain(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **others)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(attention, "BOOLEAN", ("cpu",))
    train(settings(folders[False], tmp_path, "", attention=kind, train_devices="cpu,cpu",
                   rollout_devices="cpu", recompute=True))
    assert set(calls) == ({(False, False)} if kind == "dense" else {(True, True), (False, False)})


class Refuser:
    def __getattr__(self, name):
        raise AssertionError(f"torch.cuda.{name} was used")


def test_a_run_without_cuda(child, folders, tmp_path):
    """A call of `torch.cuda` that is not there on an NPU's machine: a run of two stages, saved and
    with inner steps, where every attribute of `torch.cuda` raises once all is imported."""
    started = child(f"{PLANT}without_cuda()", settings(
        folders[True], tmp_path / "run", "", inner_steps=2, save_every=1, recompute=True,
        train_devices="cpu,cpu", rollout_devices="cpu,cpu"))
    assert result_of(started)["periods"] == 2


def without_cuda():
    torch.cuda = Refuser()


@pytest.mark.parametrize("name", OURS)
def test_no_name_of_one_vendor(name):
    """A path of code for one kind of device: no attribute, argument or text of ours names cuda, but
    for the table of usual memory; no device is a number, which an NPU refuses."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("cuda", "npu", "is_cuda", "double"), node.lineno
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not any("cuda" in part or "npu" in part for part in found), node.lineno
        if isinstance(node, ast.keyword) and node.arg == "device":
            assert not isinstance(node.value, ast.Constant) or isinstance(node.value.value, str)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value == "cuda" or "cuda" not in node.value, node.lineno


# ----------------------------------------------------------------------------------------- memory

def owned():
    """Bytes of the process that no file backs: pages of a mapped checkpoint are the system's
    cache, which it takes back where memory is short."""
    found = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def loaded(folder, small, places):
    """Prints by how much the memory that the process owns grew at most while loading, and the size
    of the model."""
    load(small, find_devices(places))  # what is made once
    before, most, done = owned(), [0], threading.Event()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], owned())
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    model, _ = load(folder, find_devices(places))
    done.set()
    watcher.join()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print("LOADED", max(most[0], owned()) - before, size, flush=True)
    os._exit(0)


@pytest.fixture(scope="module")
def shards(folders, tmp_path_factory):
    """A model of a fifth of a GB in bfloat16, in shards, to be loaded as float32."""
    folder = tmp_path_factory.mktemp("shards")
    shutil.copytree(folders[False], folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_config(small_config(
        "qwen2", vocab_size=16384, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="64MB")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it tells the memory in use")
@pytest.mark.parametrize("places, memory", [
    ("npu:0,npu:1", "meta"), pytest.param("cpu,cpu", "cpu", marks=pytest.mark.slow)])
def test_memory_while_loading(child, folders, shards, places, memory):
    """A model that is on the host as a whole before it goes to its stages, which for 7B are 28 GiB:
    memory that the process owns grows by less than 1.3 of the largest shard above what stays on the
    host. That is the model on the CPU, and nothing on stub devices that keep nothing. Pages of the
    mapped files, which can be taken back, and a tensor's conversion on its way do not count."""
    plant = f"{PLANT}be_npus({memory!r}); test_npu.loaded({str(shards)!r}, "
    started = child(f"{plant}{str(folders[False])!r}, {places!r})", config("tiny", ""))
    assert started.ended()[0] == 0, started.text("err")
    line, = (line for line in started.text("out").splitlines() if line.startswith("LOADED"))
    grown, size = map(int, line.split()[1:])
    files = [path.stat().st_size for path in shards.glob("*.safetensors")]
    assert len(files) > 3 and size > 1.9 * sum(files)
    assert grown < 1.3 * max(files) + (size if memory == "cpu" else 0)


# --------------------------------------------------------------------------------- the real size

QWEN_05B = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "tie_word_embeddings": True}
NEEDED = 15  # GiB: 1.84 of weights, with gradients, Adam, reference and a copy six times, and room


def gib_free():
    try:
        line, = (line for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
    except (OSError, ValueError):
        return math.inf
    return int(line.split()[1]) / 2**20


@pytest.mark.slow
@pytest.mark.skipif(gib_free() < NEEDED, reason=f"{NEEDED} GiB of memory must be free")
def test_the_size_of_a_real_model_in_stages(child, random_folder, tmp_path):
    """Whatever shows at a real width, depth and vocabulary alone, such as chunks of the head: a
    model of the shape of Qwen2.5-0.5B, random, runs two periods on three stages with a reference.
    Its weights move in the first, and the inference copy moves with them."""
    folder = tmp_path / "model"
    shutil.copytree(random_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        small_config("qwen2", **QWEN_05B)).save_pretrained(folder, max_shard_size="1GB")
    plant = "import itertools; n = itertools.count(); pa.math_reward = lambda *_: next(n) % 2.0"
    started = child(plant, config(
        folder, tmp_path / "run", periods=2, prompts=2, samples=2, max_new_tokens=4, beta=0.1,
        micro_batch_groups=1, prompt_template="{question}", learning_rate=1e-4,
        train_devices="cpu,cpu,cpu", rollout_devices="cpu"))
    result = result_of(started, seconds=400)
    assert 4.9e8 < int(re.search(r"([\d,]+) parameters", started.text("out"))[1].replace(
        ",", "")) < 5e8
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    for metrics in (first, second):
        assert math.isfinite(metrics["loss"]) and 0 < metrics["gradient_norm"] < math.inf
        assert metrics["logp_gap_max"] < 1e-4 and metrics["bad_steps"] == 0
    assert result["logp_gap_max"] < 1e-4
    assert first["kl"] == 0 < 1e-6 < second["kl"]  # to the reference: the policy moved
