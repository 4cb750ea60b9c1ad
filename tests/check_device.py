"""What only hardware can show, in one command, for the owner of NPUs or GPUs.

    python tests/check_device.py [--devices npu:0,npu:1] [--model DIR] [--only packed,streams]

Without --devices those of the machine, else the CPU; the first trains, the second, if there is one,
generates. Without --model a random one of the shape of Qwen2.5-0.5B, made here in a temporary
folder; on the CPU one of three narrow layers. (Several runs' parts are on the first device: 64 GiB
have room for models of about 1B parameters.) Each line is a check with its figures and pass, fail
or "not here"; the last line is one JSON object. Exit code 0 when no check failed, else 1. A check
that raises is a fail with its reason in one line, and the others go on.

    packed     a micro-batch against the stock model in float32 on the CPU, a response at a time
    decode     log-probs of tokens sampled with a cache against one forward pass over them
    stages     layers on one device named twice, and on all devices
    streams    new weights are what the very next prefill computes with
    reads      how often the host waits for the device: once in a step of generation, never in a
               micro-batch
    step       milliseconds of a decode step: of the host until all is launched, on the device from
               its first operation to its last (where these are about equal, the device waits for
               the host), and until the tokens are read
    overlap    seconds of generation, of training, of both in turn and at once, and the bound
    memory     peaks against the figures of --plan, part by part
    schedules  three periods of each schedule; whether they are equal is stated, not demanded
"""
import argparse
import asyncio
import contextlib
import gc
import io
import json
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
import model as models
import periodic_async
from attention import attach, pack
from grpo import Group, Problem, Response, draw_problems
from model import InferenceCopy, TriModel, frozen_copy, load
from periodic_async import Config, Generator, Timeline, Trainer, Worker, run_period

QWEN_05B = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "initializer_range": 0.04}
NARROW = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
# A period, and how often a step is timed; on an accelerator, then on a CPU.
LARGE = {"prompts": 8, "samples": 8, "rows": 32, "max_new_tokens": 128, "max_prompt_tokens": 128}
SMALL = {"prompts": 3, "samples": 3, "rows": 8, "max_new_tokens": 8, "max_prompt_tokens": 64}
STEPS, ROUNDS = (40, 4), (1000, 20)
BUSY = 2048, 64  # the side of matrices whose product keeps a device busy
# The largest and the mean difference of log-probs, and the relative one of a gradient's norm. In
# bfloat16, on a CPU, SmolLM2-135M has 0.19, 0.043 and 0.004, 24 random layers of the width below
# 0.14 and 0.048; with a mask that lets responses see each other the latter have 4.0 and 0.86.
LIMITS = {"float32": (1e-3, 1e-4, 1e-3), "bfloat16": (1.0, 0.1, 0.05)}
ROOM = 1 / 16  # GiB that a part may be off, beside its share: a library's own memory
LONGEST = 128  # tokens of the prompt and of each of the 15 responses whose memory is measured
REWARD = "def reward(response, problem):\n    return sum(map(ord, response)) % 5 / 4\n"


class NotHere(Exception):
    """What a check needs is not on this machine."""


def random_model(folder, shape):
    """A model of Qwen2.5's kind, random in every parameter, and the built-in tokenizer of
    characters."""
    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim == 1:  # biases and norms
                p.add_(torch.randn_like(p) * 0.1)
    made.save_pretrained(folder)
    before, models.TINY_STEPS = models.TINY_STEPS, 0
    try:
        load("tiny")[1].save_pretrained(folder)
    finally:
        models.TINY_STEPS = before


def micro_batch(vocabulary):
    """Prompts and responses whose lengths no block of a kernel divides."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, vocabulary, n).tolist() for n in (41, 23)]
    return prompts, [[draw.integers(3, vocabulary, n).tolist() for n in lengths]
                     for lengths in ((17, 1, 30), (9, 26, 13))]


def gradient_norm(model, logprobs):
    """That of a fixed random combination of log-probs; the model has no gradients after it."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(7))
    model.zero_grad(set_to_none=True)
    (weights.to(logprobs.device) * logprobs).sum().backward()
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return math.hypot(*norms)


