"""--plan: what each device will hold, beside what it holds, and what the user is told of it."""
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from conftest import DTYPES, TIED, small_model

import model as model_module
import periodic_async
from attention import attach, pack
from model import (
    InferenceCopy,
    autocast,
    cut_into_stages,
    device_gib,
    frozen_copy,
    layer_bytes,
    memory_plan,
    plan,
    token_logprobs,
)
from periodic_async import Config, UserError, train

GIB = 2**30
QWEN7B = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
          "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
          "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False}
PLANNED = {"dtype": "bfloat16", "beta": 0.0, "recompute": True, "rows": 64, "samples": 8,
           "max_prompt_tokens": 512, "max_new_tokens": 1024, "micro_batch_tokens": 4096,
           "micro_batch_groups": 1}
TRAINED = ("parameters", "gradients", "Adam")


def parts_of(stages, copies, **settings):
    """What each role holds, with its layers."""
    roles = plan(train_devices=",".join(f"npu:{n}" for n in range(stages)),
                 rollout_devices=",".join(f"npu:{stages + n}" for n in range(copies)), **settings)
    return [{"layers": layers, **held} for _, layers, held in roles]


@pytest.fixture(scope="module")
def built():
    return []


@pytest.fixture
def seven(tmp_path, monkeypatch, built):
    """A 7B model's configuration; its weights are nowhere. Its modules are built once: it takes a
    third of a second."""
    folder, from_config = tmp_path / "seven", model_module.AutoModelForCausalLM.from_config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN7B))
    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_config",
                        lambda *given, **settings:
                        (built or built.append(from_config(*given, **settings)) or built)[0])
    return str(folder)


def near(*values):
    return pytest.approx(values, rel=0.02)


@pytest.mark.parametrize("count, held, reference, layers", [
    (1, (113.5,), (14.2 + 1.0,), ["0-27"]), (2, (56.7, 56.7), (7.1 + 1.0, 7.1), ["0-13", "14-27"]),
    (3, (39.4, 34.8, 39.4), (4.9 + 1.0, 4.3, 4.9), ["0-8", "9-18", "19-27"]),
    (4, (32.4, 24.3, 24.3, 32.4), (36.5 + 1.0 - 32.4, 3.0, 3.0, 36.5 - 32.4),
     ["0-6", "7-13", "14-20", "21-27"])])
def test_plan_of_a_7b_model(seven, count, held, reference, layers):
    """The arithmetic that decides how many devices a user buys: GiB by part and stage."""
    *parts, copy = parts_of(count, 1, model=seven, **PLANNED | {"beta": 0.1})
    assert [part["layers"] for part in parts] == layers
    for name, total in zip(TRAINED, (28.4, 28.4, 56.7)):
        assert sum(part[name] for part in parts) == pytest.approx(total, rel=0.02)
    assert [sum(part[name] for name in TRAINED) for part in parts] == near(*held)
    assert [part["reference"] for part in parts] == near(*reference)
    assert [part["head"] > 0 for part in parts] == [False] * (count - 1) + [True]
    assert copy["layers"] == "0-27" and copy["weights"] == pytest.approx(14.2 + 1.0, rel=0.02)
    tokens = 64 * (512 + 1024)
    assert copy["slots"] * GIB == pytest.approx(57_344 * tokens)


def test_plan_counts_the_settings(seven):
    """A part that does not follow its flag: no reference without beta, twice the tokens twice the
    activations, twice the bytes in float32, a copy for each rollout device."""
    def made(count=4, copies=1, **changes):
        return parts_of(count, copies, model=seven, **PLANNED | changes)
    base, full = made(), made(dtype="float32", beta=0.1)
    assert all(part["reference"] == 0 for part in base[:4])
    assert [part["reference"] for part in full[:4]] == pytest.approx(
        [part["parameters"] for part in full[:4]])
    assert full[4]["slots"] == 2 * base[4]["slots"]
    assert full[4]["weights"] == pytest.approx(sum(part["parameters"] for part in full[:4]))
    more, whole = made(micro_batch_tokens=8192), made(recompute=False)
    for stage in range(4):
        assert base[stage]["activations"] < more[stage]["activations"]
        assert more[stage]["activations"] < 2.01 * base[stage]["activations"]
        assert whole[stage]["activations"] > 3 * base[stage]["activations"]
    assert whole[0]["activations"] == pytest.approx(4 * whole[3]["activations"])  # 1F1B
    assert made(copies=3) == [*base, base[4], base[4]]


