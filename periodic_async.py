"""Periodic asynchrony: on-policy GRPO in which generation and training overlap within a period.

    pip install -r requirements.txt && python periodic_async.py     # learns to add on a laptop
    python periodic_async.py --model DIR --data train.jsonl         # a real model, real problems

The weights θ move only between periods. Inside one, P coroutines generate on a frozen copy of θ_t
while the trainer accumulates gradients at θ_t from the groups that are complete. Every token is
on-policy, as in synchronous training, and both schedules give the same weights bit for bit.

The paper (arXiv 2511.18871) has a cluster and inference servers. Here are one process and one event
loop; generation and training each own a thread for the torch work. On an accelerator each inference
copy has a stream beside the trainer's, the default ones.
Who waits for what:
     produce     takes a problem; waits for `Generator.generate`; queues the scoring of its group
     Generator   prefills and decodes while any request waits; the end of a group wakes `produce`
     run_period  gives scored groups to `Trainer.consume` in the order in which their generation
                 ended; after P groups calls `Trainer.step`, the one optimizer step of the period
"""
import argparse
import asyncio
import contextlib
import hashlib
import inspect
import itertools
import json
import math
import os
import runpy
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from attention import Packed, attach, pack, upload
from grpo import (CLOSING, LOSSES, Group, Problem, Response, arithmetic, draw_problems,
                  encode_prompt, group_advantages, group_metrics, grpo_loss, math_reward,
                  mean_scored, read_problems, token_weights)
from model import (InferenceCopy, TriModel, copy_weights, devices, frozen_copy, load, place, plan,
                   stages, stop_ids)

CLIP_NORM = 1.0       # global norm of a step's gradient
WARMUP_PERIODS = 5    # until the learning rate is reached, linearly
RUNS = f"runs/%Y-%m-%d_%H-%M-%S_{os.getpid()}"  # two may start within a second
BAD_STEPS = 3         # steps in a row without a finite gradient that end the run
EVAL_KEYS = 2**62     # keys of evaluated problems start here, above all that are trained on
# Flags that a resumed run may change: the tokens and weights of its periods stay the same.
HARMLESS = {"schedule", "periods", "recompute", "eval_data", "eval_every", "eval_samples",
            "eval_limit", "plan", "out", "save_every", "keep", "resume"}
# GiB of a device that is not here, for --plan; and what may be changed where a plan does not fit.
USUAL_GIB = {"npu": 64.0, "cuda": 80.0}
RELIEF = ({"recompute": True}, {"dtype": "bfloat16"}, {"micro_batch_tokens": 4096}, {"rows": 16},
          {"beta": 0.0})
LENDING = True        # a side may use the other's CPU cores while the other has nothing to do
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
TINY = {"learning_rate": 2e-4, "max_new_tokens": 8, "micro_batch_groups": 4}
OTHER = {"learning_rate": 1e-6, "max_new_tokens": 512, "micro_batch_groups": 1}