def compare(found, expected, limits, norms=None):
    """Differences of log-probs, and of a gradient's norm, against their limits."""
    gap = (found.detach().cpu() - expected.detach().cpu()).abs()
    values = {"largest": float(gap.max()), "mean": float(gap.mean())}
    if norms:
        values["gradient_norm"] = abs(norms[0] / norms[1] - 1)
    passed = all(value <= limit for value, limit in zip(values.values(), limits))  # NaN is not
    return passed, values


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def of_device(device, name):
    """A function that each kind of accelerator has in its own module: `torch.cuda`, `torch.npu`."""
    found = None if device.type == "cpu" else getattr(
        torch.get_device_module(device), name, None)
    if found is None:
        raise NotHere(f"a device of kind {device.type} has no {name}")
    return found


class Machine:
    """The devices and the model that are checked, and what several checks need."""

    def __init__(self, devices, folder, out):
        self.devices, self.folder, self.out = devices, folder, Path(out)
        self.device, self.generating = devices[0], devices[:2][-1]
        self.small = self.device.type == "cpu"
        self.steps, self.rounds, self.busy = (x[self.small] for x in (STEPS, ROUNDS, BUSY))
        (self.out / "reward.py").write_text(REWARD)
        with open(self.out / "data.jsonl", "w") as file:
            for n in range(64):
                worked = "".join(f"{n}+{i}={n + i}, " for i in range(n % 5 + 1))
                print(json.dumps({"question": f"{worked}{n}+9=", "answer": str(n + 9)}), file=file)

    def config(self, name, **changes):
        """A run's, in a folder of its own."""
        return Config(**{
            **(SMALL if self.small else LARGE), "model": str(self.folder), "periods": 1,
            "data": str(self.out / "data.jsonl"), "prompt_template": "{question}",
            "reward": f"{self.out / 'reward.py'}:reward", "micro_batch_groups": 1, "save_every": 0,
            "train_devices": str(self.device), "rollout_devices": str(self.generating),
            "learning_rate": 1e-12, "dtype": "bfloat16", "out": str(self.out / name),
            **changes}).checked()

    @cached_property
    def batch(self):
        prompts, responses = micro_batch(self.policy.config.vocab_size)
        return prompts, responses

    @cached_property
    def policy(self):
        return load(str(self.folder), [self.device])[0]

    @cached_property
    def expected(self):
        """Log-probs of the stock model on each prompt + response alone, on the CPU in float32, and
        the norm of the gradient."""
        stock = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        found = []
        for prompt, samples in zip(*self.batch):
            for sample in samples:
                logits = stock(torch.tensor([[*prompt, *sample]]), use_cache=False).logits[0]
                logprobs = logits[len(prompt) - 1:-1].log_softmax(-1)
                found.append(logprobs[range(len(sample)), sample])
        logprobs = torch.cat(found)
        return logprobs.detach(), gradient_norm(stock, logprobs)

    @cached_property
    def run(self):
        """The parts of a run in bfloat16, warmed up by a micro-batch."""
        config = self.config("parts")
        Path(config.out).mkdir(exist_ok=True)
        shared = periodic_async.thread("all cores")
        return shared.submit(periodic_async.set_up, config, Path(config.out), shared,
                             ragged_generator).result()

    def groups(self, run):
        """Groups that the run's own inference copy samples, step by step in this thread."""
        copy, config, problems = run.generator.copies[0], run.config, run.problems
        draw = np.random.default_rng(0)
        for number in range(config.prompts):
            copy.submit(number, problems[number].prompt_ids, draw.random(
                (config.samples, config.max_new_tokens), dtype=np.float32))
        found = {number: {} for number in range(config.prompts)}
        while not copy.idle:
            copy.launch()
            for number, sample, ids, logprobs, finished in copy.finish():
                found[number][sample] = Response(tuple(ids), tuple(logprobs), finished)
        return [Group(problems[number], tuple(of[k] for k in sorted(of)),
                      tuple(k % 2.0 for k in range(len(of))), run.trainer.version)
                for number, of in found.items()]


