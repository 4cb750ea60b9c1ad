"""Periodic asynchrony: on-policy GRPO in which generation and training overlap within a period.

    pip install -r requirements.txt && python periodic_async.py     # learns to add on a laptop
    python periodic_async.py --model DIR --data train.jsonl         # a real model, real problems

The weights θ move only between periods. Inside one, P coroutines generate on a frozen copy of θ_t
while the trainer accumulates gradients at θ_t from the groups that are complete. Every token is
on-policy, as in synchronous training, and both schedules give the same weights bit for bit.

The paper (arXiv 2511.18871) has a cluster and inference servers. Here are one process and one event
loop; generation and training each own a thread for the torch work, and on an accelerator a stream.
Who waits for what:
     produce     takes a problem; waits for `Generator.generate`; queues the scoring of its group
     Generator   prefills and decodes while any request waits; the end of a group wakes `produce`
     run_period  gives scored groups to `Trainer.consume` in the order in which their generation
                 ended; after P groups calls `Trainer.step`, the one optimizer step of the period
"""
import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from attention import Packed, attach, pack
from grpo import (CLOSING, LOSSES, Group, Problem, Response, arithmetic, draw_problems,
                  encode_prompt, group_advantages, group_metrics, grpo_loss, math_reward,
                  read_problems, token_weights)
from model import InferenceCopy, TriModel, copy_weights, device, frozen_copy, load, stop_ids

CLIP_NORM = 1.0       # global norm of a step's gradient
WARMUP_PERIODS = 5    # until the learning rate is reached, linearly
BAD_STEPS = 3         # steps in a row without a finite gradient that end the run
LENDING = True        # a side may use the other's CPU cores while the other has nothing to do
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
TINY = {"learning_rate": 2e-4, "max_new_tokens": 8, "micro_batch_groups": 4}
OTHER = {"learning_rate": 1e-6, "max_new_tokens": 512, "micro_batch_groups": 1}