@TIED
@DTYPES
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_plan_is_what_is_held(tmp_path, architecture, dtype, tied):
    """The plan against the tensors: policy, reference and inference copy of a small model, byte for
    byte, whose tied weight counts once and stays in float32."""
    model = small_model(architecture, num_hidden_layers=4, tie_word_embeddings=tied)
    model.config.save_pretrained(tmp_path)
    settings = PLANNED | {"dtype": dtype, "beta": 0.1, "rows": 16, "max_prompt_tokens": 32,
                          "max_new_tokens": 48}
    *parts, copy = parts_of(3, 1, model=str(tmp_path), **settings)
    frozen = frozen_copy(attach(model), getattr(torch, dtype))

    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert sum(part["parameters"] for part in parts) * GIB == size(model.parameters())
    assert sum(part["reference"] for part in parts) * GIB == size(frozen.parameters())
    assert copy["weights"] * GIB == size(frozen.parameters())
    slots = InferenceCopy(frozen, [], rows=16, longest_prompt=32, max_new_tokens=48,
                          dtype=getattr(torch, dtype)).slots
    assert copy["slots"] * GIB == size([*slots.prompts, *slots.responses])


def live_bytes(model, packed, dtype):
    """What a forward pass leaves alive: casts of weights, and what its backward pass will need."""
    torch.autocast_increment_nesting()
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with (torch.profiler.profile(activities=on_cpu, profile_memory=True) as profile,
          autocast(torch.device("cpu"), dtype)):
        kept = token_logprobs(model, packed)
    torch.autocast_decrement_nesting()
    live = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    torch.clear_autocast_cache()
    del kept
    return live


@DTYPES
@pytest.mark.parametrize("lengths", [
    pytest.param([64] * 8, marks=pytest.mark.slow, id="even"),
    pytest.param([30] * 31 + [600], id="ragged")])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_plan_counts_what_a_layer_keeps(architecture, lengths, dtype):
    """C07: the bytes that the plan counts for a layer, a micro-batch and the casts of its weights,
    beside those that are alive after a forward pass, less those of fewer layers: within 10 %."""
    packed = pack([[1] * 40], [[[2] * n for n in lengths]], multiple=8)
    dtype, live = getattr(torch, dtype), {}
    for recompute in (False, True):
        for layers in (2, 4):
            model = cut_into_stages(attach(small_model(
                architecture, num_hidden_layers=layers, hidden_size=128, intermediate_size=256,
                num_attention_heads=4, num_key_value_heads=2).train()), ["cpu"])
            if recompute:
                model.activation_checkpointing_enable()
            live[recompute, layers] = live_bytes(model, packed, dtype)
    tokens, config = packed.input_ids.numel(), model.config
    casts = 2 * sum(w.numel() for w in model.model.layers[0].parameters() if w.dim() == 2)
    casts = casts if dtype == torch.bfloat16 else 0
    counted = {False: layer_bytes(config, tokens, len(packed.query_places),
                                  len(packed.key_places), dtype),
               True: 4 * config.hidden_size * tokens}
    for recompute, bytes_counted in counted.items():
        found = (live[recompute, 4] - live[recompute, 2]) / 2
        assert bytes_counted + casts == pytest.approx(found, rel=0.1)


def wanted(folder, train_devices="npu:0,npu:1,npu:2,npu:3", rollout_devices="npu:4", **changes):
    return Config(model=folder, train_devices=train_devices, rollout_devices=rollout_devices,
                  **PLANNED | changes)