def ragged_generator(*args):
    """The built-in one, but every 16th token ends a response: a model of random weights would
    write on to the limit, and all groups would end at once."""
    made = periodic_async.built_in_generator(*args)
    for copy in made.copies:
        copy.stop |= set(range(0, copy.model.config.vocab_size, 16))
    return made


# ---- The checks. Each yields (what, did it pass, its figures) for each of its lines; passed is
# None for "not here".

def packed(machine):
    for dtype in LIMITS:
        for kind in ("shared", "dense", "repeat"):
            attach(machine.policy, "dense" if kind == "dense" else "shared")
            batch = pack(*machine.batch, share=kind != "repeat", multiple=8)
            tri = TriModel(machine.policy, dtype=getattr(torch, dtype))
            found = tri.score(machine.policy, batch)
            norm = gradient_norm(machine.policy, found)
            expected, its_norm = machine.expected
            yield f"{kind}, {dtype}", *compare(found, expected, LIMITS[dtype], (norm, its_norm))
    attach(machine.policy, "shared")


def decode(machine):
    for name in LIMITS:
        dtype, prompts = getattr(torch, name), machine.batch[0]
        copy = InferenceCopy(frozen_copy(machine.policy, dtype), [], rows=8, longest_prompt=64,
                             max_new_tokens=20, dtype=dtype)
        draw = np.random.default_rng(1)
        for number, prompt in enumerate(prompts):
            copy.submit(number, prompt, draw.random((6, 20), dtype=np.float32))
        ended = []
        while not copy.idle:
            copy.launch()
            ended += copy.finish()
        ended.sort(key=lambda response: response[:2])
        responses = [[ids for number, _, ids, *_ in ended if number == n]
                     for n in range(len(prompts))]
        sampled = torch.tensor([x for _, _, _, logprobs, _ in ended for x in logprobs])
        with torch.no_grad():
            whole = TriModel(machine.policy, dtype=dtype).score(
                machine.policy, pack(prompts, responses, multiple=8))
        yield name, *compare(whole, sampled, LIMITS[name])