class UserError(Exception):
    """A mistake in what the user gave: one sentence, exit code 2."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(value, help, choices=None):
    return field(default=value, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """A run. Every field is a flag; None stands for a default that depends on the model."""
    # what is trained, on what
    model: str = _default("tiny", "tiny (built in), a folder, or a hub id")
    data: str = _default("", "JSONL file or JSON array of problems; empty: sums of two digits")
    seed: int = _default(0, "decides problems, samples and the tiny model")
    # the schedule
    schedule: str = _default("async", "overlap generation and training, or not", ("async", "sync"))
    periods: int = _default(100, "optimizer steps, times --inner-steps")
    prompts: int = _default(16, "prompts a period, P")
    samples: int = _default(16, "responses a prompt, K")
    inner_steps: int = _default(1, "optimizer steps on the same groups, GRPO's mu")
    micro_batch_groups: int | None = _default(None, "groups a micro-batch (1; tiny: 4)")
    micro_batch_tokens: int = _default(16384, "packed tokens at most: one with more is split")
    recompute: bool = _default(False, "compute activations again in the backward pass")
    # rollouts
    max_prompt_tokens: int = _default(512, "longer prompts are skipped and counted")
    max_new_tokens: int | None = _default(None, "tokens a response at most (512; tiny: 8)")
    temperature: float = _default(1.0, "of sampling, and of the log-probs that are trained")
    rows: int = _default(64, "responses decoded at once")
    # the loss
    loss: str = _default("grpo", "how tokens are averaged", LOSSES)
    beta: float = _default(0.02, "weight of the KL to the reference; 0: no reference")
    clip_low: float = _default(0.2, "the ratio is clipped at 1 - this")
    clip_high: float = _default(0.2, "and at 1 + this")
    mask_truncated: bool = _default(False, "no gradient from responses cut off at the limit")
    learning_rate: float | None = _default(None, "of AdamW, after warm-up (1e-6; tiny: 2e-4)")
    # the machine
    attention: str = _default("shared", "a prompt: once a group; so too, by mask; once a response",
                              ("shared", "dense", "repeat"))
    dtype: str = _default("float32", "bfloat16: autocast", ("float32", "bfloat16"))
    train_devices: str = _default("", "cpu, cuda:0, npu:0, ..; empty: an accelerator, or cpu")
    rollout_devices: str = _default("", "empty: the same")
    out: str = _default("", "folder for metrics.jsonl and trace.json; empty: runs/<start time>")

    def checked(self) -> "Config":
        """With model-dependent defaults filled in. Raises ValueError naming the flag at fault."""
        defaults = TINY if self.model == "tiny" else OTHER
        config = dataclasses.replace(self, **{name: value for name, value in defaults.items()
                                              if getattr(self, name) is None})
        least = {"seed": 0, "samples": 2, "temperature": 1e-3, "beta": 0, "clip_low": 0,
                 "clip_high": 0, "learning_rate": 0}
        for f in dataclasses.fields(config):
            value, choices = getattr(config, f.name), f.metadata["choices"]
            low = least.get(f.name, 1)
            if choices and value not in choices:
                raise ValueError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value}")
            if not isinstance(value, (str, bool)) and not low <= value < float("inf"):
                raise ValueError(f"{flag(f.name)} must be {low} or more, not {value}")
        return config


class Timeline:
    """Who worked when in a period: spans (side, name, start, end), in seconds of the run. Written
    as a trace for chrome://tracing and Perfetto: an array, whose last bracket is optional."""

    def __init__(self, trace: Path):
        self.zero, self.start, self.end = time.perf_counter(), 0.0, 0.0
        self.spans: list[tuple[str, str, float, float]] = []
        self.file = open(trace, "w")
        print("[", file=self.file)

    def now(self) -> float:
        return time.perf_counter() - self.zero

    def open(self) -> None:
        """Begin a period."""
        self.start, self.spans = self.now(), []

    def busy(self, side: str, start: float, end: float) -> float:
        """The share of the time from start to end in which a side worked."""
        return sum(max(0.0, min(e, end) - max(s, start))
                   for who, _, s, e in self.spans if who == side) / (end - start)

    def close(self) -> dict[str, float]:
        """End the period. Returns its timing metrics."""
        self.end = self.now()
        for side, name, start, end in self.spans:
            event = {"name": name, "ph": "X", "pid": 0, "tid": side,
                     "ts": start * 1e6, "dur": (end - start) * 1e6}  # microseconds
            print(json.dumps(event) + ",", file=self.file)
        self.file.flush()
        trained = [s for _, name, s, _ in self.spans if name == "train"]
        decoded = [e for _, name, _, e in self.spans if name in ("prefill", "decode")]
        return {"seconds": self.end - self.start,
                "generate_busy": self.busy("generate", self.start, self.end),
                "train_busy": self.busy("train", self.start, self.end),
                "first_group_seconds": min(trained, default=self.end) - self.start,
                "tail_seconds": self.end - max(decoded, default=self.end),
                "copy_seconds": sum(e - s for _, name, s, e in self.spans if name == "copy")}

    def blocks(self, width: int = 72) -> str:
        """The period as two lines: a column is full where the side worked all of its time."""
        edges = np.linspace(self.start, self.end, width + 1)
        lines = []
        for side in ("generate", "train"):
            share = [self.busy(side, a, b) for a, b in itertools.pairwise(edges)]
            cells = "".join(" ░▒▓█"[min(4, int(4 * s + 0.5))] for s in share)
            lines.append(f"{side:>9} |{cells}| {sum(share) / width:4.0%} busy")
        return "\n".join(lines)