class UserError(Exception):
    """A mistake in what the user gave: one sentence, exit code 2."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_flags(settings: dict) -> str:
    """As the command line takes them."""
    return " ".join(flag(name if value else f"no_{name}") if isinstance(value, bool)
                    else f"{flag(name)} {shlex.quote(str(value))}"
                    for name, value in settings.items())


def _default(value, help, choices=None, least=1):
    return field(default=value, metadata={"help": help, "choices": choices, "least": least})


@dataclass(frozen=True)
class Config:
    """A run. Every field is a flag; None stands for a default that depends on the model."""
    # what is trained, on what
    model: str = _default("tiny", "tiny (built in), a folder, or a hub id")
    data: str = _default("", "problems: a file, or hub:OWNER/NAME/FILE; empty: sums of two digits")
    prompt_template: str = _default("", "text with {question} in it, or a file that holds it")
    reward: str = _default("math", "math, or FILE.py:FUNCTION, called as (response, problem)")
    reward_seconds: float = _default(10.0, "limit of a reward call; over it counts 0", least=1e-3)
    seed: int = _default(0, "decides problems, samples and the tiny model", least=0)
    # the schedule
    schedule: str = _default("async", "overlap generation and training, or not", ("async", "sync"))
    periods: int = _default(100, "to train; 0: evaluate and stop", least=0)
    prompts: int = _default(16, "prompts a period, P")
    samples: int = _default(16, "responses a prompt, K", least=2)
    inner_steps: int = _default(1, "optimizer steps on the same groups, GRPO's mu")
    micro_batch_groups: int | None = _default(None, "groups a micro-batch (1; tiny: 4)")
    micro_batch_tokens: int = _default(16384, "packed tokens at most: one with more is split")
    recompute: bool = _default(False, "compute activations again in the backward pass")
    # rollouts
    max_prompt_tokens: int = _default(512, "longer prompts are skipped and counted")
    max_new_tokens: int | None = _default(None, "tokens a response at most (512; tiny: 8)")
    temperature: float = _default(1.0, "of sampling, and of the log-probs trained", least=1e-3)
    rows: int = _default(64, "responses decoded at once")
    # the loss
    loss: str = _default("grpo", "how tokens are averaged", LOSSES)
    beta: float = _default(0.02, "weight of the KL to the reference; 0: no reference", least=0)
    clip_low: float = _default(0.2, "the ratio is clipped at 1 - this", least=0)
    clip_high: float = _default(0.2, "and at 1 + this", least=0)
    mask_truncated: bool = _default(False, "no gradient from responses cut off at the limit")
    learning_rate: float | None = _default(None, "of AdamW once warm (1e-6; tiny: 2e-4)", least=0)
    # evaluation, between periods and at both ends
    eval_data: str = _default("", "held-out problems, as --data; empty: no evaluation")
    eval_every: int = _default(10, "periods from one evaluation to the next")
    eval_samples: int = _default(1, "answers a problem: 1 greedy, more at --temperature, mean")
    eval_limit: int = _default(0, "the first problems alone; 0: all", least=0)
    # the machine
    attention: str = _default("shared", "a prompt: once a group; so too, by mask; once a response",
                              ("shared", "dense", "repeat"))
    dtype: str = _default("float32", "bfloat16: autocast", ("float32", "bfloat16"))
    train_devices: str = _default("", "npu:0,npu:1: a stage of the layers on each; empty: an "
                                      "accelerator, or cpu")
    rollout_devices: str = _default("", "npu:2,npu:3: an inference copy on each; empty: the first "
                                        "of the others")
    plan: bool = _default(False, "print what each device will hold, and stop")
    # what is kept
    out: str = _default("", "folder of all that is kept; empty: runs/<start time>_<process>")
    save_every: int = _default(50, "periods between checkpoints; one at the end; 0: none", least=0)
    keep: int = _default(2, "checkpoints kept, the latest; -1: all", least=-1)
    resume: bool = _default(False, "go on from the latest complete checkpoint in --out")

    def checked(self) -> "Config":
        """With model-dependent defaults filled in. Raises ValueError naming the flag at fault."""
        defaults = (TINY if self.model == "tiny" else OTHER) | {"out": time.strftime(RUNS)}
        config = replace(self, **{name: value for name, value in defaults.items()
                                  if getattr(self, name) in (None, "")})
        for f in fields(config):
            value = getattr(config, f.name)
            choices, least = f.metadata["choices"], f.metadata["least"]
            if choices and value not in choices:
                raise ValueError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value}")
            if not isinstance(value, (str, bool)) and not least <= value < float("inf"):
                raise ValueError(f"{flag(f.name)} must be {least} or more, not {value}")
        if config.seed >= 2**63:
            raise ValueError(f"--seed must be below 2**63, not {config.seed}")
        if not config.periods and not config.eval_data:
            raise ValueError("--periods 0 evaluates and stops: it needs --eval-data")
        if config.keep == 0 or (config.resume and not self.out):
            raise ValueError("--keep must be 1 or more, or -1 for all; --resume needs --out")
        return config


class Timeline:
    """Who worked when in a period: spans (side, name, start, end) of `perf_counter`. Written as a
    trace for chrome://tracing and Perfetto: an array, whose last bracket is optional."""

    def __init__(self, trace: Path):
        self.start, self.end = 0.0, 0.0
        self.spans: list[tuple[str, str, float, float]] = []
        self.working: set[str] = set()  # the sides at work now
        self.file = open(trace, "w")
        print("[", file=self.file)

    def open(self) -> None:
        """Begin a period."""
        self.start, self.spans = time.perf_counter(), []

    def busy(self, side: str, start: float, end: float) -> float:
        """The share of the time from start to end in which a side worked."""
        return sum(max(0.0, min(e, end) - max(s, start))
                   for who, _, s, e in self.spans if who == side) / (end - start)

    def close(self) -> dict[str, float]:
        """End the period. Returns its timing metrics."""
        self.end = time.perf_counter()
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
    """One side's thread for torch work. While the other side has nothing to do, work goes to one
    `shared` thread on all cores: OpenMP pools with more threads than cores are slow. `relief` says
    what to lower where memory is short."""

    def __init__(self, side: str, timeline: Timeline, shared: ThreadPoolExecutor | None = None,
                 relief: str = ""):
        self.side, self.timeline, self.relief = side, timeline, relief
        self.own = thread(side)
        self.shared = shared or self.own

    async def run(self, name: str, function: Callable, *args):
        """Call a function in a thread; a span of the timeline under `name`. The one named `step`
        always has all cores."""
        # The rounding of a step's gradient norm depends on the number of threads: always the same.
        alone = name == "step" or (LENDING and not self.timeline.working)
        where, cores = (self.shared, CORES) if alone else (self.own, max(1, CORES // 2))

        def call():
            """In the thread: the function, its cores, and its span."""
            torch.set_num_threads(cores)  # of this thread alone
            start = time.perf_counter()
            try:
                with named_if_no_memory(name, self.relief):
                    return function(*args)
            finally:
                self.timeline.spans.append((self.side, name, start, time.perf_counter()))
        self.timeline.working.add(self.side)
        try:
            return await asyncio.get_running_loop().run_in_executor(where, call)
        finally:
            self.timeline.working.discard(self.side)


@contextlib.contextmanager
def named_if_no_memory(where: str, relief: str):
    """Say where memory was short and what to lower. The CPU's allocator has no type for that."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(
                said in str(error) for said in ("out of memory", "can't allocate memory")):
            raise MemoryError(f"out of memory in {where}: lower {relief}") from error
        raise


def thread(name: str) -> ThreadPoolExecutor:
    """One thread, whose pool torch sets up now: done later, that would undo the `set_num_threads`
    of other threads."""
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
        copy, key = min(self.copies, key=lambda c: c.tokens_waiting), [self.seed, self.version]
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
        if not all(copy.idle for copy in self.copies):  # all or none: they never differ
            raise RuntimeError("weights were copied while requests were in flight")

        def update():
            """In the worker's thread: all copies at once."""
            places = [where for where, _ in stages(policy) if where.type != "cpu"]
            for where in places:  # the step that made the weights ran on another stream
                torch.accelerator.synchronize(where)
            for copy in self.copies:  # on streams of its own, so that it waits for no other
                with contextlib.ExitStack() as streams:
                    for where in places:
                        streams.enter_context(torch.Stream(where))
                    copy_weights(policy, copy, version)
            for where in places:
                torch.accelerator.synchronize(where)
        await self.worker.run("copy", update)

    async def _steps(self):
        """Waits for a request, steps until none is left. A period's requests all arrive before its
        first step, so that no step depends on how long the one before took."""
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                while busy := [copy for copy in self.copies if not copy.idle]:
                    name = "prefill" if any(copy.admits for copy in busy) else "decode"
                    self._deliver(await self.worker.run(name, self._step, busy))
        except Exception as error:
            self._error = error
            for future in self._futures:
                if not future.done():
                    future.set_exception(error)

    def _step(self, busy: list[InferenceCopy]) -> list[tuple]:
        """A step of every copy that has work, launched on all before the first is waited for."""
        for copy in busy:
            copy.launch()
        return [ended for copy in busy for ended in copy.finish()]

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
        # Micro-batches on their way back, each a list of (output, what the next stage took in) of
        # the stages whose backward passes are still to come; the last stage puts out the loss.
        self.flights: list[list[tuple[Tensor, Tensor | None]]] = []
        self.parameters = list(models.policy.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate,
                                           weight_decay=0.0, fused=True)
        for p in self.parameters if config.periods else ():  # once: new memory is dear, and a
            p.grad = torch.zeros_like(p)  # period without any gradient is a step with one of zero
        # Backward adds the embedding's rows to its gradient, not a dense tensor of that size.
        models.policy.get_input_embeddings().sparse = models.device.type == "cpu"
        self._start_period()

    def _start_period(self):
        self.groups, self.batches = [], []  # not yet in a micro-batch; kept for inner steps
        # Of the metrics; groups without a pass; tokens that are not masked, theirs included.
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
        await self.worker.run("train", self._train, groups)

    def _loss_scale(self) -> float:
        """What is known only when the period is complete: dapo's number of tokens."""
        return 1 / max(self.unmasked_tokens, 1) if self.config.loss == "dapo" else 1.0

    def _train(self, groups: list[Group]) -> None:
        config = self.config
        rows = []
        for group in groups:
            advantages = group_advantages(group.rewards, scale=config.loss != "dr_grpo")
            unscored = torch.tensor(group.rewards).isnan()
            advantages = advantages.masked_fill(unscored, 0.0).tolist()
            keep = [not missing and (r.finished or not config.mask_truncated)
                    for missing, r in zip(unscored, group.responses)]
            self.unmasked_tokens += sum(len(r.ids) * k for r, k in zip(group.responses, keep))
            # Equal rewards give advantages of zero: without a KL term the group has no gradient.
            if config.beta or any(advantages):
                rows += [(group.problem.prompt_ids, *row)
                         for row in zip(group.responses, advantages, keep)]
            else:
                self.skipped += 1
        while rows:
            fitting = self._fitting(rows)
            batch, rows = self._micro_batch(rows[:fitting]), rows[fitting:]
            self._backward(batch)
            if config.inner_steps > 1:
                self.batches.append(batch)

    def _fitting(self, rows: list[tuple]) -> int:
        """How many rows (prompt, response, advantage, is it kept) pack into --micro-batch-tokens,
        1 at least; those of a group share one prompt object. Any split is exact: the loss is a sum
        over responses."""
        tokens, before = 0, None
        for number, (prompt, response, *_) in enumerate(rows):
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
                      [[response.ids for _, response, *_ in group] for group in groups],
                      share=config.attention != "repeat", multiple=8)
        _, responses, advantages, keep = zip(*rows)
        advantages, keep = torch.tensor(advantages), torch.tensor(keep)
        weights = token_weights(packed.lengths, keep, config.loss,
                                config.prompts * config.samples, config.max_new_tokens)
        sampled = torch.tensor([x for r in responses for x in r.logprobs])
        of = packed.response_of
        return MicroBatch(packed, *(upload(x, self.models.device)
                                    for x in (advantages[of], weights[of], sampled)))

    def _backward_passes(self) -> None:
        """What follows a forward pass (1F1B): every micro-batch in flight, the newest first, goes
        back by one stage. Streams are in order: a whole backward pass at once would leave the
        devices idle."""
        for flight in reversed(self.flights):
            output, taken = flight.pop()
            output.backward(taken if taken is None
                            else taken.grad.to(output.device, non_blocking=True))
        self.flights = [flight for flight in self.flights if flight]

    def _backward(self, batch: MicroBatch) -> None:
        first, entropy, cuts = batch.old is None, {}, []
        if first:
            policy, batch.old, batch.reference = self.models.logprobs(batch.packed, entropy, cuts)
        else:
            policy = self.models.score(self.models.policy, batch.packed, cuts=cuts)
        loss, sums = grpo_loss(policy, batch.old, batch.reference, batch.advantages, batch.weights,
                               clip_low=self.config.clip_low, clip_high=self.config.clip_high,
                               beta=self.config.beta)
        self.flights.append([*cuts, (loss, None)])
        self._backward_passes()
        if first:
            gap = (policy.detach() - batch.sampled).abs()
            sums |= {"gap_sum": gap.sum(), "first_tokens": gap.numel(), **entropy}
            self.sums["gap_max"] = torch.maximum(gap.max(), self.sums.get("gap_max", gap[0]))
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def _step(self) -> dict[str, float]:
        for inner in range(self.config.inner_steps):
            for batch in self.batches if inner else ():
                self._backward(batch)
            while self.flights:
                self._backward_passes()
            norm = self._optimizer_step()
            if self.bad_steps:
                break  # the weights did not move: the next pass would be the same
        self.version += 1
        sums = defaultdict(float, {name: float(value) for name, value in self.sums.items()})
        tokens, first_tokens = max(sums["kept_tokens"], 1), max(sums["first_tokens"], 1)
        metrics = {
            "loss": sums["loss"] * self._loss_scale() / (inner + 1), "kl": sums["kl_sum"] / tokens,
            "clip_low_share": sums["clip_low_tokens"] / tokens,
            "clip_high_share": sums["clip_high_tokens"] / tokens,
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
            for p in self.parameters:
                p.grad.mul_(self._loss_scale())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM))
        self.bad_steps = 0 if math.isfinite(norm) else self.bad_steps + 1
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
        """Queue the scoring, not the scored group: a slow reward must not change the order."""
        version = generator.version
        responses = await generator.generate(problem, samples)
        if len(responses) != samples:
            raise RuntimeError(f"{samples} responses were asked for, {len(responses)} came")
        queue.put_nowait(producers.create_task(finish(problem, responses, version)))

    async def finish(problem, responses, version):
        rewards = await score(problem, responses)
        return Group(problem, tuple(responses), tuple(rewards), version)

    async with asyncio.TaskGroup() as producers:
        tasks = [producers.create_task(produce(p)) for p in problems]
        for task in tasks:  # one that is cancelled queues nothing: nobody may wait for it
            task.add_done_callback(lambda t: t.cancelled() and queue.put_nowait(t))
        if not overlap:
            await asyncio.gather(*tasks)      # the synchronous schedule is this line
        for _ in problems:
            groups.append(await (await queue.get()))
            await trainer.consume(groups[-1])
    return groups, await trainer.step()


