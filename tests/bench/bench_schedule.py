"""A simulation of a period: which split of the devices into stages and copies is best, and why.

    python tests/bench/bench_schedule.py [MODEL] [--device 80GB] [--prompts 128] [--samples 16]
    python tests/bench/bench_schedule.py --micro-batches    # what --micro-batch-tokens makes of 7B

`simulate` is an event simulation of one period. With MODEL, a folder of a small model, its
constants are measured on this machine by short probes before and after each of three real periods,
never by the periods themselves, and what it predicts is printed beside what was measured. Then come
splits of 8 to 64 accelerators, all of it simulation, none of it run; `split` says what is assumed.
`sync` is the same split: each side's devices wait while the other side works.
"""
import argparse
import asyncio
import heapq
import itertools
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
import periodic_async
from attention import ComputedTokens
from grpo import Group, Response, draw_problems
from model import PREFILL_TOKENS, stage_edges
from periodic_async import Config, run_period, set_up


@dataclass(frozen=True)
class Period:
    """The work of a period, and the seconds of its parts while the other side rests."""
    prompts: Sequence[int]                  # tokens of each of the P prompts
    lengths: Sequence[Sequence[int]]        # tokens of the K responses to each
    decode: Callable[[int, float], float]   # a step; of rows in flight, places of the longest row
    prefill: Callable[[int], float]         # of the tokens of the prompts prefilled together
    forward: float                          # a packed token through all stages, the reference's too
    backward: float
    copies: int = 1
    rows: int = 64                          # of each copy
    stages: Sequence[float] = (1.0,)        # the share of the layers that each stage has
    micro_batch_groups: int = 1
    micro_batch_tokens: int = 8192
    copy: float = 0.0                       # of the weights, to all copies
    step: float = 0.0                       # of the optimizer
    generate_slower: float = 1.0            # factors while both sides work: on one CPU they share
    train_slower: float = 1.0               # the memory; 1 on separate devices


@dataclass(frozen=True)
class Outcome:
    """Of a simulated period. Busy shares are means over a side's devices, weight copy and step
    included; the rest is seconds."""
    seconds: float
    generate_busy: float
    train_busy: float
    bound: float          # of async over sync: (Tg + Tt) / max(Tg, Tt) of each side alone
    generate_alone: float
    train_alone: float
    started: float        # until the first micro-batch was complete
    tail: float           # from the last decode step to the end of the last backward pass


class Copy:
    """An inference copy's queue and rows, as `InferenceCopy` has them. A row in flight is (the step
    after which it ends, its prompt, places it attends to beyond the number of steps)."""

    def __init__(self, period: Period):
        self.period, self.steps, self.widest = period, 0, 0
        self.waiting, self.staged, self.live = deque(), deque(), []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.staged or self.live)

    @property
    def admits(self) -> bool:
        return bool(self.waiting) and not self.staged and len(self.live) < self.period.rows

    def advance(self, steps: int) -> float:
        """Prefill, or decode so many steps in which no response ends before the last. Seconds."""
        if not self.admits:
            self.steps += steps
            places = self.widest + self.steps - (steps - 1) / 2  # the mean of these steps
            return steps * self.period.decode(len(self.live), places)
        tokens, free = 0, self.period.rows - len(self.live)
        while self.waiting and len(self.staged) < free and tokens < PREFILL_TOKENS:
            prompt = self.waiting.popleft()
            tokens += self.period.prompts[prompt]
            self.staged.extend((prompt, length) for length in self.period.lengths[prompt])
        return self.period.prefill(tokens)

    def finish(self) -> list[int]:
        """Free the rows that ended, refill them. The prompts of the responses that ended."""
        ended, starting = [], True
        while starting:
            while self.live and self.live[0][0] <= self.steps:
                ended.append(heapq.heappop(self.live)[1])
            starting = min(self.period.rows - len(self.live), len(self.staged))
            for prompt, length in [self.staged.popleft() for _ in range(starting)]:
                # The first token came with the prefill: a response of one token ends here.
                heapq.heappush(self.live, (self.steps + length - 1, prompt,
                                           self.period.prompts[prompt] - self.steps))
        self.widest = max((row[2] for row in self.live), default=0)
        return ended