class Worker:
    """One side's thread for torch work, and on an accelerator its stream: what crosses between the
    streams are host values, and weights after those. While the other side has nothing to do, work
    goes to one `shared` thread on all cores: OpenMP pools with more threads than cores are slow."""

    def __init__(self, side: str, device: torch.device, timeline: Timeline,
                 shared: ThreadPoolExecutor | None = None):
        self.side, self.timeline = side, timeline
        self.other: Worker | None = None
        self.needed = False  # this side has work, and wants its cores
        self.stream = contextlib.nullcontext()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # what was loaded, on another stream, is there
            self.stream = torch.Stream(device)
        self.own = thread(side)
        self.shared = shared or self.own

    async def run(self, name: str, function: Callable, *args):
        """Call a function in a thread; a span of the timeline under `name`."""
        # The rounding of a step's gradient norm depends on the number of threads: always the same.
        alone = name == "step" or (LENDING and not (self.other and self.other.needed))
        where, cores = (self.shared, CORES) if alone else (self.own, max(1, CORES // 2))

        def call():
            torch.set_num_threads(cores)  # of this thread alone
            start = self.timeline.now()
            try:
                with self.stream:
                    return function(*args)
            finally:
                self.timeline.spans.append((self.side, name, start, self.timeline.now()))
        return await asyncio.get_running_loop().run_in_executor(where, call)


def thread(name: str) -> ThreadPoolExecutor:
    """One thread. It asks for its number of torch threads: the first time sets any other's last."""
    return ThreadPoolExecutor(1, name, initializer=torch.get_num_threads)


class Generator:
    """Rollouts on inference copies. `async with` it: its step loop runs inside. A step that fails
    fails every waiting request with the original error, and all later ones."""

    def __init__(self, copies: Sequence[InferenceCopy], worker: Worker, seed: int):
        self.copies, self.worker, self.seed = list(copies), worker, seed
        self._futures = {}  # of the calls in flight: future -> its responses so far
        self._submitted = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def version(self) -> int:
        return self.copies[0].version

    async def __aenter__(self):
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._stepping = self._tasks.create_task(self._steps())
        return self

    async def __aexit__(self, *error):
        self._error = RuntimeError("the generator was closed")
        self._stepping.cancel()
        await self._tasks.__aexit__(*error)

    async def generate(self, problem: Problem, samples: int) -> list[Response]:
        """`samples` responses to a problem; tokens depend on the weights and on (seed, version,
        problem.key, sample) alone. Raises ValueError for a prompt too long for the slots."""
        if self._error is not None:
            raise self._error
        copy, key = self.copies[0], [self.seed, self.version]
        streams = (np.random.Philox(key=key, counter=[0, 0, problem.key, sample])
                   for sample in range(samples))
        uniforms = np.stack([np.random.Generator(stream).random(copy.limit, dtype=np.float32)
                             for stream in streams])
        future = asyncio.get_running_loop().create_future()
        copy.submit(future, problem.prompt_ids, uniforms)
        self._futures[future] = [None] * samples
        self._submitted.set()
        return await future

    async def update(self, policy, version: int) -> None:
        """Make every copy θ_version. Raises RuntimeError while a request is in flight."""
        for copy in self.copies:
            await self.worker.run("copy", copy_weights, policy, copy, version)

    async def _steps(self):
        """Waits for a request, steps until none is left. A period's requests all arrive before its
        first step, so that no step depends on how long the one before took."""
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                self.worker.needed = True
                while busy := [copy for copy in self.copies if not copy.idle]:
                    for copy in busy:
                        name = "prefill" if copy.admits else "decode"
                        self._deliver(await self.worker.run(name, copy.step))
                self.worker.needed = False
        except Exception as error:
            self._error = error
            for future in self._futures:
                if not future.done():
                    future.set_exception(error)

    def _deliver(self, ended):
        for future, sample, ids, logprobs, finished in ended:
            responses = self._futures[future]
            responses[sample] = Response(tuple(ids), tuple(logprobs), finished)
            if None not in responses:
                del self._futures[future]
                if not future.done():  # its caller may have been cancelled
                    future.set_result(responses)


@dataclass
class MicroBatch:
    """Groups as one packed row, with what the loss needs of each response token, (A,)."""
    packed: Packed
    advantages: Tensor
    weights: Tensor
    sampled: Tensor                # log-probs recorded in generation
    old: Tensor | None = None      # of the first pass, for the inner steps after it
    reference: Tensor | None = None


class Trainer:
    """Accumulates the gradient of a period; `step` applies it. A micro-batch is a fixed number of
    groups in the order they come, never what happens to wait: every rounding is that of `sync`."""

    def __init__(self, models: TriModel, worker: Worker, config: Config):
        self.models, self.worker, self.config = models, worker, config
        self.version, self.bad_steps = 0, 0  # periods trained; steps in a row without a gradient
        self.parameters = [p for p in models.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate,
                                           weight_decay=0.0, fused=True)
        for p in self.parameters:  # once: new memory is dear, and a period without any gradient
            p.grad = torch.zeros_like(p)  # is a step with one of zero, not a step left out
        # Backward adds the embedding's rows to its gradient, not a dense tensor of that size.
        models.policy.get_input_embeddings().sparse = models.device.type == "cpu"
        self._start_period()

    def _start_period(self):
        self.groups, self.batches = [], []  # not yet in a micro-batch; kept for inner steps
        self.sums, self.skipped, self.unmasked_tokens = {}, 0, 0

    async def consume(self, group: Group) -> None:
        """Take a group; train the micro-batch it completes. Launches work, reads nothing back.
        Raises RuntimeError for a group sampled under any other version than the one trained."""
        if group.version != self.version:
            raise RuntimeError(f"off-policy: a group of version {group.version} reached a trainer "
                               f"at version {self.version}")
        self.groups.append(group)
        if len(self.groups) == self.config.micro_batch_groups:
            await self._train_waiting()

    async def step(self) -> dict[str, float]:
        """The optimizer step (steps, with inner steps) of a period; returns its metrics."""
        await self._train_waiting()
        return await self.worker.run("step", self._step)

    async def _train_waiting(self):
        groups, self.groups = self.groups, []
        self.worker.needed = True
        await self.worker.run("train", self._train, groups)
        self.worker.needed = False

    def _loss_scale(self) -> float:
        """What is known only when the period is complete: dapo's number of tokens."""
        return 1 / max(self.unmasked_tokens, 1) if self.config.loss == "dapo" else 1.0

    def _train(self, groups: list[Group]) -> None:
        config = self.config
        self.unmasked_tokens += sum(len(r.ids) for g in groups for r in g.responses
                                    if r.finished or not config.mask_truncated)
        # Equal rewards give advantages of zero: without a KL term the group has no gradient.
        useful = [g for g in groups if config.beta or max(g.rewards) != min(g.rewards)]
        self.skipped += len(groups) - len(useful)
        rows = [(g.problem.prompt_ids, *row) for g in useful for row in
                zip(g.responses, group_advantages(g.rewards, scale=config.loss != "dr_grpo"))]
        while rows:
            fitting = self._fitting(rows)
            batch, rows = self._micro_batch(rows[:fitting]), rows[fitting:]
            self._backward(batch)
            if config.inner_steps > 1:
                self.batches.append(batch)

    def _fitting(self, rows: list[tuple]) -> int:
        """How many rows (prompt, response, advantage) pack into --micro-batch-tokens, 1 at least.
        Any split is exact: the loss is a sum over responses."""
        tokens, before = 0, None
        for number, (prompt, response, _) in enumerate(rows):
            shared = prompt is before and self.config.attention != "repeat"
            tokens += len(response.ids) + (0 if shared else len(prompt))
            if number and tokens > self.config.micro_batch_tokens:
                return number
            before = prompt
        return len(rows)

    def _micro_batch(self, rows: list[tuple]) -> MicroBatch:
        config = self.config
        groups = [list(group) for _, group in itertools.groupby(rows, lambda row: id(row[0]))]
        packed = pack([group[0][0] for group in groups],
                      [[response.ids for _, response, _ in group] for group in groups],
                      share=config.attention != "repeat", multiple=8)
        _, responses, advantages = zip(*rows)
        advantages = torch.stack(advantages)
        keep = torch.tensor([r.finished or not config.mask_truncated for r in responses])
        weights = token_weights(packed.lengths, keep, config.loss,
                                config.prompts * config.samples, config.max_new_tokens)
        sampled = torch.tensor([x for r in responses for x in r.logprobs])
        of = packed.response_of
        return MicroBatch(*(x.to(self.models.device)
                            for x in (packed, advantages[of], weights[of], sampled)))

    def _backward(self, batch: MicroBatch) -> None:
        first, entropy = batch.old is None, {}
        if first:
            policy, batch.old, batch.reference = self.models.logprobs(batch.packed, entropy)
        else:
            policy = self.models.score(self.models.policy, batch.packed)
        loss, sums = grpo_loss(policy, batch.old, batch.reference, batch.advantages, batch.weights,
                               clip_low=self.config.clip_low, clip_high=self.config.clip_high,
                               beta=self.config.beta)
        loss.backward()
        if first:
            gap = (policy.detach() - batch.sampled).abs()
            sums |= {"gap_sum": gap.sum(), "first_tokens": gap.numel(), **entropy}
            self.sums["gap_max"] = torch.maximum(gap.max(), self.sums.get("gap_max", gap[0]))
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def _step(self) -> dict[str, float]:
        for inner in range(self.config.inner_steps):
            if inner:
                for batch in self.batches:
                    self._backward(batch)
            norm = self._optimizer_step()
            if self.bad_steps:
                break  # the weights did not move: the next pass would be the same
        self.version += 1
        sums = defaultdict(float, {name: float(value) for name, value in self.sums.items()})
        tokens, first_tokens = max(sums["kept_tokens"], 1), max(sums["first_tokens"], 1)
        metrics = {
            "loss": sums["loss"] * self._loss_scale() / (inner + 1), "kl": sums["kl_sum"] / tokens,
            **{f"{side}_share": sums[f"{side}_tokens"] / tokens
               for side in ("clip_low", "clip_high")},
            "entropy": sums["entropy_sum"] / first_tokens, "logp_gap_max": sums["gap_max"],
            "logp_gap_mean": sums["gap_sum"] / first_tokens, "gradient_norm": norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "skipped_groups": self.skipped, "bad_steps": self.bad_steps}
        self._start_period()
        return metrics

    def _optimizer_step(self) -> float:
        """Scale (`dapo`), clip, step. A gradient that is not finite changes nothing but the count
        of such steps in a row: clipping would make every weight NaN. Returns the norm."""
        if self._loss_scale() != 1:
            torch._foreach_mul_([p.grad for p in self.parameters], self._loss_scale())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM))
        self.bad_steps = 0 if np.isfinite(norm) else self.bad_steps + 1
        if self.bad_steps == BAD_STEPS:
            raise FloatingPointError(f"the gradient was not finite in {BAD_STEPS} steps in a row; "
                                     "a lower --learning-rate may help")
        warm = min(1.0, (self.version + 1) / WARMUP_PERIODS)
        self.optimizer.param_groups[0]["lr"] = self.config.learning_rate * warm
        if not self.bad_steps:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm


async def run_period(generator, trainer, problems: Sequence[Problem], samples: int,
                     score: Callable, overlap: bool) -> tuple[list[Group], dict[str, float]]:
    """One period: generate, score and train `samples` responses to every problem, then step.
    Returns the groups in the order trained, and the step's metrics. `score(problem, responses)` is
    a coroutine that returns rewards. Whatever raises ends the period at once."""
    queue = asyncio.Queue()
    groups = []

    async def produce(problem):
        version = generator.version
        responses = await generator.generate(problem, samples)
        if len(responses) != samples:
            raise RuntimeError(f"{samples} responses were asked for, {len(responses)} came")
        # Queue the scoring, not the scored group: a slow reward must not change the order.
        queue.put_nowait(producers.create_task(finish(problem, responses, version)))

    async def finish(problem, responses, version):
        rewards = await score(problem, responses)
        return Group(problem, tuple(responses), tuple(rewards), version)

    async with asyncio.TaskGroup() as producers:
        tasks = [producers.create_task(produce(p)) for p in problems]
        if not overlap:
            await asyncio.gather(*tasks)      # the synchronous schedule is this line
        for _ in problems:
            groups.append(await (await queue.get()))
            await trainer.consume(groups[-1])
    return groups, await trainer.step()


def problem_stream(config: Config, tokenizer) -> tuple[Callable[[int, int], list[Problem]], int]:
    """A function (start, count) -> problems of the endless stream, and the longest prompt's tokens.
    Raises ValueError where there are fewer than a period needs."""
    read = ([(f"{question}\n\n{CLOSING}", gold) for question, gold in read_problems(config.data)]
            if config.data else [arithmetic(config.seed, i) for i in range(1000)])
    rows = [(encode_prompt(tokenizer, question), gold) for question, gold in read]
    rows = [row for row in rows if len(row[0]) <= config.max_prompt_tokens]
    if len(rows) < len(read):
        print(f"{len(read) - len(rows)} of {len(read)} prompts are longer than "
              f"--max-prompt-tokens {config.max_prompt_tokens}, and skipped")
    if len(rows) < config.prompts:
        raise ValueError(f"{config.data or 'arithmetic'}: {len(read)} problems read, {len(rows)} "
                         f"kept, but a period needs --prompts {config.prompts}")
    return (lambda start, count: draw_problems(rows, config.seed, start, count),
            max(len(ids) for ids, _ in rows))