class Scorer:
    """Rewards of responses. An async function is awaited; a plain one runs in a thread, `threads`
    at most at once, so that the event loop goes on. A call that takes longer than `seconds` counts
    0, and its thread, which Python cannot stop, is left behind. None and NaN stay NaN: unscored."""

    def __init__(self, function: Callable, tokenizer, seconds: float, threads: int = CORES):
        self.function, self.tokenizer, self.seconds = function, tokenizer, seconds
        self.awaited = inspect.iscoroutinefunction(function)
        self.seats = contextlib.nullcontext() if self.awaited else asyncio.Semaphore(threads)

    def text(self, response: Response) -> str:
        return self.tokenizer.decode(response.ids, skip_special_tokens=True)

    async def __call__(self, problem: Problem, responses: Sequence[Response]) -> list[float]:
        async with asyncio.TaskGroup() as calls:
            rewards = [calls.create_task(self._reward(self.text(r), problem)) for r in responses]
        return [reward.result() for reward in rewards]

    async def _reward(self, text: str, problem: Problem) -> float:
        async with self.seats:
            try:
                async with asyncio.timeout(self.seconds) as limit:
                    reward = await (self.function(text, problem) if self.awaited
                                    else in_thread(self.function, text, problem))
            except TimeoutError:
                if not limit.expired():  # the function's own
                    raise
                tqdm.write(f"a reward of problem {problem.key} took more than --reward-seconds "
                           f"{self.seconds} and counts 0")
                return 0.0
        reward = math.nan if reward is None else float(reward)
        if math.isinf(reward):
            raise ValueError(f"the reward of a response to problem {problem.key} is {reward}, not "
                             "a finite number, or None for none")
        return reward