def generation(period: Period) -> Iterator[tuple[float, float, list[int]]]:
    """Steps of all copies at once, which end with the slowest (`Generator._advance`): seconds,
    share of the copies' time at work, prompts whose last response ended. Steps that end none are
    one."""
    copies = [Copy(period) for _ in range(period.copies)]
    longest = max(map(max, period.lengths))
    for prompt, lengths in enumerate(period.lengths):  # to the copy with the least waiting tokens
        min(copies, key=lambda copy: sum(period.prompts[p] + len(lengths) * longest
                                         for p in copy.waiting)).waiting.append(prompt)
    left = [len(lengths) for lengths in period.lengths]
    while busy := [copy for copy in copies if not copy.idle]:
        steps = (1 if any(copy.admits for copy in busy) else
                 min(copy.live[0][0] - copy.steps for copy in busy))
        seconds, complete = [copy.advance(steps) for copy in busy], []
        for prompt in itertools.chain.from_iterable(copy.finish() for copy in busy):
            left[prompt] -= 1
            if not left[prompt]:
                complete.append(prompt)
        share = sum(seconds) / (max(seconds) or 1) / period.copies
        yield max(seconds), share, complete


class Pipeline:
    """The trainer's stages. Each has a queue of passes [direction, micro-batch, seconds left] in
    the order of their launches, and runs the first as soon as its input is there."""

    def __init__(self, period: Period):
        self.period, self.groups, self.tokens, self.done = period, [], [], set()
        self.queues = [deque() for _ in period.stages]

    def consume(self, prompt: int) -> None:
        self.groups.append(prompt)
        if len(self.groups) == self.period.micro_batch_groups:
            self.launch()

    def launch(self) -> None:
        """Pack the waiting groups; too many tokens, as attention fills them up, are split, as
        `fitting` does. The time of a part is that of its tokens, without the filling."""
        rows = [(self.period.prompts[group], length, group) for group in self.groups
                for length in self.period.lengths[group]]
        parts, self.groups = [], []
        while rows:
            computed, tokens, before = ComputedTokens(), 0, None
            for number, (prompt, length, group) in enumerate(rows):
                if group != before and prompt:
                    computed.add(0, prompt)
                computed.add(prompt, length)
                if number and computed.total() > self.period.micro_batch_tokens:
                    rows = rows[number:]
                    break
                tokens, before = tokens + length + (0 if group == before else prompt), group
            else:
                rows = []
            parts.append(tokens)
        for tokens in parts:
            self.tokens.append(tokens)
            for queue, share in zip(self.queues, self.period.stages):
                queue.append(["F", len(self.tokens) - 1, tokens * share * self.period.forward])
            self.backward_passes(len(self.tokens) - 1)

    def backward_passes(self, newest: int) -> None:
        """1F1B, as `Trainer._back_by_one_stage` launches it."""
        last = len(self.queues) - 1
        for stage in reversed(range(last + 1)):
            number = newest - (last - stage)
            if 0 <= number < len(self.tokens):
                work = self.tokens[number] * self.period.stages[stage]
                self.queues[stage].append(["B", number, work * self.period.backward])

    def drain(self) -> None:
        self.launch()
        for later in range(len(self.queues) - 1):
            self.backward_passes(len(self.tokens) + later)

    def ready(self) -> list[tuple[int, list]]:
        """The stages that work, and at what. A forward pass needs that of the stage before, a
        backward pass that of the stage after; the last stage's follows its own forward pass."""
        return [(stage, queue[0]) for stage, queue in enumerate(self.queues) if queue and (
            stage == (0 if queue[0][0] == "F" else len(self.queues) - 1)
            or (queue[0][0], queue[0][1], stage + (-1 if queue[0][0] == "F" else 1)) in self.done)]


