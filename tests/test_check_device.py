"""tests/check_device.py, on the CPU: all of its lines are there and pass, and each fails when what
it is for is broken. What only an accelerator has is stood in for: the counter of host reads, and
the memory in use, which is here that of all tensors there are."""
import gc
import json
import warnings

import check_device
import pytest
import torch

import attention
import model
import periodic_async

FLOATS = [f"{kind}, {dtype}" for dtype in ("float32", "bfloat16")
          for kind in ("shared", "dense", "repeat")]
LINES = {
    **{f"packed: {name}": "pass" for name in FLOATS},
    "decode: float32": "pass", "decode: bfloat16": "pass",
    "stages: one device twice": "pass", "stages: all devices": "not here",
    "streams: next prefill": "pass", "reads": "not here", "step: a decode step": "pass",
    "overlap: a period": "pass", "memory": "not here",
    "schedules: sync": "pass", "schedules: async": "pass", "schedules: equal": "pass"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("narrow")
    check_device.random_model(made, check_device.NARROW)
    return made


@pytest.fixture
def checked(folder, capsys):
    """checked(only) is (exit code, {line: result}, the JSON object) of the command."""
    def call(only, devices="cpu", model=folder):
        code = check_device.main(["--devices", devices, "--model", str(model), "--only", only])
        *table, last = capsys.readouterr().out.splitlines()
        said = json.loads(last)
        found = {what: record["result"] for what, record in said["checks"].items()}
        for what, result in found.items():
            assert any(line.startswith(result) and what in line for line in table)
        assert code == (1 if "fail" in found.values() else 0)
        return code, found, said
    return call


def test_every_line_is_there_and_passes(checked):
    """A line that is missing or fails on the CPU, with the model that the command makes itself."""
    code, found, said = checked("", model="")
    assert code == 0 and found == LINES
    assert said["checks"]["schedules: equal"] == {
        "result": "pass", "rollouts": True, "weights": True}
    assert said["checks"]["streams: next prefill"]["rounds"] == 20 and said["failed"] == []


def fails(found, *names):
    """These lines fail, and no other."""
    assert {name for name, result in found.items() if result == "fail"} == {*names}


def test_a_weight_copy_left_out(checked, monkeypatch):
    """An inference copy that says it is θ_t and is not."""
    monkeypatch.setattr(periodic_async, "copy_weights",
                        lambda src, dst, version: setattr(dst, "version", version))
    _, found, said = checked("streams")
    fails(found, "streams: next prefill")
    assert said["checks"]["streams: next prefill"]["stale"] > 10


def test_masks(checked, monkeypatch):
    """A dense mask that lets a response see the others; masks of `shared` that hide the last place
    of a prompt from its responses."""
    right = attention.Call.mask
    monkeypatch.setattr(attention, "shared_prompt_mask", lambda packed: torch.ones(
        len(packed.prompt_of_place), len(packed.prompt_of_place), dtype=torch.bool).tril())
    _, found, _ = checked("packed")
    assert {"packed: dense, float32"} <= {n for n, r in found.items() if r == "fail"}
    assert all(result == "pass" for name, result in found.items() if "dense" not in name)
    monkeypatch.undo()

    def hiding(call, dtype, device):
        mask = right(call, dtype, device)
        mask[..., call.before - 1] = False if dtype == torch.bool else -torch.inf
        return mask
    monkeypatch.setattr(attention.Call, "mask", hiding)
    _, found, _ = checked("packed")
    assert found["packed: shared, float32"] == found["packed: repeat, float32"] == "fail"
    assert found["packed: dense, float32"] == "pass"


def test_decoding_that_is_off(checked, monkeypatch):
    """Attention over the slots that scales its scores by other than the square root."""
    right = attention.Slots.attend
    monkeypatch.setattr(attention.Slots, "attend", lambda slots, layer, query, key, value, scaling:
                        right(slots, layer, query, key, value, 1.1 * scaling))
    _, found, _ = checked("packed,decode")
    assert found["decode: float32"] == "fail" and found["packed: shared, float32"] == "pass"


def test_a_stage_without_its_layers(checked, monkeypatch):
    right = model.cut_into_stages

    def short(policy, devices):
        right(policy, devices)
        if len(devices) == 2:
            policy.stages[0][1].layers = policy.stages[0][1].layers[:0]
        return policy
    monkeypatch.setattr(model, "cut_into_stages", short)
    _, found, _ = checked("stages", "cpu,cpu")
    fails(found, "stages: one device twice", "stages: all devices")


def test_a_check_that_raises(checked, monkeypatch):
    """The end of all checks with the first that raises: it is a fail in one line, with the error of
    the task group's inside, and the next goes on."""
    def broken(copy):
        raise RuntimeError("no such kernel\nand a long trace")
    monkeypatch.setattr(model.InferenceCopy, "prefill", broken)
    _, found, said = checked("decode,streams,stages")
    fails(found, "decode", "streams")
    for name in ("decode", "streams"):
        reason = said["checks"][name]["reason"]
        assert reason.startswith("RuntimeError: no such kernel (test_check_device.py:")
    assert found["stages: one device twice"] == "pass"


# ------------------------------------------------------------------ what a CPU has to be given

def in_use(_device=None):
    """Bytes of all tensors that a test has made, and of their gradients."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in tensors}.values())


@pytest.fixture
def accelerator(monkeypatch):
    """A CPU that tells what makes the host wait, and its memory."""
    plain = torch.Tensor.cpu

    def mode(wanted):
        def warned(x):
            warnings.warn("called a synchronizing operation", stacklevel=2)
            return plain(x)
        torch.Tensor.cpu = warned if wanted == "warn" else plain

    functions = {"set_sync_debug_mode": mode, "memory_allocated": in_use,
                 "max_memory_allocated": in_use, "reset_peak_memory_stats": lambda device: None}
    monkeypatch.setattr(check_device, "of_device", lambda device, name: functions[name])
    gc.collect()
    gc.freeze()  # what is there already is not looked through each time
    yield
    gc.unfreeze()
    torch.Tensor.cpu = plain


def test_reads_are_counted(accelerator, checked, monkeypatch):
    """A read in the middle of a pass: once a step and never in a micro-batch is a pass, another is
    a fail that names its line."""
    code, found, said = checked("reads")
    assert code == 0 and [*found] == ["reads: a prefill", "reads: a decode", "reads: a micro-batch"]
    named = [key for key in said["checks"]["reads: a decode"] if key.startswith("model.py:")]
    assert len(named) == 1
    right = periodic_async.grpo_loss

    def reading(logprobs, *others, **settings):
        logprobs.detach().cpu()
        return right(logprobs, *others, **settings)
    monkeypatch.setattr(periodic_async, "grpo_loss", reading)
    _, found, said = checked("reads")
    fails(found, "reads: a micro-batch")
    assert said["checks"]["reads: a micro-batch"]["reads"] == 1


def test_memory_by_part(accelerator, checked, monkeypatch):
    """A part that is not in the plan, or is there twice. (What a pass needs at its peak is not seen
    here: nothing is left of it when it is asked for. Nor are parts of less than the 64 MiB that are
    let pass, so the room is taken away.)"""
    monkeypatch.setattr(check_device, "ROOM", 1e-4)
    monkeypatch.setattr(check_device, "LONGEST", 32)
    right = model.plan

    def forgetful(**settings):
        figures = right(**settings)
        figures[0][2]["Adam"] /= 2
        return figures
    monkeypatch.setattr(model, "plan", forgetful)
    _, found, said = checked("memory")
    right = {f"memory: {part}" for part in (
        "parameters", "gradients", "reference", "copy's weights", "copy's slots")}
    assert right <= {name for name, result in found.items() if result == "pass"}, said["checks"]
    assert found["memory: Adam"] == "fail" and "memory: activations" in found