def set_up(config: Config, out: Path, shared: ThreadPoolExecutor) -> SimpleNamespace:
    """The parts of a run, loaded. Raises ValueError or OSError for what the user can mend."""
    train_on = device(config.train_devices)
    rollout_on = device(config.rollout_devices or str(train_on))
    dtype = getattr(torch, config.dtype)
    settings = {"temperature": config.temperature, "dtype": dtype}
    begun = time.perf_counter()
    policy, tokenizer = load(config.model, train_on, seed=config.seed)
    if config.attention == "dense":
        attach(policy, "dense")
    draw, longest = problem_stream(config, tokenizer)
    inference = InferenceCopy(
        frozen_copy(policy, dtype).to(rollout_on), stop_ids(policy, tokenizer), rows=config.rows,
        longest_prompt=longest, max_new_tokens=config.max_new_tokens, **settings)
    models = TriModel(policy, inference.model, frozen_copy(policy, dtype) if config.beta else None,
                      **settings)
    if config.recompute:
        policy.activation_checkpointing_enable()
    print(f"{config.model}: {sum(p.numel() for p in policy.parameters()):,} parameters, ready in "
          f"{time.perf_counter() - begun:.0f} s. Output goes to {out}. The run:",
          " ".join(f"{flag(name)} {value}" for name, value in vars(config).items()))
    timeline = Timeline(out / "trace.json")
    generate, train = (Worker(side, where, timeline, shared) for side, where in
                       (("generate", rollout_on), ("train", train_on)))
    generate.other, train.other = train, generate
    return SimpleNamespace(
        config=config, tokenizer=tokenizer, draw=draw, timeline=timeline, rollouts=hashlib.sha256(),
        generator=Generator([inference], generate, config.seed),
        trainer=Trainer(models, train, config))