def simulate(period: Period, schedule: str) -> Outcome:
    """One period, `sync` or `async`. Scoring and the host's launches take no time."""
    generating, pipeline, waiting = generation(period), Pipeline(period), []
    now = started = generated = generate_busy = train_busy = 0.0
    step = next(generating)
    left = step[0]
    while (working := pipeline.ready()) or step:
        slow_g, slow_t = ((period.generate_slower, period.train_slower) if step and working
                          else (1.0, 1.0))
        passed = min([left * slow_g] * bool(step) + [item[2] * slow_t for _, item in working])
        now += passed
        train_busy += passed * len(working) / len(period.stages)
        for stage, item in working:
            item[2] -= passed / slow_t
            if item[2] < 1e-9:
                pipeline.done.add((item[0], item[1], stage))
                pipeline.queues[stage].popleft()
        if not step:
            continue
        generate_busy += passed * step[1]
        left -= passed / slow_g
        if left < 1e-9:
            waiting, generated, step = waiting + step[2], now, next(generating, None)
            left = step[0] if step else 0.0
            if schedule == "async" or not step:  # the schedules differ in this line
                for prompt in waiting:
                    pipeline.consume(prompt)
                waiting = []
            if not step:
                pipeline.drain()
            started = started or now * bool(pipeline.tokens)
    tail, end = now - generated, now + period.step + period.copy
    alone = (generated, tail)
    if schedule == "async":
        other = simulate(period, "sync")
        alone = other.generate_alone, other.train_alone
    return Outcome(end, (generate_busy + period.copy) / end, (train_busy + period.step) / end,
                   sum(alone) / max(alone), *alone, started, tail)


# What follows measures this machine, and predicts what it measured.

@dataclass(frozen=True)
class Measured:
    """A period that is measured: its lengths are uniform from `shortest` to `longest`."""
    schedule: str
    groups: int
    samples: int
    rows: int
    micro_batch_groups: int
    shortest: int
    longest: int

    def lengths(self, groups: int, seed: int) -> list[list[int]]:
        return np.random.default_rng(seed).integers(
            self.shortest, self.longest + 1, (groups, self.samples)).tolist()


SETTINGS = (Measured("sync", 6, 8, 32, 2, 8, 48), Measured("async", 8, 4, 8, 1, 16, 96),
            Measured("async", 8, 8, 16, 2, 8, 48))
PROBE_STEPS = 5   # decode steps of each of four shapes
PROBE_GROUPS = 2  # trained
COMPARED = ("seconds", "generate_busy", "train_busy")


def fix_lengths(copy) -> deque:
    """Responses to a prompt end after the lengths that the next item of the returned queue has when
    the prompt is submitted, and never before."""
    coming, wanted, submit = deque(), {}, copy.submit

    def submitted(ticket, prompt, uniforms):
        wanted[ticket] = coming.popleft()
        submit(ticket, prompt, uniforms)

    def stopped(row):
        return len(row.ids) == wanted[row.ticket][row.sample]
    copy.submit, copy._stopped = submitted, stopped
    return coming


async def rewards(problem, responses):
    return [float(n % 2) for n in range(len(responses))]