def test_a_plan_that_fits(seven):
    """Devices that train and generate hold both; every device has its line in the table."""
    def planned(*changes):
        return memory_plan(**vars(wanted(seven, *changes)))
    table, totals, too_much = planned()
    assert list(totals) == ["npu:0", "npu:1", "npu:2", "npu:3", "npu:4"] and too_much == ""
    assert [line.split()[:2] for line in table.splitlines()] == [
        *([f"npu:{n}", "train"] for n in range(4)), ["npu:4", "generate"]]
    assert max(totals.values()) < 64
    shared = planned("npu:0,npu:1,npu:2,npu:3", "npu:1, npu:2")[1]
    for name in totals.keys() - {"npu:4"}:
        more = totals["npu:4"] if name in ("npu:1", "npu:2") else 0
        assert shared[name] == pytest.approx(totals[name] + more)
    apart, same = (planned("npu:1,npu,npu:2,npu:3", where)[1] for where in ("npu:4", "npu:0"))
    assert same["npu:0"] == pytest.approx(apart["npu:0"] + apart["npu:4"])  # npu is npu:0


@pytest.fixture
def nothing_loaded(monkeypatch):
    def never(*_, **__):
        raise AssertionError("weights were read")
    monkeypatch.setattr(periodic_async, "load", never)
    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_pretrained", never)


@pytest.fixture
def command_line(monkeypatch):
    """main, whose exit code is raised."""
    class Gone(BaseException):
        pass

    def leave(code):
        raise Gone(code)

    def run(*arguments):
        try:
            periodic_async.main(arguments)
        except Gone as gone:
            return gone.args[0]
        return 0
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return run


def flags(folder, out, *more):
    return ("--plan", "--model", folder, "--train-devices", "npu:0,npu:1,npu:2,npu:3", "--out",
            str(out), "--rollout-devices", "npu:4", "--dtype", "bfloat16", *more)


def test_plan_on_the_command_line(seven, tmp_path, capfd, nothing_loaded, command_line):
    """--plan prints the table and one JSON object, reads no weights, and leaves no folder."""
    assert command_line(*flags(seven, tmp_path / "out", "--recompute")) == 0
    *lines, last = capfd.readouterr().out.splitlines()
    assert sum(line.startswith("npu:") for line in lines) == 5
    assert all("GiB" in line or line.startswith("npu:") for line in lines)
    totals = json.loads(last)["plan"]
    assert list(totals) == [f"npu:{n}" for n in range(5)] and 32 < totals["npu:0"] < 64
    assert not (tmp_path / "out").exists()


def test_a_plan_that_does_not_fit(seven, tmp_path, capfd, nothing_loaded, command_line):
    """The table is printed all the same, then what is too much, and the flags that would help."""
    assert command_line(*flags(seven, tmp_path / "out", "--rows", "1024")) == 2
    printed = capfd.readouterr()
    assert sum(line.startswith("npu:") for line in printed.out.splitlines()) == 5
    error, = printed.err.splitlines()
    assert re.match(r"error: npu:0 would hold \d+\.\d GiB of 64; .*npu:4 would hold", error)
    for name in ("recompute", "dtype", "micro_batch_tokens", "rows", "beta"):
        assert f"--{name.replace('_', '-')}" in error and name in vars(Config())
    assert not (tmp_path / "out").exists()


def test_a_plan_needs_a_folder_or_hub_id(capfd, tmp_path, command_line):
    """No traceback for a model that has no configuration."""
    assert command_line("--plan", "--model", str(tmp_path), "--out", str(tmp_path)) == 2
    error, = capfd.readouterr().err.splitlines()
    assert f"no plan for the model {tmp_path}" in error


def test_a_run_that_cannot_fit_reads_no_weights(seven, tmp_path, monkeypatch, nothing_loaded):
    """On accelerators the plan comes before minutes of loading; memory is that of the device."""
    monkeypatch.setattr(periodic_async, "find_devices", lambda names: [SimpleNamespace(type="npu")])
    with pytest.raises(UserError, match=r"npu:0 would hold \d+\.\d GiB of 64"):
        train(wanted(seven, "npu:0", "npu:0", out=str(tmp_path)))
    assert device_gib("npu:0") == 64 and device_gib("cpu") > 0.5
    with pytest.raises(AssertionError, match="weights were read"):
        train(wanted(seven, out=str(tmp_path)))