@contextlib.contextmanager
def counted_reads(device):
    """A counter of the operations for which the host waits, by the line that calls them. C++ warns
    once for each of them; what is off the main thread counts, too, for the filters are global."""
    set_mode, reads = of_device(device, "set_sync_debug_mode"), Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            yield reads
        finally:
            set_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            reads[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def reads(machine):
    run = machine.run
    of_device(machine.device, "set_sync_debug_mode")
    groups = machine.groups(run)  # a warm-up, too
    asyncio.run(run.trainer.consume(groups[0]))
    copy, uniforms = run.generator.copies[0], np.full((4, 8), 0.5, dtype=np.float32)
    copy.submit(0, run.problems[0].prompt_ids, uniforms)
    for name in ("prefill", "decode"):
        with counted_reads(copy.device) as found:
            copy.launch()
            copy.finish()
        yield f"a {name}", sum(found.values()) == 1, {"reads": sum(found.values()), **found}
    while not copy.idle:
        copy.launch()
        copy.finish()
    with counted_reads(machine.device) as found:
        asyncio.run(run.trainer.consume(groups[1]))
    yield "a micro-batch", not found, {"reads": sum(found.values()), **found}
    asyncio.run(run.trainer.step())


def stages(machine):
    batch = pack(*machine.batch, multiple=8)
    whole = TriModel(machine.policy).score(machine.policy, batch)
    norm = gradient_norm(machine.policy, whole)
    for name, devices in (("one device twice", [machine.device] * 2),
                          ("all devices", machine.devices)):
        if len(devices) < 2:
            yield name, None, {"reason": "one device"}
            continue
        policy = load(str(machine.folder), devices)[0]
        found = TriModel(policy).score(policy, batch)
        passed, values = compare(found, whole, (1e-5, 1e-5, 1e-4),
                                 (gradient_norm(policy, found), norm))
        yield name, passed, {**values, "same_bits": torch.equal(found.cpu(), whole.cpu())}


def streams(machine):
    """Weights are written on the trainer's stream, behind work that keeps it busy; then comes the
    program's own update, then a prefill. One that read the weights of the round before, or a part
    of them, has another log-prob than the one that these weights had when all was waited for."""
    device, kinds, rounds = machine.device, 7, machine.rounds
    torch.manual_seed(1)
    policy = models.cut_into_stages(attach(AutoModelForCausalLM.from_config(Qwen2Config(
        **NARROW, tie_word_embeddings=True)).train()), [device])
    states = [[torch.randn(p.shape).mul_(0.3).to(device) for p in policy.parameters()]
              for _ in range(kinds)]
    busy = torch.ones(machine.busy, machine.busy, device=device)
    timeline = Timeline(machine.out / "streams.json")
    train, generate = Worker("train", timeline), Worker("generate", timeline)
    copy = InferenceCopy(models.cut_into_stages(frozen_copy(policy), [machine.generating]), [],
                         rows=8, longest_prompt=16, max_new_tokens=1)
    problem = Problem(tuple(range(3, 16)), "", 0)

    @torch.no_grad()
    def write(kind, wait):
        for _ in range(0 if wait else 20):
            busy @ busy
        for p, value in zip(policy.parameters(), states[kind]):
            p.copy_(value)
        if wait:
            synchronize(device)

    async def first_logprob(generator, number, wait):
        await train.run("step", write, number % kinds, wait)
        await generator.update(policy, number)
        if wait:
            synchronize(copy.device)
        response, *_ = await generator.generate(problem, 1, temperature=0)
        return response.logprobs[0]

    async def all_rounds():
        async with Generator([copy], generate, 0) as generator:
            expected = [await first_logprob(generator, number, True) for number in range(kinds)]
            return expected, [
                (number % kinds, await first_logprob(generator, number, False))
                for number in np.random.default_rng(0).integers(0, kinds, rounds).tolist()]
    expected, found = asyncio.run(all_rounds())
    apart = np.diff(sorted(expected)).min().item()
    stale = sum(not abs(value - expected[kind]) < min(1e-3, apart / 2) for kind, value in found)
    yield "next prefill", apart > 1e-4 and not stale, {
        "rounds": rounds, "stale": stale, "weights_apart": apart}


async def rewards(problem, responses):
    return [float(len(response.ids) % 2) for response in responses]


def overlap(machine):
    run = machine.run
    problems = draw_problems(run.problems, 0, 0, run.config.prompts)

    async def nothing(*_):
        return {}
    silent = SimpleNamespace(consume=nothing, step=nothing, models=run.trainer.models, version=0)

    async def measured():
        found, groups = {}, []
        async with run.generator as generator:
            cases = {"warm_up": (generator, run.trainer, True),
                     "generation": (generator, silent, True),
                     "training": (None, run.trainer, True), "sync": (generator, run.trainer, False),
                     "async": (generator, run.trainer, True)}
            for name, (source, trainer, at_once) in cases.items():
                # The version is one, and the learning rate moves no weight: the same work.
                run.trainer.version = 0
                for copy in run.generator.copies:
                    copy.version = 0
                sampled = {g.problem.key: list(g.responses) for g in groups}

                async def replay(problem, samples, sampled=sampled):
                    return sampled[problem.key]
                source = source or SimpleNamespace(version=0, generate=replay, update=nothing)
                start = time.perf_counter()
                groups, _ = await run_period(source, trainer, problems, run.config.samples,
                                             rewards, at_once)
                found[name] = time.perf_counter() - start
        return found, sum(len(r.ids) for g in groups for r in g.responses)
    seconds, tokens = asyncio.run(measured())
    del seconds["warm_up"]
    alone = seconds["generation"], seconds["training"]
    values = {**seconds, "speed_up": seconds["sync"] / seconds["async"],
              "bound": sum(alone) / max(alone), "tokens": tokens}
    # A CPU's cores may be somebody else's; on an accelerator overlap must not cost much.
    yield "a period", machine.small or seconds["async"] < 1.25 * seconds["sync"], values


def memory(machine):
    """Of a run that is built part by part; the micro-batch has as many tokens as there may be."""
    device = machine.device
    allocated, peak, reset = (of_device(device, name) for name in (
        "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"))
    config = machine.config("memory", prompts=1, samples=15, micro_batch_tokens=16 * LONGEST,
                            max_prompt_tokens=LONGEST, max_new_tokens=LONGEST,
                            rollout_devices=str(device))
    figures = models.plan(**vars(config))
    planned = {**figures[0][2], **{f"copy's {k}": v for k, v in figures[1][2].items()}}
    found, before = {}, [allocated(device)]

    def note(part):
        synchronize(device)
        found[part] = (allocated(device) - before[0]) / 2**30
        before[0] = allocated(device)
    dtype = torch.bfloat16
    policy = load(str(machine.folder), [device])[0]
    note("parameters")
    reference = frozen_copy(policy, dtype)
    note("reference")
    frozen = frozen_copy(policy, dtype)
    note("copy's weights")
    copy = InferenceCopy(frozen, [], rows=config.rows, longest_prompt=config.max_prompt_tokens,
                         max_new_tokens=config.max_new_tokens, dtype=dtype)
    note("copy's slots")
    timeline = Timeline(machine.out / "memory.json")
    trainer = Trainer(TriModel(policy, reference=reference, dtype=dtype),
                      Worker("train", timeline), config)
    note("gradients")
    draw = np.random.default_rng(0)
    prompt, *samples = (draw.integers(3, policy.config.vocab_size, LONGEST).tolist()
                        for _ in range(16))
    group = Group(Problem(tuple(prompt), "", 0), tuple(
        Response(tuple(ids), (math.nan,) * LONGEST, False) for ids in samples),
        tuple(k % 2.0 for k in range(15)), 0)

    async def trained():
        reset(device)
        await trainer.consume(group)
        synchronize(device)
        found["activations"] = (peak(device) - before[0]) / 2**30
        await trainer.step()
    asyncio.run(trained())
    note("Adam")
    del copy
    planned["activations"] += planned.pop("head") + planned.pop("bfloat16 weights")
    for part, right in planned.items():
        here, low = found[part], 0.5 if part == "activations" else 0.9
        yield part, low * right - ROOM < here < 1.2 * right + ROOM, {
            "GiB": here, "planned_GiB": right}


def step(machine):
    run = machine.run
    copy, draw = run.generator.copies[0], np.random.default_rng(0)
    tokens = run.config.max_new_tokens
    timed(copy.device)  # or it is not here
    stop, copy.stop = copy.stop, set()  # every step has all rows
    for number in range(copy.max_rows // 8):
        copy.submit(number, run.problems[number].prompt_ids,
                    draw.random((8, tokens), dtype=np.float32))
    while copy.admits:
        copy.launch()
        copy.finish()
    host, whole, events = [], [], []
    for _ in range(min(machine.steps, tokens - 3)):
        synchronize(copy.device)
        pair = timed(copy.device)
        start = time.perf_counter()
        with copy.stream:
            pair[0].record()
        copy.launch()
        with copy.stream:
            pair[1].record()
        host.append(time.perf_counter() - start)
        copy.finish()
        whole.append(time.perf_counter() - start)
        events.append(pair)
    while not copy.idle:
        copy.launch()
        copy.finish()
    synchronize(copy.device)
    copy.stop = stop
    values = {"rows": copy.max_rows, "steps": len(host),
              "host_ms": 1e3 * float(np.median(host)), "whole_ms": 1e3 * float(np.median(whole))}
    if machine.small:
        values["device_ms"] = "not here"
    else:
        values["device_ms"] = float(np.median([a.elapsed_time(b) for a, b in events]))
    yield "a decode step", all(x > 0 for x in values.values() if x != "not here"), values


def timed(device):
    """Two events; on a CPU what does nothing."""
    if device.type == "cpu":
        return [SimpleNamespace(record=lambda: None)] * 2
    kind = of_device(device, "Event")
    return [kind(enable_timing=True) for _ in range(2)]


def schedules(machine):
    ended = {}
    for schedule in ("sync", "async"):
        config = machine.config(schedule, schedule=schedule, periods=3, learning_rate=1e-6)
        ended[schedule] = periodic_async.train(config, ragged_generator)
    for schedule, result in ended.items():
        passed = (result["periods"] == 3 and math.isfinite(result["reward_last"])
                  and result["logp_gap_max"] <= LIMITS["bfloat16"][0])
        yield schedule, passed, {name: result[name] for name in (
            "seconds", "tokens", "logp_gap_max", "generate_busy", "train_busy")}
    yield "equal", True, {name: ended["sync"][f"{name}_sha256"] == ended["async"][f"{name}_sha256"]
                          for name in ("rollouts", "weights")}


CHECKS = {check.__name__: check for check in (
    packed, decode, stages, streams, reads, step, overlap, memory, schedules)}
LAST = {"stages": "policy", "overlap": "run"}  # with these what several checks need is done with


# ---- The command

def shown(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def lines(name, machine):
    """(name, result, figures) of each of a check's lines. What the project prints on the way is
    not shown."""
    said, found = io.StringIO(), []
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            for what, passed, figures in CHECKS[name](machine):
                result = "not here" if passed is None else "pass" if passed else "fail"
                found.append((f"{name}: {what}", result, figures))
    except NotHere as reason:
        found.append((name, "not here", {"reason": str(reason)}))
    except Exception as raised:
        error = periodic_async.original(raised)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        found.append((name, "fail", {"reason": f"{type(error).__name__}: {first} "
                                               f"({Path(frame.filename).name}:{frame.lineno})"}))
        vars(machine).pop("run", None)  # it may have requests in flight; the next makes another
    return found


def accelerators():
    """The names of all there are, else the CPU's."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return [f"{here.type}:{n}" for n in range(torch.accelerator.device_count())] if here else [
        "cpu"]


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="", help="cuda:0,cuda:1; empty: all of the machine")
    parser.add_argument("--model", default="", help="a folder; empty: random weights")
    parser.add_argument("--only", default="", help=f"some of {','.join(CHECKS)}")
    given = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    devices = models.find_devices(given.devices or ",".join(accelerators()))
    begun, results = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as out:
        folder = given.model or f"{out}/model"
        if not given.model:
            random_model(folder, NARROW if devices[0].type == "cpu" else QWEN_05B)
        machine = Machine(devices, folder, out)
        for name in given.only.split(",") if given.only else CHECKS:
            start = time.perf_counter()
            for what, result, figures in lines(name, machine):
                results[what] = {"result": result, **figures}
                print(f"{result:8}  {what:28}  " + "  ".join(
                    f"{key} {shown(value)}" for key, value in figures.items()), flush=True)
            print(f"{'':10}{name} took {time.perf_counter() - start:.1f} s", flush=True)
            if name in LAST:
                vars(machine).pop(LAST[name], None)
                gc.collect()
    failed = [what for what, record in results.items() if record["result"] == "fail"]
    print(periodic_async.as_json({
        "devices": [str(device) for device in devices], "model": given.model or "random",
        "torch": torch.__version__, "seconds": time.perf_counter() - begun,
        "failed": failed, "checks": results}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