async def run_periods(run, out: Path) -> list[dict]:
    """The loop of a run. Returns the metrics of every period, as metrics.jsonl holds them."""
    config, trainer, timeline, history = run.config, run.trainer, run.timeline, []
    scorers = ThreadPoolExecutor(thread_name_prefix="reward")  # a reward must not stop the loop

    async def score(problem, responses):
        def rewards():
            return [math_reward(run.tokenizer.decode(r.ids, skip_special_tokens=True),
                                problem.answer) for r in responses]
        return await asyncio.get_running_loop().run_in_executor(scorers, rewards)

    async with run.generator as generator:
        with (open(out / "metrics.jsonl", "w") as log,
              tqdm(total=config.periods, unit="period", disable=None) as bar):
            for period in range(config.periods):
                timeline.open()
                problems = run.draw(period * config.prompts, config.prompts)
                groups, step = await run_period(generator, trainer, problems, config.samples,
                                                score, overlap=config.schedule == "async")
                await generator.update(trainer.models.policy, trainer.version)
                metrics = {"period": period, **group_metrics(groups), **timeline.close(), **step}
                history.append(metrics)
                print(json.dumps(metrics), file=log, flush=True)
                for group in sorted(groups, key=lambda g: problems.index(g.problem)):
                    for response in group.responses:
                        run.rollouts.update(np.array([-1, *response.ids]).tobytes())
                bar.write("period {period:4d}  reward {reward:.3f}  finished {finished_share:.2f}  "
                          "length {response_tokens_mean:.1f}  kl {kl:.4f}  gap {logp_gap_max:.1e}  "
                          "{seconds:.2f} s".format(**metrics))
                bar.update()
    return history