class Probes:
    """Short measurements of a run's parts, with each side's own thread and core."""

    def __init__(self, run, setting: Measured):
        self.run, self.setting = run, setting
        self.copy, = run.generator.copies
        self.coming = fix_lengths(self.copy)
        self.problems = draw_problems(run.problems, 0, 0, setting.groups)
        self.number, self.rng = itertools.count(), np.random.default_rng(1)

    async def steps(self, prompts: int, wide: bool) -> tuple[float, float]:
        """Seconds of a prefill of so many prompts, and of a decode step of all their responses."""
        worker, copy, most = self.run.generator.worker, self.copy, self.setting.longest
        step = self.run.generator._advance
        for problem in self.problems[:prompts]:
            self.coming.append([most if wide else PROBE_STEPS + 1] * self.setting.samples)
            copy.submit(next(self.number), problem.prompt_ids,
                        self.rng.random((self.setting.samples, most), dtype=np.float32))
        begun = time.perf_counter()
        await worker.run("prefill", step, [copy])
        prefilled = time.perf_counter()
        if wide:  # as if all but a few tokens of the longest responses had been sampled
            for row in copy.rows:
                row.ids += [0] * (most - PROBE_STEPS - len(row.ids))
        while not copy.idle:
            await worker.run("decode", step, [copy])
        return prefilled - begun, (time.perf_counter() - prefilled) / PROBE_STEPS

    async def training(self) -> float:
        """Seconds a packed token of micro-batches with lengths like the setting's, not its own."""
        trainer, groups, tokens = self.run.trainer, [], 0
        vocabulary = trainer.models.policy.vocab_size
        for lengths, problem in zip(self.setting.lengths(PROBE_GROUPS, seed=1), self.problems):
            # Random: one token again and again has gradients so small that arithmetic is slow.
            responses = tuple(Response(tuple(self.rng.integers(10, vocabulary, n).tolist()),
                                       (-1.0,) * n, True) for n in lengths)
            groups.append(Group(problem, responses, tuple(await rewards(problem, responses)), 0))
            tokens += len(problem.prompt_ids) + sum(lengths)
        begun = time.perf_counter()
        for group in groups:
            await trainer.consume(group)
        return (time.perf_counter() - begun) / tokens

    async def constants(self) -> dict[str, np.ndarray]:
        """Every constant once, in seconds, and the factors while both sides work."""
        full, trainer = self.setting.rows // self.setting.samples, self.run.trainer
        shapes = {(n, wide): await self.steps(n, wide) for n in (1, full) for wide in (0, 1)}
        found = {"shapes": np.array(list(shapes.values())), "training": await self.training()}
        begun = time.perf_counter()
        await trainer.step()
        found["step"] = time.perf_counter() - begun
        trainer.version = 0  # a period samples and trains the same version
        begun = time.perf_counter()
        await self.run.generator.update(trainer.models.policy, 0)
        found["copy"] = time.perf_counter() - begun
        if self.setting.schedule == "async":
            training, beside = asyncio.create_task(self.training()), []
            while not training.done() or len(beside) < 2:
                beside.append([await self.steps(full, wide) for wide in (0, 1)])
            alone = found["shapes"][2:]
            # The last steps ended after the training did: not counted.
            found["generate_slower"] = np.mean(beside[:-1], 0)[:, 1].sum() / alone[:, 1].sum()
            found["train_slower"] = training.result() / found["training"]
            trainer._start_period()
        return found

    def period(self, passes: Sequence[dict]) -> Period:
        """The setting as the simulation takes it, with the means of the passes as its constants."""
        found = {name: np.mean([one[name] for one in passes], 0) for name in passes[0]}
        setting, tokens = self.setting, [len(problem.prompt_ids) for problem in self.problems]
        prompts, shapes = np.repeat([1, setting.rows // setting.samples], 2), found.pop("shapes")
        rows = np.maximum(8, prompts * setting.samples)  # rows are filled up to multiples of 8
        narrow = (1 + PROBE_STEPS) / 2  # mean of the tokens each row has
        places = tokens[0] + np.array([narrow, setting.longest - narrow] * 2)
        base, row, place = np.linalg.lstsq(
            np.stack([np.ones(4), rows, rows * places], 1), shapes[:, 1], rcond=None)[0]
        first, token = np.linalg.lstsq(
            np.stack([np.ones(4), prompts * tokens[0]], 1), shapes[:, 0], rcond=None)[0]
        return Period(
            tokens, setting.lengths(setting.groups, seed=0),
            decode=lambda live, widest: base + -(-live // 8) * 8 * (row + place * widest),
            prefill=lambda prefilled: first + token * prefilled,
            forward=0.0, backward=found.pop("training"),  # one stage: only the sum matters
            rows=setting.rows, micro_batch_groups=setting.micro_batch_groups, **found)

    async def whole(self) -> dict[str, float]:
        """Metrics of the real period."""
        run, setting = self.run, self.setting
        self.coming.extend(setting.lengths(setting.groups, seed=0))
        run.timeline.open()
        await run_period(run.generator, run.trainer, self.problems, setting.samples, rewards,
                         setting.schedule == "async")
        metrics = run.timeline.close()
        run.trainer.version = self.copy.version = 0
        return metrics


def compare(model: str, setting: Measured, repeats: int) -> dict:
    """Predict and measure periods of a small model on this machine, a core a side: means. Probes
    come before and after each period, for the machine's speed drifts."""
    async def measured(run):
        probes, rounds = Probes(run, setting), []
        async with run.generator:
            await probes.steps(1, False)  # a warm-up: memory, and the optimizer's state
            await probes.training()
            await run.trainer.step()
            run.trainer.version = 0
            before = await probes.constants()
            for _ in range(repeats):
                metrics = await probes.whole()
                after = await probes.constants()
                predicted = vars(simulate(probes.period([before, after]), setting.schedule))
                rounds.append([(predicted[name], metrics[name]) for name in COMPARED])
                before = after
        return np.mean(rounds, 0).T

    with tempfile.TemporaryDirectory() as out:
        config = Config(model=model, prompts=setting.groups, samples=setting.samples, beta=0.04,
                        rows=setting.rows, max_new_tokens=setting.longest, periods=1, gap_limit=0.0,
                        learning_rate=1e-9, micro_batch_groups=setting.micro_batch_groups).checked()
        shared = periodic_async.thread("all cores")
        predicted, found = asyncio.run(measured(
            shared.submit(set_up, config, Path(out), shared).result()))
    return vars(setting) | {"predicted": predicted[0], "measured": found[0],
                            "error": predicted[0] / found[0] - 1,
                            "generate_busy": (predicted[1], found[1]),
                            "train_busy": (predicted[2], found[2])}


# What follows is simulation alone.

@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    saved: float          # bytes a token that one layer keeps for its backward pass (`model.plan`)
    parameters: float
    heads: int = 8        # of keys and values

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values in bfloat16, heads of 128."""
        return self.layers * 2 * self.heads * 128 * 2


@dataclass(frozen=True)
class Device:
    flops: float          # a second, bfloat16, peak
    bandwidth: float      # bytes a second, peak
    memory: float         # bytes


MODELS = {"7B": Model(28, 3584, 299e3, 7.6e9, 4), "8B": Model(36, 4096, 270e3, 8.2e9),
          "32B": Model(64, 5120, 442e3, 32.8e9)}
DEVICES = {"80GB": Device(989e12, 3.35e12, 80e9), "141GB": Device(989e12, 4.8e12, 141e9),
           "910B": Device(376e12, 1.6e12, 64e9)}
USABLE = 0.95             # of a device's memory
LONGEST, MEAN, SIGMA = 4096, 1000, 0.8  # response tokens: log-normal, cut at the longest
PROMPT, LONGEST_PROMPT = 256, 512


def log_normal(groups: int, samples: int, seed: int = 0, mean: int = MEAN,
               longest: int = LONGEST) -> list[list[int]]:
    rng, mu = np.random.default_rng(seed), np.log(mean) - SIGMA**2 / 2
    return rng.lognormal(mu, SIGMA, (groups, samples)).clip(1, longest).astype(int).tolist()


def rows_that_fit(model: Model, device: Device, most: int) -> int:
    """Rows of a copy on one device, a multiple of 8: bfloat16 weights and slots of full length."""
    free = USABLE * device.memory - 2 * model.parameters
    return max(0, min(most, int(free / (model.cache * (LONGEST_PROMPT + LONGEST))) // 8 * 8))


def stage_bytes(model: Model, stages: int, tokens: int) -> float:
    """Of the largest stage, the first: 18 bytes a parameter (float32 parameters, gradients and
    Adam, a bfloat16 reference), with recomputation the layers' inputs of the micro-batches that
    1F1B keeps, and what one layer saves (`model.plan`). Embedding and head count as layers do."""
    most = max(np.diff(stage_edges(model.layers, stages)))
    inputs = stages * most * 4 * model.hidden
    return 18 * model.parameters * most / model.layers + tokens * (inputs + model.saved)


def split(model: Model, device: Device, stages: int, copies: int, given) -> Period:
    """The period of one split. Assumed: decoding reads the weights and, for each row, the longest
    row's places, at a share of the bandwidth; the host costs nothing, as if a step were captured as
    a graph, which it is not yet. A token costs 4 FLOPs a parameter forward, policy and reference,
    and 6 backward with recomputation, at a share of the peak; attention's own, about 4 %, is left
    out. The weights go from every stage to every copy over one link a device, and a step moves 32
    bytes a parameter. One process drives all devices; `nodes_table` has a process a node."""
    flops, bandwidth = given.train_share * device.flops, given.decode_share * device.bandwidth
    token = model.parameters / flops
    return Period(
        [PROMPT] * given.prompts, log_normal(given.prompts, given.samples),
        lambda live, widest: (2 * model.parameters + live * widest * model.cache) / bandwidth,
        lambda tokens: 2 * token * tokens, 4 * token, 6 * token, copies=copies,
        rows=rows_that_fit(model, device, given.rows),
        stages=[n / model.layers for n in np.diff(stage_edges(model.layers, stages)).tolist()],
        micro_batch_tokens=given.micro_batch_tokens,
        copy=2 * model.parameters / given.link * max(1, copies / stages),
        step=32 * model.parameters / stages / bandwidth)


def why(name: str, period: Period, sync: Outcome, overlapped: Outcome) -> str:
    """In words: what keeps a split below its bound, largest first, and what slows its sides."""
    pipeline = Pipeline(period)
    for prompt in range(len(period.prompts)):
        pipeline.consume(prompt)
    work = sum(pipeline.tokens) * (period.forward + period.backward) / len(period.stages)
    longest = max(map(max, period.lengths))
    last = longest * period.decode(1, PROMPT + longest / 2)
    lost = {"before the first micro-batch": overlapped.started,
            "after the last response": overlapped.tail,
            "in weight copy and step": period.copy + period.step}
    parts = ", ".join(f"{lost[part]:.0f} {part}" for part in sorted(lost, key=lost.get)[::-1])
    return (f"{name} reaches {sync.seconds / overlapped.seconds:.2f}x of {sync.bound:.2f}x: of its "
            f"{overlapped.seconds:.0f} s pass {parts}. Alone, stages idle "
            f"{1 - work / sync.train_alone:.0%} of the training (micro-batches of "
            f"{min(pipeline.tokens)} to {max(pipeline.tokens)} tokens, the largest stage "
            f"{max(period.stages) * len(period.stages):.2f} times the mean), "
            f"and the longest response is {last / sync.generate_alone:.0%} of the generation.")


def table(name: str, device_name: str, number: int, given) -> str:
    """Print the splits of so many devices; returns the fastest, as stages+copies."""
    model, device, found = MODELS[name], DEVICES[device_name], {}
    rows = rows_that_fit(model, device, given.rows)
    print(f"\nsimulation: {name} on {number} devices of {device_name}, {rows} rows a copy\n"
          "stages+copies   bound    sync s   async s  speed-up  of bound  stages busy  copies busy")
    for stages in range(number // 8, min(number, model.layers + 1), number // 8):
        needed = stage_bytes(model, stages, given.micro_batch_tokens)
        label = f"{stages}+{number - stages}"
        if needed > USABLE * device.memory:
            print(f"{label:>13}   does not fit: a stage needs {needed / 1e9:.0f} GB")
            continue
        period = split(model, device, stages, number - stages, given)
        sync, fast = simulate(period, "sync"), simulate(period, "async")
        speedup = sync.seconds / fast.seconds
        found[label] = period, sync, fast
        print(f"{label:>13}{fast.bound:8.2f}{sync.seconds:10.1f}{fast.seconds:10.1f}{speedup:10.2f}"
              f"{speedup / fast.bound:10.0%}{fast.train_busy:13.0%}{fast.generate_busy:13.0%}")
    best = min(found, key=lambda label: found[label][2].seconds)
    bends = min(found, key=lambda label: found[label][1].seconds / found[label][2].seconds
                / found[label][2].bound)
    print(f"Fastest: {why(best, *found[best])}")
    if bends != best:
        print(f"Furthest from its bound: {why(bends, *found[bends])}")
    return best


def nodes_table(name: str, device_name: str, number: int, given) -> dict[str, float]:
    """Print and return seconds of an overlapped period of nodes of 8 devices, each with its share
    of the prompts, by stages+copies of a node. All wait for the slowest, and then for the sum of
    float32 gradients, which crosses each node's network 2 (n - 1) / n times."""
    model, device, found, nodes = MODELS[name], DEVICES[device_name], {}, number // 8
    summed = 4 * model.parameters / given.network * 2 * (nodes - 1) / nodes
    print(f"\nsimulation: {name} on {nodes} nodes of 8 devices of {device_name}, a process each; "
          f"the sum takes {summed:.1f} s\nstages+copies of a node   sync s   async s  speed-up")
    for stages in range(1, min(8, model.layers + 1)):
        if stage_bytes(model, stages, given.micro_batch_tokens) > USABLE * device.memory:
            continue
        whole = split(model, device, stages, 8 - stages, given)
        shares = [replace(whole, prompts=whole.prompts[node::nodes],
                          lengths=whole.lengths[node::nodes], step=whole.step + summed)
                  for node in range(nodes)]
        sync, fast = (max(simulate(share, schedule).seconds for share in shares)
                      for schedule in ("sync", "async"))
        found[f"{stages}+{8 - stages}"] = fast
        print(f"{f'{stages}+{8 - stages}':>23}{sync:9.1f}{fast:10.1f}{sync / fast:10.2f}")
    return found


def micro_batch_table(given) -> dict[str, list[float]]:
    """Print what --micro-batch-tokens makes of the README's 7B command, 32 prompts x 32 responses
    of 2,048 tokens at most on four stages and four copies of 910B: seconds of an overlapped period
    for three draws of the lengths, at three speeds of training."""
    sizes, found = (1024, 2048, 4096, 8192, 16384), {}
    print("\nsimulation: seconds of a period by --micro-batch-tokens, 7B on 4 + 4 devices of 910B\n"
          "mean length  of the peak  seed" + "".join(f"{size:>9}" for size in sizes))
    for mean, share, seed in itertools.product((500, 1000), (0.25, 0.4, 0.5), range(3)):
        seconds = []
        for size in sizes:
            given.micro_batch_tokens, given.train_share = size, share
            given.prompts, given.samples = 32, 32
            period = split(MODELS["7B"], DEVICES["910B"], 4, 4, given)
            period = replace(period, lengths=log_normal(32, 32, seed, mean, 2048))
            seconds.append(simulate(period, "async").seconds)
        found[f"{mean},{share},{seed}"] = seconds
        print(f"{mean:11}{share:13.0%}{seed:6}" + "".join(f"{x:9.1f}" for x in seconds))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    for name, default, what in (
            ("repeats", 1, "measured periods of each setting"),
            ("prompts", 128, "P"), ("samples", 16, "K"), ("rows", 64, "of a copy, at most"),
            ("micro-batch-tokens", 8192, "at most; a micro-batch is one group"),
            ("train-share", 0.4, "of the peak FLOPs"), ("decode-share", 0.6, "of the bandwidth"),
            ("link", 50e9, "bytes a second between two devices"),
            ("network", 25e9, "bytes a second between two nodes")):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=what)
    parser.add_argument("--device", default="80GB", choices=DEVICES, help="of the 8B setting")
    parser.add_argument("--micro-batches", action="store_true", help="that table alone")
    given = parser.parse_args()
    if given.micro_batches:
        return print(json.dumps({"simulation": True, "seconds": micro_batch_table(given)}))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    periodic_async.LENDING = False
    settings = [compare(given.model, setting, given.repeats)
                for setting in SETTINGS if given.model]
    if settings:
        print("\nsimulation beside measured periods, float32, a core a side: seconds and busy "
              "shares\nschedule  groups x samples  rows  groups a micro-batch  predicted  measured"
              "  error  generate busy  train busy")
    for s in settings:
        print("{schedule:8}{groups:10} x {samples}{rows:12}{micro_batch_groups:22}{predicted:11.1f}"
              "{measured:10.1f}{error:7.1%}".format(**s),
              *(f"{s[side][0]:8.0%}{s[side][1]:6.0%}" for side in COMPARED[1:]))
    print(f"\nsimulation: {given.prompts} prompts of {PROMPT} tokens x {given.samples} responses, "
          f"log-normal, mean {MEAN}, sigma {SIGMA}, cut at {LONGEST}; bfloat16; "
          f"{given.train_share:.0%} of the peak in training, {given.decode_share:.0%} of the "
          "bandwidth in decoding. A copy is one device, so 32B has devices of 141 GB, for its "
          "weights are 66 GB.")
    best = {name: {str(number): table(name, device, number, given) for number in (8, 16, 32, 64)}
            for name, device in (("8B", given.device), ("32B", "141GB"))}
    nodes = {name: {str(number): nodes_table(name, device, number, given)
                    for number in (16, 32, 64)}
             for name, device in (("7B", "910B"), ("8B", given.device), ("32B", "141GB"))}
    print(json.dumps({
        "simulation": True, "settings": settings, "best_split": best, "nodes": nodes,
        "largest_error": max((abs(s["error"]) for s in settings), default=None)}))


if __name__ == "__main__":
    main()