def in_thread(function: Callable, *args) -> asyncio.Future:
    """Call a function in a daemon thread of its own: at its end the process would wait for a stuck
    thread of an executor."""
    future = Future()
    future.set_running_or_notify_cancel()  # its caller may go away; the result still has a place

    def call():
        """In the thread: whatever comes of the function goes into the future."""
        try:
            future.set_result(function(*args))
        except BaseException as error:
            if isinstance(error, StopIteration):  # which no asyncio future can hold
                stop, error = error, RuntimeError("the reward raised StopIteration")
                error.__cause__ = stop
            future.set_exception(error)
    threading.Thread(target=call, daemon=True).start()
    return asyncio.wrap_future(future)


def reward_function(name: str) -> Callable:
    """`math`, or FILE.py:FUNCTION: that file is the only code of a user that a run executes.
    Raises ValueError for one that cannot be loaded."""
    if name == "math":
        async def at_once(response, problem):  # a thread costs more than our own comparison
            return math_reward(response, problem.answer)
        return at_once
    path, _, function = name.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))  # it may import what lies beside it
    try:
        loaded = runpy.run_path(path)[function]
        if not callable(loaded):
            raise TypeError(f"{function} is no function")
        return loaded
    except (Exception, SystemExit) as error:  # whatever the file raises
        raise ValueError(f"--reward {name} is neither math nor FILE.py:FUNCTION that loads: "
                         f"{type(error).__name__}: {error}") from None