def summary(run, history: list[dict]) -> dict:
    """What a run prints last."""
    seconds, tokens = (sum(h[name] for h in history) for name in ("seconds", "tokens"))
    generate, train = (sum(h[name] * h["seconds"] for h in history) / seconds
                       for name in ("generate_busy", "train_busy"))
    devices = {run.trainer.models.device, *(copy.device for copy in run.generator.copies)}
    weights = hashlib.sha256()
    for _, parameter in sorted(run.trainer.models.policy.named_parameters()):
        weights.update(parameter.detach().cpu().numpy().tobytes())
    return {"schedule": run.config.schedule, "periods": len(history), "seconds": seconds,
            "tokens": tokens, "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / len(devices),
            "reward_first": float(np.mean([h["reward"] for h in history[:5]])),
            "reward_last": float(np.mean([h["reward"] for h in history[-5:]])),
            "generate_busy": generate, "train_busy": train,
            "overlap_bound": (generate + train) / max(generate, train),
            "logp_gap_max": max(h["logp_gap_max"] for h in history),
            "rollouts_sha256": run.rollouts.hexdigest(), "weights_sha256": weights.hexdigest()}


def train(config: Config) -> dict:
    """A whole run; returns what is printed last. Raises UserError for what the user can mend."""
    try:
        config = config.checked()
        out = Path(config.out or time.strftime("runs/%Y-%m-%d_%H-%M-%S"))
        out.mkdir(parents=True, exist_ok=True)
        shared = thread("all cores")
        run = shared.submit(set_up, config, out, shared).result()
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    try:
        history = asyncio.run(run_periods(run, out))
    except BaseExceptionGroup as group:
        raise original(group) from None
    result = summary(run, history)
    print(f"\nThe last period, {history[-1]['seconds']:.2f} s:\n{run.timeline.blocks()}\n")
    return result


def original(error: BaseException) -> BaseException:
    """The first error in a group."""
    return original(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit codes: 0, 1 a failed run, 2 a user's mistake, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: end(f"error: {message}", 2)
    for f in dataclasses.fields(Config):
        kind = f.type if isinstance(f.type, type) else f.type.__args__[0]
        how = ({"action": argparse.BooleanOptionalAction} if kind is bool
               else {"type": kind, "choices": f.metadata["choices"]})
        parser.add_argument(flag(f.name), default=f.default, help=f.metadata["help"], **how)
    config = Config(**vars(parser.parse_args(arguments)))
    try:
        print(json.dumps(train(config)), flush=True)
    except UserError as error:
        end(f"error: {error}", 2)
    except KeyboardInterrupt:
        end("interrupted; the metrics of all complete periods are in --out", 130)
    except BaseException as error:
        traceback.print_exception(error)
        end("the run failed; the metrics of all complete periods are in --out", 1)


def end(message: str, code: int) -> None:
    """Leave at once: a normal exit would wait for a thread inside a torch call."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