def read_prompts(config: Config, source: str, least: int, tokenizer) -> list[Problem]:
    """The problems of the file that the flag `source` names, without one the built-in sums, whose
    prompts are short enough. Raises ValueError where they are fewer than `least`."""
    path = getattr(config, source)
    template = config.prompt_template or ("{question}\n\n" + CLOSING if path else "{question}")
    try:
        if "{question}" not in template:
            template = Path(template).read_text(encoding="utf-8")
        template.index("{question}")
    except (OSError, ValueError) as error:
        raise ValueError("--prompt-template is neither text with {question} in it nor a file that "
                         f"holds such text: {error}") from None
    read = (read_problems(path) if path
            else [arithmetic(config.seed, i) for i in range(1000)])
    rows = [Problem(encode_prompt(tokenizer, template.replace("{question}", question)), gold,
                    key, question) for key, (question, gold) in enumerate(read)]
    fitting = [row for row in rows if len(row.prompt_ids) <= config.max_prompt_tokens]
    if len(fitting) < len(rows):
        print(f"{path or 'arithmetic'}: {len(rows) - len(fitting)} of {len(rows)} prompts are "
              f"longer than --max-prompt-tokens {config.max_prompt_tokens}, and skipped")
    if len(fitting) < least:
        raise ValueError(f"{path or 'arithmetic'}: {len(rows)} problems read, {len(fitting)} kept, "
                         f"but {flag(source)} with --prompts {config.prompts} needs {least}")
    return fitting


def gib(name: str) -> float:
    """Memory of a device."""
    if name.startswith("cpu"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    try:
        return torch.accelerator.get_memory_info(name)[1] / 2**30
    except (RuntimeError, ValueError, AssertionError):  # none such here
        return USUAL_GIB.get(name.split(":")[0], 64.0)


def planned(config: Config) -> tuple[str, dict[str, float]]:
    """A table of what every device will hold, and GiB of each. Raises ValueError for a plan that
    does not fit, with the flag that would make it fit."""
    def named(listed):  # npu is npu:0
        return [name if ":" in name or name == "cpu" else f"{name}:0"
                for name in listed.replace(" ", "").split(",")]

    def held(config):
        """What every role will hold, by part, and the sum of every device."""
        train = named(config.train_devices or str(devices("")[0]))
        rollout = named(config.rollout_devices) if config.rollout_devices else train[:1]
        roles = [*(f"{name} train" for name in train), *(f"{name} generate" for name in rollout)]
        parts = list(zip(roles, plan(len(train), len(rollout), **vars(config))))
        totals = defaultdict(float)
        for role, part in parts:
            totals[role.split()[0]] += sum(x for x in part.values() if not isinstance(x, str))
        return parts, totals

    def over(totals):
        return [f"{name} would hold {total:.1f} GiB of {gib(name):.0f}"
                for name, total in totals.items() if total > gib(name)]
    parts, totals = held(config)
    table = "\n".join(f"{role:15} layers {part.pop('layers'):6} " + "  ".join(
        f"{name} {x:.1f}" for name, x in part.items()) for role, part in parts)
    if too_much := over(totals):
        helps = [change for change in RELIEF
                 if not over(held(replace(config, **change))[1])]
        raise ValueError(f"{'; '.join(too_much)}: " + (
            " or ".join(as_flags(change) for change in helps)
            or "more --train-devices or --rollout-devices") + " would fit")
    return table, totals


def set_up(config: Config, out: Path, shared: ThreadPoolExecutor) -> SimpleNamespace:
    """The parts of a run, loaded. Raises ValueError or OSError for what the user can mend."""
    train_on = devices(config.train_devices)
    if train_on[0].type != "cpu" and config.model != "tiny" and config.periods:
        planned(config)
    rollout_on = devices(config.rollout_devices or str(train_on[0]))
    dtype = getattr(torch, config.dtype)
    settings = {"temperature": config.temperature, "dtype": dtype}
    begun = time.perf_counter()
    reward = reward_function(config.reward)  # first: a mistake there shows at once
    policy, tokenizer = load(config.model, train_on, seed=config.seed)
    if config.attention == "dense":
        attach(policy, "dense")
    rows = read_prompts(config, "data", config.prompts if config.periods else 1, tokenizer)
    held_out = read_prompts(config, "eval_data", 1, tokenizer) if config.eval_data else []
    held_out = [replace(problem, key=EVAL_KEYS + problem.key)
                for problem in held_out[:config.eval_limit or None]]
    longest = max(len(problem.prompt_ids) for problem in [*rows, *held_out])
    problems_sha256 = hashlib.sha256(
        repr([(r.prompt_ids, r.answer) for r in rows]).encode()).hexdigest()
    reference = frozen_copy(policy, dtype) if config.beta and config.periods else None
    state = restore(config, out, problems_sha256, policy)
    for half_written in out.glob(".period-*"):
        shutil.rmtree(half_written)
    copies = [InferenceCopy(place(frozen_copy(policy, dtype), [where]), stop_ids(policy, tokenizer),
                            rows=config.rows, longest_prompt=longest,
                            max_new_tokens=config.max_new_tokens, **settings)
              for where in rollout_on]
    models = TriModel(policy, copies[0].model, reference, **settings)
    if config.recompute:
        policy.activation_checkpointing_enable()
    print(f"{config.model}: {sum(p.numel() for p in policy.parameters()):,} parameters, ready in "
          f"{time.perf_counter() - begun:.0f} s. Output goes to {out}. The run:",
          as_flags(vars(config)))
    timeline = Timeline(out / "trace.json")
    generate = Worker("generate", timeline, shared, f"--rows {config.rows}")
    train = Worker("train", timeline, shared,
                   f"--micro-batch-tokens {config.micro_batch_tokens} or --micro-batch-groups "
                   f"{config.micro_batch_groups}")
    trainer = Trainer(models, train, config)
    if config.resume:
        trainer.optimizer.load_state_dict(state.pop("optimizer"))
        trainer.version, trainer.bad_steps = len(state["history"]), state["bad_steps"]
    for copy in copies:
        copy.version = trainer.version
    return SimpleNamespace(
        config=config, rows=rows, held_out=held_out, timeline=timeline, tokenizer=tokenizer,
        score=Scorer(reward, tokenizer, config.reward_seconds), trainer=trainer,
        generator=Generator(copies, generate, config.seed), history=state.pop("history"),
        state=state)


def save(run, out: Path) -> None:
    """Checkpoint `period-<periods trained>` in `out`: the policy as a Hugging Face folder, and what
    a run needs to go on. Written under another name, synced, renamed: what has that name is whole.
    Old ones go after that. Raises OSError, FloatingPointError for weights that are not finite."""
    trainer, final = run.trainer, out / f"period-{run.trainer.version:06d}"
    if not all(p.isfinite().all() for p in trainer.parameters):
        raise FloatingPointError(f"{final} was not saved: not all weights are finite")
    folder = out / f".{final.name}"
    try:
        folder.mkdir()
        trainer.models.policy.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
        torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
        shutil.copy(out / "metrics.jsonl", folder)
        state = run.state | {
            "bad_steps": trainer.bad_steps, "config": vars(run.config), "files": digests(folder)}
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        for path in [*folder.rglob("*"), folder, out / "rollouts.jsonl"]:
            to_disk(path)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that was not resumed from
        folder.rename(final)
        to_disk(out)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"{final} could not be saved: {error}") from error
    found = [folder for folder in checkpoints(out) if folder.name <= final.name]
    for old in found[:-run.config.keep] if run.config.keep > 0 else ():
        shutil.rmtree(old)


def checkpoints(out: Path) -> list[Path]:
    """The folders in `out` that look like checkpoints, the latest last."""
    return sorted(state.parent for state in out.glob("period-[0-9]*/state.json"))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but state.json, which holds them."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "state.json":
            with open(path, "rb") as file:
                name = str(path.relative_to(folder))
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def to_disk(path: Path) -> None:
    """Force a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def restore(config: Config, out: Path, problems_sha256: str, policy) -> dict:
    """The state that a run starts with. With --resume that of the whole checkpoint of the highest
    number, whose weights the policy gets. Raises ValueError for flags that would change the run."""
    if not config.resume:
        if found := checkpoints(out):
            raise ValueError(f"{out} holds {found[-1].name} of another run: --resume it, or choose "
                             "another --out")
        return {"history": [], "problems_sha256": problems_sha256, "evals": [],
                "rollouts_sha256": "", "rollouts_bytes": 0}
    folders = sorted(out.glob("period-*"), reverse=True)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of a damaged one
            state = json.loads((folder / "state.json").read_text())
            if state["files"] == digests(folder):
                break
        print(f"{folder} is damaged: the checkpoint before it is used")
    else:
        raise ValueError(f"--resume: no whole checkpoint in {out}")
    changed = [as_flags({name: state["config"].get(name)}) for name, value in vars(config).items()
               if name not in HARMLESS and state["config"].get(name) != value]
    if state["problems_sha256"] != problems_sha256:
        changed.append("problems in --data")
    if changed:
        raise ValueError(f"--resume: {folder} was made with {', '.join(changed)}")
    for broken in folders[:folders.index(folder)]:  # it must not count as one of those kept
        with contextlib.suppress(OSError):
            (broken / "state.json").rename(broken / "damaged.json")
    policy.load_state_dict(load(str(folder))[0].state_dict())
    state["optimizer"] = torch.load(folder / "optimizer.pt", "cpu", weights_only=True)
    shutil.copy(folder / "metrics.jsonl", out)
    state["history"] = [{name: math.nan if value is None else value for name, value in
                         json.loads(line).items()} for line in open(out / "metrics.jsonl")]
    if any(state["config"].get(name) != getattr(config, name)
           for name in ("eval_data", "eval_samples", "eval_limit")):
        state["evals"] = []  # they compare with none of this evaluation's
    return state


async def evaluate(run, out: Path) -> float:
    """Answer the held-out problems with the weights as they are, through the run's own generator;
    greedily where one answer each is asked for. Writes the answers to eval-<version>.jsonl, prints
    a right and a wrong one, and returns the mean reward."""
    generator, samples, rewards, shown = run.generator, run.config.eval_samples, [], {}

    async def answered(problem):
        responses = await generator.generate(problem, samples)
        return [run.score.text(r) for r in responses], await run.score(problem, responses)

    for inference in generator.copies:
        inference.temperature = run.config.temperature if samples > 1 else 0
    async with asyncio.TaskGroup() as answers:
        tasks = [answers.create_task(answered(problem)) for problem in run.held_out]
    for inference in generator.copies:
        inference.temperature = run.config.temperature
    with open(out / f"eval-{generator.version:06d}.jsonl", "w", encoding="utf-8") as file:
        for problem, task in zip(run.held_out, tasks):
            texts, scores = task.result()
            print(as_json({"question": problem.question, "answer": problem.answer,
                           "responses": texts, "rewards": scores}), file=file)
            for text, reward in zip(texts, scores):
                if not math.isnan(reward):
                    shown.setdefault("right" if reward > 0.5 else "wrong", (problem, text))
            rewards += scores
    run.state["evals"].append(mean_scored(rewards))
    tqdm.write(f"after {generator.version} periods: {mean_scored(rewards):.3f} on "
               f"{len(run.held_out)} held-out problems, {samples} answer(s) each")
    for verdict, (problem, text) in sorted(shown.items()):
        tqdm.write(f"--- {verdict}, to {problem.question!r}, gold {problem.answer}:\n{text}\n---")
    return mean_scored(rewards)


def as_json(record: dict) -> str:
    """One line of JSON, which knows no NaN and no infinity: null."""
    return json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))


def write_rollouts(run, period: int, groups: Sequence[Group], file) -> None:
    """A period's responses, one JSON object each. Chains their ids to the run's digest."""
    digest = hashlib.sha256(run.state["rollouts_sha256"].encode())
    for group in groups:
        for response, reward in zip(group.responses, group.rewards):
            digest.update(np.array([-1, *response.ids]).tobytes())
            print(as_json({"period": period, "key": group.problem.key,
                           "problem": group.problem.question, "response": run.score.text(response),
                           "reward": reward, "finished": response.finished}), file=file)
    file.flush()
    run.state |= {"rollouts_sha256": digest.hexdigest(), "rollouts_bytes": file.tell()}


async def run_periods(run, out: Path) -> list[dict]:
    """The loop of a run. Returns the metrics of every period, as metrics.jsonl holds them."""
    config, trainer, timeline, history = run.config, run.trainer, run.timeline, run.history
    with (open(out / "metrics.jsonl", "a" if config.resume else "w") as log,
          open(out / "rollouts.jsonl", "a", encoding="utf-8") as rollouts,
          tqdm(initial=len(history), total=config.periods, unit="period", disable=None) as bar):
        rollouts.truncate(min(run.state["rollouts_bytes"], rollouts.tell()))
        async with run.generator as generator:
            if run.held_out and not run.state["evals"]:
                await evaluate(run, out)
            for period in range(len(history), config.periods):
                timeline.open()
                problems = draw_problems(run.rows, config.seed, period * config.prompts,
                                         config.prompts)
                groups, step = await run_period(generator, trainer, problems, config.samples,
                                                run.score, overlap=config.schedule == "async")
                await generator.update(trainer.models.policy, trainer.version)
                metrics = {"period": period, **group_metrics(groups), **timeline.close(), **step}
                history.append(metrics)
                groups.sort(key=lambda group: problems.index(group.problem))  # for the digest
                write_rollouts(run, period, groups, rollouts)
                bar.write("period {period:4d}  reward {reward:.3f}  finished {finished_share:.2f}  "
                          "length {response_tokens_mean:.1f}  kl {kl:.4f}  gap {logp_gap_max:.1e}  "
                          "{seconds:.2f} s".format(**metrics))
                done, last = period + 1, period + 1 == config.periods
                if run.held_out and (last or done % config.eval_every == 0):
                    metrics["eval_reward"] = await evaluate(run, out)
                print(as_json(metrics), file=log, flush=True)
                if config.save_every and (last or done % config.save_every == 0):
                    await trainer.worker.run("save", save, run, out)
                bar.update()
    return history


def summary(run, history: list[dict]) -> dict:
    """What a run prints last."""
    result = {"schedule": run.config.schedule, "periods": len(history)}
    if history:
        seconds, tokens = (sum(h[name] for h in history) for name in ("seconds", "tokens"))
        generate, train = (sum(h[name] * h["seconds"] for h in history) / seconds
                           for name in ("generate_busy", "train_busy"))
        used = {*(where for where, _ in stages(run.trainer.models.policy)),
                *(copy.device for copy in run.generator.copies)}
        result |= {
            "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / len(used),
            "reward_first": mean_scored([h["reward"] for h in history[:5]]),
            "reward_last": mean_scored([h["reward"] for h in history[-5:]]),
            "generate_busy": generate, "train_busy": train,
            "overlap_bound": (generate + train) / max(generate, train),
            "logp_gap_max": max(h["logp_gap_max"] for h in history)}
    if run.held_out:
        result |= {"eval_first": run.state["evals"][0], "eval_last": run.state["evals"][-1]}
    weights = hashlib.sha256()
    for _, parameter in sorted(run.trainer.models.policy.named_parameters()):
        weights.update(parameter.detach().cpu().numpy().tobytes())
    return result | {"rollouts_sha256": run.state["rollouts_sha256"],
                     "weights_sha256": weights.hexdigest()}


def train(config: Config) -> dict:
    """A whole run; returns what is printed last. Raises UserError for what the user can mend."""
    try:
        config = config.checked()
        if config.plan:
            table, totals = planned(config)
            print(f"GiB, activations estimated:\n{table}")
            return {"plan": totals}
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        shared = thread("all cores")
        with named_if_no_memory("the set-up", "--rows or --max-new-tokens"):
            run = shared.submit(set_up, config, out, shared).result()
    except (ValueError, OSError, MemoryError) as error:
        raise UserError(" ".join(str(error).split())) from error
    try:
        history = asyncio.run(run_periods(run, out))
    except BaseExceptionGroup as group:
        raise original(group) from None
    result = shared.submit(summary, run, history).result()
    if run.timeline.end:
        print(f"\nThe last period, {history[-1]['seconds']:.2f} s:\n{run.timeline.blocks()}\n")
    return result


def original(error: BaseException) -> BaseException:
    """The first error in a group."""
    return original(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exit codes: 0, 1 a failed run, 2 a user's mistake, 130 Ctrl-C, 143 TERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: end(f"error: {message}", 2)
    for f in fields(Config):
        kind = f.type if isinstance(f.type, type) else f.type.__args__[0]
        how = ({"action": argparse.BooleanOptionalAction} if kind is bool
               else {"type": kind, "choices": f.metadata["choices"]})
        parser.add_argument(flag(f.name), default=f.default, help=f.metadata["help"], **how)
    config = Config(**vars(parser.parse_args(arguments)))
    if not config.out and not config.resume:
        config = replace(config, out=time.strftime(RUNS))

    def stopped(number, _):
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        end(f"interrupted; {going_on(config.out)}", 128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stopped)
    try:
        print(as_json(train(config)), flush=True)
    except UserError as error:
        end(f"error: {error}", 2)
    except (OSError, MemoryError) as error:
        end(f"error: {error}; {going_on(config.out)}", 1)
    except BaseException as error:
        traceback.print_exception(error)
        end(f"the run failed; {going_on(config.out)}", 1)


def going_on(out: str) -> str:
    """What an ended run leaves, in words."""
    saved = checkpoints(Path(out))
    return (f"{saved[-1]} is saved: the same command with --resume --out {out} goes on from "
            "there" if saved else f"no checkpoint is saved in {out} yet")


def end(message: str, code: int) -> None:
    """Leave at once: a normal exit would wait for a thread inside a torch call. Nothing is lost:
    metrics are flushed a period, and a checkpoint has its name once it is whole."""
    with contextlib.suppress(Exception):  # closed, full, or a signal came while it was printing
        sys.stdout.flush()
    os.write(2, f"{message}\n".encode(errors="backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main()
