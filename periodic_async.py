"""Periodic asynchrony: on-policy GRPO in which generation and training overlap within a period.

    pip install -r requirements.txt && python periodic_async.py     # learns to add on a laptop
    python periodic_async.py --model DIR --data train.jsonl         # a real model, real problems

The paper (arXiv 2511.18871) has a cluster and inference servers. Here are one process and one event
loop; generation and training each own a thread for the torch work.
  period     the paper's iteration: P prompts, K responses to each, one optimizer step
  group      the K responses to one prompt, with their rewards
  version    the number of periods trained: θ_t are the weights of version t
  on-policy  every token that is trained on at θ_t was sampled from θ_t: `Trainer.consume` checks it
Weights move only at the end of `run_period`: the step, then the copy. Who waits for what:
  produce     takes a problem; waits for `Generator.generate`; queues the scoring of its group
  Generator   prefills and decodes while any request waits; the end of a group wakes `produce`
  run_period  gives scored groups to `Trainer.consume` in the order in which their generation ended;
              after P groups waits for the optimizer step, then for the weight copy
Dimension letters, in all four files: P prompts a period, K samples a prompt, N responses in a
micro-batch, T packed tokens, A response tokens, V vocabulary, D hidden size.

What makes both schedules equal, bit for bit on a CPU with any number of cores, and its test:
 1. a token is decided by a random stream of (seed, version, problem, sample) and its place in it:
    `Generator.generate`; test_samples_do_not_depend_on_rows_or_order
 2. a decode step depends on the requests alone, all in before the first: `Generator._steps`,
    `InferenceCopy`; test_async_is_sync_bit_for_bit
 3. what is queued is the scoring, in the order in which generation ended: `run_period`;
    test_a_slow_reward_does_not_reorder_groups
 4. a micro-batch is a number of groups, split by tokens, never "what is waiting":
    `Trainer.consume`, `fitting`; test_micro_batches_fill_the_token_limit
 5. every divisor is known before the period, or applied to the sum: `token_weights`;
    test_proposition_2_arrival_order_does_not_change_the_gradient
 6. gradients that meet are added in a fixed order: `token_logprobs`; tests/test_threads.py
 7. no operation depends on the number of threads: sizes in multiples of 8, MKL_CBWR, `_SiLU`,
    `exact_threads`; tests/test_threads.py
 8. the old policy is the policy itself: `TriModel`; test_old_is_the_policy_until_the_first_step
 9. weights move when nothing is in flight: `copy_weights`; test_an_update_is_refused_whole
"""
import argparse
import asyncio
import contextlib
import errno
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
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from attention import ComputedTokens, Packed, attach, pack, upload
from grpo import (CLOSING, LOSSES, Group, Problem, Response, draw_problems, encode_prompt,
                  group_advantages, group_metrics, grpo_loss, is_number, math_reward,
                  mean_scored, read_problems, token_weights)
from model import (TINY, InferenceCopy, TriModel, arithmetic, copy_weights, cut_into_stages,
                   exact_threads, find_devices, frozen_copy, load, memory_plan, stages, stop_ids,
                   usable_cores)

CLIP_NORM = 1.0       # global norm of a step's gradient
WARMUP_PERIODS = 5    # until the learning rate is reached, linearly
BAD_STEPS = 3         # steps in a row without a finite gradient that end the run
CORES = usable_cores()
LENDING = True        # a side may use the other's CPU cores while the other has nothing to do


async def run_period(generator, trainer, problems: Sequence[Problem], samples: int,
                     score: Callable, overlap: bool) -> tuple[list[Group], dict[str, float]]:
    """One period: generate, score and train `samples` responses to every problem; one optimizer
    step; the new weights to the generator. `score(problem, responses)` is a coroutine that returns
    rewards. Returns the groups in the order trained, and the step's metrics. Whatever raises ends
    the period at once, as an ExceptionGroup. The generator may be any object with `version`,
    `generate` and `update` as `Generator` has them."""
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

    async with asyncio.TaskGroup() as producers:  # and of the scorings that they queue
        # All of them run up to the end of `submit`, in this order, before the generator wakes.
        tasks = [producers.create_task(produce(problem)) for problem in problems]
        if not overlap:
            await asyncio.gather(*tasks)  # the synchronous schedule is this line: generation first
        for _ in problems:
            scoring = await queue.get()  # a task
            groups.append(await scoring)
            await trainer.consume(groups[-1])
    metrics = await trainer.step()
    await generator.update(trainer.models.policy, trainer.version)
    return groups, metrics


class Generator:
    """Rollouts on inference copies. `async with` it: its loop runs inside. A step that fails fails
    every waiting request with the original error, and all later ones."""

    def __init__(self, copies: Sequence[InferenceCopy], worker: "Worker", seed: int):
        self.copies, self.worker, self.seed = list(copies), worker, seed
        self.temperature = self.copies[0].temperature
        self._futures = {}  # of the calls in flight: future -> its responses so far
        self._submitted = asyncio.Event()
        self._updating = False
        self._error: BaseException | None = None

    @property
    def version(self) -> int:
        return self.copies[0].version

    async def __aenter__(self):
        self._tasks = await asyncio.TaskGroup().__aenter__()  # it lives as long as the generator
        self._stepping = self._tasks.create_task(self._steps())
        return self

    async def __aexit__(self, *error):
        self._fail(RuntimeError("the generator was closed"))
        self._stepping.cancel()
        await self._tasks.__aexit__(*error)

    async def generate(self, problem: Problem, samples: int, *,
                       temperature: float | None = None) -> list[Response]:
        """`samples` responses to a problem; tokens depend on the weights and on (seed, version,
        problem.key, sample) alone. `temperature`, 0 for the likeliest tokens, is the run's unless
        given, and one for all in flight. Raises ValueError for a prompt too long, RuntimeError for
        another temperature or while weights are copied, and the error of an earlier step."""
        if self._error is not None:
            raise self._error
        if self._updating:  # with no await from here to `submit`: see `run_period`
            raise RuntimeError("a request arrived while weights were copied")
        temperature = self.temperature if temperature is None else temperature
        if not all(copy.idle or copy.temperature == temperature for copy in self.copies):
            raise RuntimeError("requests of two temperatures at once")
        copy = min(self.copies, key=lambda c: c.tokens_waiting)
        copy.temperature = temperature
        # All random numbers of a response at once: a token depends on who it is, not on when it is
        # sampled.
        uniforms = np.empty((samples, copy.max_new_tokens), dtype=np.float32)
        for sample, own in enumerate(uniforms):
            stream = np.random.Philox(key=[self.seed, self.version],
                                      counter=[0, 0, problem.key, sample])
            np.random.Generator(stream).random(dtype=np.float32, out=own)
        future = asyncio.get_running_loop().create_future()
        copy.submit(future, problem.prompt_ids, uniforms)
        self._futures[future] = [None] * samples
        self._submitted.set()
        return await future

    async def update(self, policy, version: int) -> None:
        """Make every copy θ_version. Raises RuntimeError while a request is in flight."""
        if not all(copy.idle for copy in self.copies):  # all or none: they never differ
            raise RuntimeError("weights were copied while requests were in flight")
        self._updating = True
        try:
            await self.worker.run("copy", self._copy_to_all, policy, version)
        finally:
            self._updating = False

    def _copy_to_all(self, policy, version: int) -> None:
        """In the worker's thread: all copies at once, each on streams of its own at both ends, so
        that none waits for another. The step ran on another stream, and generation will run on a
        third: the host waits for all devices before and after."""
        ends = [where for where, _ in stages(policy)] + [copy.device for copy in self.copies]
        devices = [where for where in dict.fromkeys(ends) if where.type != "cpu"]
        for where in devices:
            torch.accelerator.synchronize(where)
        for copy in self.copies:
            with contextlib.ExitStack() as streams:
                for where in devices:
                    streams.enter_context(torch.Stream(where))
                copy_weights(policy, copy, version)
        for where in devices:
            torch.accelerator.synchronize(where)

    async def _steps(self):
        """Waits for a request, then prefills and decodes until none is left. A period's requests
        are all in before its first step, see `run_period`: so no step depends on how long the one
        before took."""
        try:
            while True:
                await self._submitted.wait()
                self._submitted.clear()
                while busy := [copy for copy in self.copies if not copy.idle]:
                    name = "prefill" if any(copy.admits for copy in busy) else "decode"
                    self._deliver(await self.worker.run(name, self._advance, busy))
        except Exception as error:
            self._fail(error)

    def _advance(self, busy: list[InferenceCopy]) -> list[tuple]:
        """In the worker's thread: a prefill or a token a row on every copy that has work, launched
        on all before the first is waited for. Returns the responses that ended."""
        for copy in busy:
            copy.launch()
        ended = []
        for copy in busy:
            ended += copy.finish()
        return ended

    def _deliver(self, ended: list[tuple]) -> None:
        for future, sample, ids, logprobs, finished in ended:
            responses = self._futures[future]
            responses[sample] = Response(tuple(ids), tuple(logprobs), finished)
            if None not in responses:
                del self._futures[future]
                if not future.done():  # its caller may have been cancelled
                    future.set_result(responses)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for future in self._futures:
            if not future.done():
                future.set_exception(error)


class Sample(NamedTuple):
    """A response on its way into a micro-batch."""
    group: Group
    response: Response
    advantage: float
    keep: bool  # False: masked, without gradient; the divisor P * K still counts it


@dataclass
class MicroBatch:
    """Samples as one packed row, with what the loss needs of each response token, (A,)."""
    packed: Packed
    advantages: Tensor
    token_weights: Tensor
    sampled: Tensor                # log-probs recorded in generation
    old: Tensor | None = None      # of the first pass, for the inner steps after it
    reference: Tensor | None = None


class Trainer:
    """Accumulates the gradient of a period; `step` applies it. It takes a fixed number of groups at
    once, in the order they come, never what happens to wait, and cuts them by their tokens into
    micro-batches, one packed row each: every rounding is that of `sync`.

    Over several stages passes are launched as 1F1B, one forward, one backward: after the forward
    pass of a micro-batch every micro-batch in flight goes back by one stage, the newest first.
        stage 0:  F0 F1 F2 B0 F3 B1 F4 B2 ..
        stage 1:  F0 F1 B0 F2 B1 F3 B2 ..      F2: the forward pass of micro-batch 2
        stage 2:  F0 B0 F1 B1 F2 B2 ..         one stage: F0 B0 F1 B1 ..
    """

    def __init__(self, models: TriModel, worker: "Worker", config: "Config",
                 nodes: "Nodes | None" = None):
        self.models, self.worker, self.config = models, worker, config
        self.nodes = nodes or Nodes()  # each trains its share of a period; here they are added up
        self.version = 0    # periods trained
        self.bad_steps = 0  # steps in a row whose gradient was not finite
        # Micro-batches in flight: of each a list of (output, what the next stage took in) of stages
        # whose backward passes are to come, the next at the end. The last stage puts out the loss.
        self.flights: list[list[tuple[Tensor, Tensor | None]]] = []
        self.parameters = list(models.policy.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.learning_rate,
                                           weight_decay=0.0, fused=True)
        # Gradients exist from the start and are zeroed, not freed: new memory is dear, and a period
        # without any gradient is a step with one of zero.
        if config.periods:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        # Backward adds the embedding's rows to its gradient, not a dense tensor of that size.
        models.policy.get_input_embeddings().sparse = models.device.type == "cpu"
        self._start_period()

    def _start_period(self) -> None:
        self.groups = []          # not yet in a micro-batch
        self.batches = []         # trained, kept for inner steps
        self.sums = {}            # of the metrics
        self.skipped = 0          # groups without a pass
        self.unmasked_tokens = 0  # of all groups, skipped ones too

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
        return await self.worker.run("step", self._end_period)

    async def _train_waiting(self) -> None:
        groups, self.groups = self.groups, []
        await self.worker.run("train", self._train, groups)

    # All below runs in the worker's thread.

    def _train(self, groups: list[Group]) -> None:
        config, samples = self.config, []
        for group in groups:
            advantages = group_advantages(group.rewards, scale=config.loss != "dr_grpo").tolist()
            for number, response in enumerate(group.responses):
                unscored = math.isnan(group.rewards[number])
                if unscored:
                    advantages[number] = 0.0
                keep = not (unscored or (config.mask_truncated and not response.finished))
                samples.append(Sample(group, response, advantages[number], keep))
                self.unmasked_tokens += len(response.ids) * keep
            # Equal rewards give advantages of zero: without a KL term the group has no gradient.
            if not config.beta and not any(advantages):
                del samples[-len(advantages):]
                self.skipped += 1
        while samples:
            count = fitting(samples, config)
            batch, samples = self._micro_batch(samples[:count]), samples[count:]
            self._forward_backward(batch)
            if config.inner_steps > 1:
                self.batches.append(batch)

    def _micro_batch(self, samples: list[Sample]) -> MicroBatch:
        config, prompts, responses, sampled = self.config, [], [], []
        for group, own in itertools.groupby(samples, lambda sample: sample.group):
            prompts.append(group.problem.prompt_ids)
            responses.append([sample.response.ids for sample in own])
        packed = pack(prompts, responses, share=config.attention != "repeat", multiple=8)
        for sample in samples:
            sampled += sample.response.logprobs
        advantages = torch.tensor([sample.advantage for sample in samples])
        keep = torch.tensor([sample.keep for sample in samples])
        weights = token_weights(packed.lengths, keep, config.loss,
                                config.prompts * config.samples, config.max_new_tokens)
        # (N,), of a response, -> (A,), of its tokens
        advantages, weights = advantages[packed.response_of], weights[packed.response_of]
        return MicroBatch(packed, *(upload(x, self.models.device)
                                    for x in (advantages, weights, torch.tensor(sampled))))

    def _forward_backward(self, batch: MicroBatch) -> None:
        first, entropy, cuts = batch.old is None, {}, []
        if first:
            policy, batch.old, batch.reference = self.models.logprobs(batch.packed, entropy, cuts)
        else:
            policy = self.models.score(self.models.policy, batch.packed, cuts=cuts)
        loss, sums = grpo_loss(policy, batch.old, batch.reference, batch.advantages,
                               batch.token_weights, clip_low=self.config.clip_low,
                               clip_high=self.config.clip_high, beta=self.config.beta,
                               sampled=batch.sampled, importance_cap=self.config.importance_cap)
        self.flights.append([*cuts, (loss, None)])
        self._back_by_one_stage()
        if first:
            known = ~batch.sampled.isnan()
            gap = (policy.detach() - batch.sampled).abs().where(known, 0)
            sums |= {"gap_sum": gap.sum(), "gap_tokens": known.sum(), "first_tokens": gap.numel(),
                     **entropy}
            self.sums["gap_max"] = torch.maximum(gap.max(), self.sums.get("gap_max", gap[0]))
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def _back_by_one_stage(self) -> None:
        """Newest first: from the last stage to the first. Only launches depend on that order. A
        whole backward pass at once would leave devices idle, for streams are in order."""
        for flight in reversed(self.flights):
            output, taken = flight.pop()
            if taken is None:
                output.backward()
            else:
                output.backward(taken.grad.to(output.device, non_blocking=True))
        self.flights = [flight for flight in self.flights if flight]

    def _end_period(self) -> dict[str, float]:
        passes, norm = 0, 0.0
        while passes < self.config.inner_steps:
            if passes:
                for batch in self.batches:
                    self._forward_backward(batch)
            while self.flights:
                self._back_by_one_stage()
            if not passes:
                self._check_gap()
            norm = self._optimizer_step()
            passes += 1
            if self.bad_steps:
                break  # the weights did not move: the next pass would be the same
        self.version += 1
        metrics = period_metrics(self, passes, norm)
        self._start_period()
        return metrics

    def _check_gap(self) -> None:
        """Before the first step. Raises GapError where tokens came from other weights: a lost
        weight copy shows here alone. Sums the nodes' tokens, which `dapo` divides by."""
        known = self.nodes.sums({"unmasked": self.unmasked_tokens,
                                 "gap": float(self.sums.get("gap_sum", 0)),
                                 "tokens": float(self.sums.get("gap_tokens", 0))})
        self.unmasked_tokens = known["unmasked"]
        limit, mean = self.config.gap_limit, known["gap"] / max(known["tokens"], 1)
        if 0 < limit < mean:
            raise GapError("what was sampled is not from the weights being trained: log-probs are "
                           f"{mean:.1e} a token apart, --gap-limit is {limit:g}")

    def _optimizer_step(self) -> float:
        """Add up the nodes' gradients, scale (`dapo`), clip, step. A gradient that is not finite
        changes nothing but the count of such steps in a row: clipping would make every weight NaN.
        Returns the norm."""
        self.nodes.add([p.grad for p in self.parameters])
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
        torch.clear_autocast_cache()  # of casts of the weights before the step, see `thread`
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def _loss_scale(self) -> float:
        """What is known only when the period is complete: dapo's number of tokens."""
        return 1 / max(self.unmasked_tokens, 1) if self.config.loss == "dapo" else 1.0


class Worker:
    """One side's thread for torch work. While the other side has nothing to do, work goes to one
    `shared` thread on all cores: OpenMP pools with more threads than cores are slow. `working`
    holds the sides at work now, and is one set for both. `relief` says what to lower where memory
    is short; with more than `most` threads bits would be others."""

    def __init__(self, side: str, timeline: "Timeline", shared: ThreadPoolExecutor | None = None,
                 working: set[str] | None = None, relief: str = "", most: int = sys.maxsize):
        self.side, self.timeline, self.relief, self.most = side, timeline, relief, most
        self.working = set() if working is None else working
        self.own = thread(side)
        self.shared = shared or self.own

    async def run(self, name: str, function: Callable, *args):
        """Call a function in a thread; a span of the timeline under `name`."""
        if LENDING and not self.working:
            where, cores = self.shared, CORES
        else:
            where, cores = self.own, max(1, CORES // 2)

        def call():
            """In the thread: the function, its cores, and its span."""
            torch.set_num_threads(min(cores, self.most))  # of this thread alone
            start = time.perf_counter()
            try:
                with named_if_no_memory(name, self.relief):
                    return function(*args)
            finally:
                self.timeline.add(self.side, name, start, time.perf_counter())
        self.working.add(self.side)
        try:
            return await asyncio.get_running_loop().run_in_executor(where, call)
        finally:
            self.working.discard(self.side)


# ---- The method ends here. What follows makes it a program: the trainer's counting; flags; threads
# and the timeline; several nodes; reading and scoring; a run from set-up to summary; checkpoints;
# the command.

# ---- The trainer's counting

class GapError(RuntimeError):
    """What was sampled is not from the weights being trained."""


def fitting(samples: list[Sample], config: "Config") -> int:
    """How many fit into --micro-batch-tokens as attention computes them, 1 at least. Any split
    is exact: the loss is a sum over responses."""
    tokens, before = ComputedTokens(), None
    for number, (group, response, *_) in enumerate(samples):
        prompt = len(group.problem.prompt_ids)
        if group is not before or config.attention == "repeat":
            tokens.add(0, prompt)
        tokens.add(prompt, len(response.ids))
        if number and tokens.total() > config.micro_batch_tokens:
            return number
        before = group
    return len(samples)


def period_metrics(trainer: Trainer, passes: int, norm: float) -> dict[str, float]:
    """Of a period. Beside the norm, all that the trainer reads back from the device."""
    sums = {name: float(value) for name, value in trainer.sums.items()}
    sums = defaultdict(float, trainer.nodes.sums(sums | {"skipped_groups": trainer.skipped}))
    tokens, first_tokens = max(sums["kept_tokens"], 1), max(sums["first_tokens"], 1)
    return {
        "loss": sums["loss"] * trainer._loss_scale() / passes, "kl": sums["kl_sum"] / tokens,
        "clip_low_share": sums["clip_low_tokens"] / tokens,
        "clip_high_share": sums["clip_high_tokens"] / tokens,
        "importance_capped_share": sums["importance_capped_tokens"] / tokens,
        "entropy": sums["entropy_sum"] / first_tokens, "logp_gap_max": sums["gap_max"],
        "logp_gap_mean": sums["gap_sum"] / max(sums["gap_tokens"], 1), "gradient_norm": norm,
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "skipped_groups": sums["skipped_groups"], "bad_steps": trainer.bad_steps}


# ---- Flags

RUNS = f"runs/%Y-%m-%d_%H-%M-%S_{os.getpid()}"  # two may start within a second
# Defaults of any other model than the built-in one, which has its own, `TINY`.
LARGE = {"learning_rate": 1e-6, "max_new_tokens": 512, "micro_batch_groups": 1}
# Flags that a resumed run may change: the tokens and weights of its periods stay the same.
HARMLESS = {"schedule", "periods", "recompute", "eval_data", "eval_every", "eval_samples",
            "eval_limit", "gap_limit", "plan", "out", "save_every", "keep", "resume"}


class UserError(Exception):
    """A mistake in what the user gave: one sentence, exit code 2."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_flags(settings: dict) -> str:
    """As the command line takes them."""
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words.append(f"{flag(name)} {shlex.quote(str(value))}")
    return " ".join(words)


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
    # At 7B, simulated, a period is shorter than with 16384 by 1 to 13 %: stages wait less.
    micro_batch_tokens: int = _default(8192, "tokens at most, filled up: one with more is split")
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
    importance_cap: float = _default(0.0, "the surrogate times exp(old - sampled), this at "
                                          "most, where another engine samples; 0: off", least=0)
    gap_limit: float | None = _default(None, "a larger mean gap of sampled and trained log-probs "
                                             "ends the run (1e-3; bfloat16: 0.1); 0: off", least=0)
    mask_truncated: bool = _default(False, "no gradient from responses cut off at the limit")
    learning_rate: float | None = _default(None, "of AdamW once warm (1e-6; tiny: 2e-4)", least=0)
    # evaluation, between periods and at both ends
    eval_data: str = _default("", "held-out problems, as --data; empty: no evaluation")
    eval_every: int = _default(10, "periods from one evaluation to the next")
    eval_samples: int = _default(1, "answers a problem: 1 greedy, more at --temperature, mean")
    eval_limit: int = _default(0, "the first problems alone; 0: all", least=0)
    # the machine
    attention: str = _default("shared", "shared: a prompt once a group; dense: the same by a T x T "
                              "mask; repeat: a copy a response", ("shared", "dense", "repeat"))
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
        defaults = (TINY if self.model == "tiny" else LARGE) | {
            "out": time.strftime(RUNS), "gap_limit": 0.1 if self.dtype == "bfloat16" else 1e-3}
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
        if 0 < config.importance_cap < 1:  # it would scale tokens of equal log-probs, too
            raise ValueError("--importance-cap must be 1 or more, or 0 for none")
        if not config.periods and not config.eval_data:
            raise ValueError("--periods 0 evaluates and stops: it needs --eval-data")
        if config.keep == 0 or (config.resume and not self.out):
            raise ValueError("--keep must be 1 or more, or -1 for all; --resume needs --out")
        return config


# ---- Threads and the timeline

def thread(name: str) -> ThreadPoolExecutor:
    """One thread for torch work."""
    def begin():
        """In the thread, before its first work."""
        # Sets up torch's pool now: done later, that would undo `set_num_threads` in other threads.
        torch.get_num_threads()
        # The bfloat16 casts of weights are kept for all passes of a step. Autocast's cache is one
        # for the process, and leaving an outermost autocast in any thread empties it: no thread of
        # a run ever has an outermost one, and `Trainer` empties the cache after each step.
        torch.autocast_increment_nesting()
    return ThreadPoolExecutor(1, name, initializer=begin)


class Timeline:
    """Who worked when in a period: spans (side, name, start, end) of `perf_counter`. Written as a
    trace for chrome://tracing and Perfetto: an array, whose last bracket is optional. A resumed
    run adds to the lines that are there, but for half a one."""

    def __init__(self, trace: Path, resume: bool = False):
        self.start, self.end = 0.0, 0.0
        self.spans: list[tuple[str, str, float, float]] = []
        whole = trace.read_bytes().rfind(b"\n") + 1 if resume and trace.exists() else 0
        self.file = open(trace, "a" if whole else "w")
        if whole:
            self.file.truncate(whole)
        else:
            print("[", file=self.file)

    def open(self) -> None:
        """Begin a period."""
        self.start, self.spans = time.perf_counter(), []

    def add(self, side: str, name: str, start: float, end: float) -> None:
        self.spans.append((side, name, start, end))

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


# ---- Several nodes

PATIENCE = timedelta(hours=24)  # with a slow node: torch's own ten minutes may be too few
SILENCE = 7                     # seconds without a heartbeat after which a node counts as lost
BUCKET = 2**24                  # numbers that are summed in one call


class Nodes:
    """The processes of a `torchrun`, each a node, or this one alone: then nothing here does
    anything. All nodes make the same calls in the same order, and wait for the slowest."""

    def __init__(self, rank: int = 0, count: int = 1, store=None):
        self.rank, self.count, self.store = rank, count, store
        self.groups = {}  # device -> the process group that sums there
        self.closed, self.watcher = threading.Event(), None

    def share(self, items: Sequence) -> Sequence:
        return items[self.rank::self.count]

    def folder(self, out: Path) -> Path:
        return out / f"node-{self.rank:03d}" if self.rank else out

    def all(self, value) -> list:
        """What every node has, by rank. Raises ConnectionError where one has ended."""
        values = [value]
        if self.count > 1:
            values = [None] * self.count
            with lost_if_it_fails():
                dist.all_gather_object(values, value)
        return values

    async def gathered(self, value) -> list:
        """`all`, in a thread: a blocked event loop would see no signal."""
        return self.all(value) if self.count == 1 else await asyncio.to_thread(
            self.all, value)

    def sums(self, own: dict[str, float]) -> dict[str, float]:
        """Over the nodes, by name; of `gap_max` the largest."""
        first, *others = self.all(own)
        for name in dict.fromkeys(itertools.chain(first, *others)) if others else ():
            values = [node.get(name, 0) for node in (first, *others)]
            first[name] = float(np.max(values)) if name == "gap_max" else sum(values)
        return first

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes its sum over the nodes, the same bits on each. In flat buckets: with
        a call a tensor the small ones would cost as much as the large ones."""
        devices = dict.fromkeys(tensor.device for tensor in tensors) if self.count > 1 else ()
        for where in devices:
            if where not in self.groups:
                # One thread drives the devices of all stages, so each has a group of its own. With
                # several devices in a process no sum has been run yet.
                self.groups[where] = dist.new_group(timeout=PATIENCE) if len(devices) > 1 else None
            pieces = [piece for tensor in tensors if tensor.device == where
                      for piece in tensor.view(-1).split(BUCKET)]
            while pieces:
                ends = itertools.accumulate(map(len, pieces))
                fitting = sum(1 for _ in itertools.takewhile(lambda end: end <= BUCKET, ends))
                bucket, pieces = pieces[:fitting], pieces[fitting:]
                flat = torch.cat(bucket)
                with lost_if_it_fails():
                    dist.all_reduce(flat, group=self.groups[where])
                for piece, summed in zip(bucket, flat.split([len(piece) for piece in bucket])):
                    piece.copy_(summed)

    def alike(self, what: str, function: Callable, *args) -> None:
        """Wait for all nodes. Raises ValueError where the function's value is not the same."""
        values = self.all(function(*args)) if self.count > 1 else []
        if others := [node for node, value in enumerate(values) if value != values[0]]:
            raise ValueError(f"{what} of node {others[0]} are not those of node 0")

    def check(self, config: Config) -> None:
        """Raises ValueError where a node would have no prompt."""
        if config.periods and self.count > config.prompts:
            raise ValueError(f"--prompts {config.prompts} are fewer than the {self.count} nodes")
        if config.periods and config.prompts % self.count:
            print(f"{self.count} nodes share {config.prompts} prompts: the largest share, "
                  f"{-(-config.prompts // self.count)}, decides how long a period takes")

    def watch(self, out: str) -> None:
        """In a daemon thread: end where another node has ended. A node that computes would not hear
        of it from torchrun, which ends the nodes of one agent alone."""
        names = [f"beat-{node}" for node in range(self.count)]
        last, heard = [None] * self.count, [0.0] * self.count
        while not self.closed.wait(1):
            lost = None
            try:
                self.store.set(names[self.rank], str(time.monotonic()))
                if self.store.check(["ended"]):
                    return self.speak()
                for node, beat in enumerate(self.store.multi_get(names)):
                    if beat != last[node]:
                        last[node], heard[node] = beat, time.monotonic()
                    elif time.monotonic() - heard[node] > SILENCE:
                        lost = node
            except RuntimeError:  # the store is in the torchrun of node 0
                lost = 0
            if lost is not None and not self.closed.is_set():
                self.speak()
                end(f"error: node {lost} is lost; {going_on(out)}", 1)

    def speak(self) -> None:
        """Called by a node that ends, before it says why. Returns for the first of them; any other
        leaves without a word, a second later, for torchrun ends all once one is gone."""
        if self.count > 1:
            with contextlib.suppress(RuntimeError):  # node 0 has ended, and the store with it
                if self.store.compare_set("ended", "", str(self.rank)) != b"%d" % self.rank:
                    time.sleep(1)
                    os._exit(1)

    def close(self) -> None:
        """Wait for all nodes: from here on each may end when it likes."""
        if self.count > 1:
            self.all(None)
            self.closed.set()
            self.watcher.join()  # the interpreter must not end while it is inside a call
            dist.destroy_process_group()


@contextlib.contextmanager
def lost_if_it_fails():
    """What torch raises where a connection breaks says nothing of nodes."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError("another node has ended") from error


def connect(out: str) -> tuple[Nodes, str]:
    """The nodes that `torchrun` started, and --out of the first of them; else this process alone.
    The others print nothing but errors."""
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        return Nodes(), out
    dist.init_process_group(timeout=PATIENCE)  # gloo, nccl or hccl: of each device torch's choice
    # A connection of its own: in the group's a heartbeat would wait while torch waits for a node.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False, timeout=timedelta(seconds=SILENCE))
    store = dist.PrefixStore(f"run-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    nodes = Nodes(dist.get_rank(), dist.get_world_size(), store)
    store.set(f"beat-{nodes.rank}", "")
    out = nodes.all(out)[0]
    if nodes.rank:
        sys.stdout = open(os.devnull, "w")
    nodes.watcher = threading.Thread(target=nodes.watch, args=[out], daemon=True)
    nodes.watcher.start()
    return nodes, out


# ---- Reading and scoring

def read_questions(config: Config, source: str) -> list[Problem]:
    """The problems of the file that the flag `source` names, without one the built-in sums; their
    prompts are not encoded yet: a mistake shows before a model is loaded. Raises ValueError."""
    path = getattr(config, source)
    read = read_problems(path) if path else [arithmetic(config.seed, i) for i in range(1000)]
    if words := sum(not is_number(gold) for _, gold in read):
        print(f"{path}: {words} of {len(read)} gold answers are no plain numbers: `math` compares "
              "them by their spelling")
    problems = [Problem((), gold, key, question) for key, (question, gold) in enumerate(read)]
    return enough(config, source, len(read), problems)


def prompt_template(config: Config, source: str) -> str:
    """Raises ValueError for what is neither a template nor a file that holds one."""
    template = config.prompt_template or (
        "{question}\n\n" + CLOSING if getattr(config, source) else "{question}")
    try:
        if "{question}" not in template:
            template = Path(template).read_text(encoding="utf-8")
        template.index("{question}")
    except (OSError, ValueError) as error:
        raise ValueError("--prompt-template is neither text with {question} in it nor a file that "
                         f"holds such text: {error}") from None
    return template


def encoded(config: Config, source: str, read: list[Problem], tokenizer) -> list[Problem]:
    """Those problems with their prompts, whose prompts are short enough and whose questions hold no
    text that would become a special token."""
    template, name = prompt_template(config, source), getattr(config, source) or "arithmetic"
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    plain = [row for row in read if not any(token in row.question for token in special)]
    rows = [replace(row, prompt_ids=encode_prompt(
        tokenizer, template.replace("{question}", row.question))) for row in plain]
    fitting = [row for row in rows if len(row.prompt_ids) <= config.max_prompt_tokens]
    if len(plain) < len(read):
        print(f"{name}: {len(read) - len(plain)} of {len(read)} questions hold the text of a "
              "special token of the tokenizer, and are skipped")
    if len(fitting) < len(rows):
        print(f"{name}: {len(rows) - len(fitting)} of {len(read)} prompts are longer than "
              f"--max-prompt-tokens {config.max_prompt_tokens}, and skipped")
    return enough(config, source, len(read), fitting)


def enough(config: Config, source: str, read: int, kept: list[Problem]) -> list[Problem]:
    """The problems kept of those read. Raises ValueError where they are too few for a period."""
    least = config.prompts if config.periods and source == "data" else 1
    if len(kept) < least:
        raise ValueError(f"{getattr(config, source) or 'arithmetic'}: {read} problems read, "
                         f"{len(kept)} kept, but {flag(source)} with --prompts {config.prompts} "
                         f"needs {least}")
    return kept


class Threads(ThreadPoolExecutor):
    """A daemon thread a call. Nothing waits for one that is stuck: no event loop that ends, and no
    process."""

    def submit(self, function, /, *args, **kwargs) -> Future:
        future = Future()
        future.set_running_or_notify_cancel()  # whose caller may go away: the result has a place

        def call():
            """In the thread: whatever comes of the function goes into the future."""
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                if isinstance(error, StopIteration):  # which no asyncio future can hold
                    stop, error = error, RuntimeError("the reward raised StopIteration")
                    error.__cause__ = stop
                future.set_exception(error)
        threading.Thread(target=call, daemon=True).start()
        return future

    def shutdown(self, wait=True, *, cancel_futures=False) -> None:
        pass


THREADS = Threads()


class Scorer:
    """Rewards of responses. An async function is awaited; a plain one runs in a thread, `threads`
    at most at once, so that the event loop goes on; an awaitable that it returns is awaited. A call
    that takes longer than `seconds` counts 0 and is left behind, for neither a thread nor a task
    that catches its cancellation can be stopped. None and NaN stay NaN: unscored."""

    def __init__(self, function: Callable, tokenizer, seconds: float, threads: int = CORES):
        self.function, self.tokenizer, self.seconds = function, tokenizer, seconds
        self.awaited = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.seats = contextlib.nullcontext() if self.awaited else asyncio.Semaphore(threads)
        self.numbers = defaultdict(list)  # that came with rewards, by name

    def text(self, response: Response) -> str:
        return self.tokenizer.decode(response.ids, skip_special_tokens=True)

    async def __call__(self, problem: Problem, responses: Sequence[Response]) -> list[float]:
        async with asyncio.TaskGroup() as calls:
            rewards = [calls.create_task(self._reward(self.text(r), problem)) for r in responses]
        return [reward.result() for reward in rewards]

    async def _reward(self, text: str, problem: Problem) -> float:
        async with self.seats:
            # No task of the group, and `wait`, not `timeout`: both would wait for its end.
            call = asyncio.ensure_future(self._call(text, problem))
            try:
                await asyncio.wait([call], timeout=self.seconds)
            finally:
                late = call.cancel()
                call.add_done_callback(lambda call: call.cancelled() or call.exception())
        if late:
            tqdm.write(f"a reward of problem {problem.key} took more than --reward-seconds "
                       f"{self.seconds} and counts 0")
            return 0.0
        return self._checked(call.result(), problem)

    async def _call(self, text: str, problem: Problem):
        try:
            if self.awaited:
                return await self.function(text, problem)
            call = THREADS.submit(self.function, text, problem)
            result = await asyncio.wrap_future(call)
            if not inspect.isawaitable(result):
                return result
            self.seats = contextlib.nullcontext()  # of the next calls of a lambda, say
            return await result
        except Exception as error:
            error.add_note(f"raised by the reward of a response to problem {problem.key}")
            raise

    def _checked(self, result, problem: Problem) -> float:
        """A reward; keeps the numbers that came with it."""
        try:
            reward, numbers = result if isinstance(result, tuple) else (result, {})
            reward = math.nan if reward is None else float(reward)
            numbers = {name: float(number) for name, number in numbers.items()}
            if math.isinf(reward) or not (all(map(math.isfinite, numbers.values()))
                                          and all(isinstance(name, str) for name in numbers)):
                raise ValueError
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise ValueError(f"the reward of a response to problem {problem.key} is {result!r:.200}"
                             ", not a finite number, None, or one of them and {name: number}"
                             ) from None
        for name, number in numbers.items():
            self.numbers[name].append(number)
        return reward


def means(told: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Of the numbers that came with rewards, of all nodes, in any order of the calls."""
    merged = defaultdict(list)
    for numbers in told:
        for name, values in numbers.items():
            merged[name] += values
    return {f"reward/{name}": math.fsum(values) / len(values)
            for name, values in sorted(merged.items())}


def reward_function(name: str) -> Callable:
    """`math`, or FILE.py:FUNCTION: that file is the only code of a user that a run executes.
    Raises ValueError for one that cannot be loaded."""
    if name == "math":
        async def at_once(response, problem):  # a thread costs more than the comparison
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


# ---- A run, from set-up to summary

EVAL_KEYS = 2**62     # keys of evaluated problems start here, above all that are trained on


@dataclass
class Run:
    """The parts of a run, set up."""
    config: Config
    out: Path
    problems: list[Problem]
    held_out: list[Problem]
    tokenizer: Any
    score: Scorer
    trainer: Trainer
    generator: Any          # Generator, or what stands in for it
    timeline: Timeline
    devices: set            # all that are used
    history: list[dict]     # metrics of the periods so far
    state: dict             # what a checkpoint keeps beside weights, optimizer and metrics
    nodes: Nodes = field(default_factory=Nodes)

    def opened(self, name: str, mode: str):
        """A file of the run: the first node's, for all of them."""
        return open(os.devnull if self.nodes.rank else self.out / name, mode, encoding="utf-8")


def built_in_generator(config: Config, policy, tokenizer, longest_prompt: int,
                       worker: Worker) -> Generator:
    """An inference copy on each of --rollout-devices."""
    dtype = getattr(torch, config.dtype)
    copies = []
    for where in rollout_devices(config):
        model = cut_into_stages(frozen_copy(policy, dtype), [where])
        copies.append(InferenceCopy(model, stop_ids(policy, tokenizer), rows=config.rows,
                                    longest_prompt=longest_prompt, dtype=dtype,
                                    max_new_tokens=config.max_new_tokens,
                                    temperature=config.temperature))
    return Generator(copies, worker, config.seed)


def rollout_devices(config: Config) -> list[torch.device]:
    """Those named, or the first of the training devices."""
    return find_devices(config.rollout_devices) if config.rollout_devices else find_devices(
        config.train_devices)[:1]


def set_up(config: Config, out: Path, shared: ThreadPoolExecutor,
           make_generator: Callable = built_in_generator, nodes: Nodes | None = None) -> Run:
    """Load the parts of a run. `make_generator` is called as `built_in_generator` is. Raises
    ValueError or OSError for what the user can mend."""
    torch.set_num_threads(CORES)  # of this thread
    nodes = nodes or Nodes()
    begun = time.perf_counter()
    reward = reward_function(config.reward)  # first all in which a mistake shows at once
    sources = ["data", "eval_data"] if config.eval_data else ["data"]
    read = {source: read_questions(config, source) for source in sources}
    read_sha256 = sha256([prompt_template(config, "data"),
                          [(p.question, p.answer) for p in read["data"]]])
    train_on, rollout_on = find_devices(config.train_devices), rollout_devices(config)
    if train_on[0].type != "cpu" and config.model != "tiny" and config.periods:
        if too_much := memory_plan(**vars(config))[2]:
            raise ValueError(too_much)
    folder, state = start(config, out, read_sha256, first=not nodes.rank)
    policy, tokenizer = load(config.model, train_on, seed=config.seed)
    if config.attention == "dense":
        attach(policy, "dense")
    problems, *held_out = (encoded(config, source, read[source], tokenizer) for source in sources)
    held_out = [replace(problem, key=EVAL_KEYS + problem.key) for rows in held_out
                for problem in rows[:config.eval_limit or None]]
    prompts_sha256 = sha256([p.prompt_ids for p in problems])
    if state.setdefault("prompts_sha256", prompts_sha256) != prompts_sha256:
        print("the prompts are not those of the run that is resumed, though questions, answers and "
              "template are: its chat template prints the date, perhaps")
    dtype = getattr(torch, config.dtype)
    reference = frozen_copy(policy, dtype) if config.beta and config.periods else None
    if folder:
        restore(config, out, folder, state, policy)
    metrics = state.pop("metrics", "")
    nodes.folder(out).mkdir(exist_ok=True)
    if not nodes.rank:
        for half_written in out.glob(".period-*"):
            shutil.rmtree(half_written)
        if config.resume:
            (out / "metrics.jsonl").write_text(metrics)
    timeline, working = Timeline(nodes.folder(out) / "trace.json", config.resume), set()
    most = exact_threads(policy, CORES)
    generate = Worker("generate", timeline, shared, working, f"--rows {config.rows}", most)
    train = Worker("train", timeline, shared, working,
                   f"--micro-batch-tokens {config.micro_batch_tokens} or --micro-batch-groups "
                   f"{config.micro_batch_groups}", most)
    longest = max(len(problem.prompt_ids) for problem in [*problems, *held_out])
    generator = make_generator(config, policy, tokenizer, longest, generate)
    if config.recompute:
        policy.activation_checkpointing_enable()
    models = TriModel(policy, reference=reference, temperature=config.temperature, dtype=dtype)
    trainer = Trainer(models, train, config, nodes)
    if config.resume:
        trainer.optimizer.load_state_dict(state.pop("optimizer"))
        trainer.version, trainer.bad_steps = len(state["history"]), state["bad_steps"]
    print(f"{config.model}: {sum(p.numel() for p in policy.parameters()):,} parameters, ready in "
          f"{time.perf_counter() - begun:.0f} s. Output goes to {out}. The run:",
          as_flags(vars(config)))
    return Run(config=config, out=out, problems=problems, held_out=held_out, tokenizer=tokenizer,
               score=Scorer(reward, tokenizer, config.reward_seconds), trainer=trainer,
               generator=generator, timeline=timeline, history=state.pop("history"), state=state,
               devices={*train_on, *rollout_on}, nodes=nodes)


async def run_periods(run: Run) -> list[dict]:
    """The loop of a run. Returns the metrics of every period, as metrics.jsonl holds them."""
    config, nodes, trainer, timeline, history = (run.config, run.nodes, run.trainer, run.timeline,
                                                 run.history)
    with (run.opened("metrics.jsonl", "a" if config.resume else "w") as log,
          run.opened("rollouts.jsonl", "a") as rollouts,
          tqdm(initial=len(history), total=config.periods, unit="period",
               disable=True if nodes.rank else None) as bar):
        if not nodes.rank:
            rollouts.truncate(min(run.state["rollouts_bytes"], rollouts.tell()))
        async with run.generator as generator:
            if generator.version != trainer.version:  # a resumed run
                await generator.update(trainer.models.policy, trainer.version)
            if run.held_out and not run.state["evals"]:
                await evaluate(run)
            for period in range(len(history), config.periods):
                timeline.open()
                run.score.numbers.clear()  # of an evaluation
                problems = draw_problems(run.problems, config.seed, period * config.prompts,
                                         config.prompts)
                groups, step = await run_period(generator, trainer, nodes.share(problems),
                                                config.samples, run.score,
                                                overlap=config.schedule == "async")
                times = timeline.close()
                told = await nodes.gathered((groups, dict(run.score.numbers)))
                groups = [group for own, _ in told for group in own]
                metrics = {"period": period, **group_metrics(groups), **times, **step,
                           **means([numbers for _, numbers in told])}
                history.append(metrics)
                groups.sort(key=lambda group: problems.index(group.problem))  # for the digest
                write_rollouts(run, period, groups, rollouts)
                bar.write("period {period:4d}  reward {reward:.3f}  finished {finished_share:.2f}  "
                          "length {response_tokens_mean:.1f}  kl {kl:.4f}  gap {logp_gap_max:.1e}  "
                          "{seconds:.2f} s".format(**metrics))
                done, last = period + 1, period + 1 == config.periods
                if run.held_out and (last or done % config.eval_every == 0):
                    metrics["eval_reward"] = await evaluate(run)
                print(as_json(metrics), file=log, flush=True)
                if config.save_every and (last or done % config.save_every == 0):
                    if not nodes.rank:
                        await trainer.worker.run("save", save, run)
                    await trainer.worker.run("compare", nodes.alike, "the weights",
                                             weights_sha256, trainer)
                bar.update()
    return history


def summary(run: Run) -> dict:
    """What a run prints last."""
    history = run.history
    result = {"schedule": run.config.schedule, "periods": len(history)}
    if history:
        seconds, tokens = (sum(h[name] for h in history) for name in ("seconds", "tokens"))
        generate, train = (sum(h[name] * h["seconds"] for h in history) / seconds
                           for name in ("generate_busy", "train_busy"))
        result |= {
            "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": (
                tokens / seconds / len(run.devices) / run.nodes.count),
            "reward_first": mean_scored([h["reward"] for h in history[:5]]),
            "reward_last": mean_scored([h["reward"] for h in history[-5:]]),
            "generate_busy": generate, "train_busy": train,
            "overlap_bound": (generate + train) / max(generate, train),
            "logp_gap_max": max(h["logp_gap_max"] for h in history)}
    if run.held_out:
        result |= {"eval_first": run.state["evals"][0], "eval_last": run.state["evals"][-1]}
    return result | {"rollouts_sha256": run.state["rollouts_sha256"],
                     "weights_sha256": weights_sha256(run.trainer)}


def weights_sha256(trainer: Trainer) -> str:
    weights = hashlib.sha256()
    for _, parameter in sorted(trainer.models.policy.named_parameters()):
        weights.update(parameter.detach().cpu().numpy().tobytes())
    return weights.hexdigest()


async def evaluate(run: Run) -> float:
    """Answer the held-out problems with the weights as they are, through the run's own generator;
    greedily where one answer each is asked for. Writes the answers to eval-<version>.jsonl, prints
    a right and a wrong one, and returns the mean reward."""
    generator, samples, rewards, shown = run.generator, run.config.eval_samples, [], {}

    async def answered(problem):
        responses = await generator.generate(
            problem, samples, temperature=run.config.temperature if samples > 1 else 0)
        return [run.score.text(r) for r in responses], await run.score(problem, responses)

    async with asyncio.TaskGroup() as answers:
        tasks = {number: answers.create_task(answered(problem))
                 for number, problem in run.nodes.share([*enumerate(run.held_out)])}
    found = {}
    for own in await run.nodes.gathered({number: tasks[number].result() for number in tasks}):
        found |= own
    with run.opened(f"eval-{generator.version:06d}.jsonl", "w") as file:
        for number, problem in enumerate(run.held_out):
            texts, scores = found[number]
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


def write_rollouts(run: Run, period: int, groups: Sequence[Group], file) -> None:
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


def as_json(record: dict) -> str:
    """One line of JSON, which knows no NaN and no infinity: null."""
    return json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))


# ---- Checkpoints

def save(run: Run) -> None:
    """Checkpoint `period-<periods trained>` in `run.out`: the policy as a Hugging Face
    folder, and what a run needs to go on. Written under another name, synced, renamed: what has
    that name is whole. Old ones go after that. Raises OSError, and FloatingPointError for weights
    that are not finite."""
    trainer, out = run.trainer, run.out
    final = out / f"period-{trainer.version:06d}"
    if not all(p.isfinite().all() for p in trainer.parameters):
        raise FloatingPointError(f"{final} was not saved: not all weights are finite")
    folder = out / f".{final.name}"
    try:
        folder.mkdir()
        policy = trainer.models.policy
        policy.generation_config.eos_token_id = stop_ids(policy, run.tokenizer) or None
        policy.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
        torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
        shutil.copy(out / "metrics.jsonl", folder)
        state = run.state | {
            "bad_steps": trainer.bad_steps, "config": vars(run.config), "files": digests(folder)}
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        synced = [to_disk(p) for p in [*folder.rglob("*"), folder, out / "rollouts.jsonl"]]
        shutil.rmtree(final, ignore_errors=True)  # a damaged one that was not resumed from
        folder.rename(final)
        if not all([*synced, to_disk(out)]):
            tqdm.write(f"{final} is saved, but not synced: its file system cannot")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"{final} could not be saved: {error}") from error
    found = [folder for folder in checkpoints(out) if number(folder) <= trainer.version]
    for old in found[:-run.config.keep] if run.config.keep > 0 else ():
        shutil.rmtree(old)


def checkpoints(out: Path) -> list[Path]:
    """The folders in `out` that look like checkpoints, the latest last."""
    found = (state.parent for state in out.glob("period-*/state.json"))
    return sorted((folder for folder in found if number(folder) < math.inf), key=number)


def number(folder: Path) -> float:
    """The period of a checkpoint; infinite for what only begins as its name does."""
    digits = folder.name.removeprefix("period-")
    return int(digits) if digits.isdecimal() else math.inf


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but state.json, which holds them."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "state.json":
            with open(path, "rb") as file:
                name = str(path.relative_to(folder))
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def sha256(of) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()


def to_disk(path: Path) -> bool:
    """Force a file or a folder to the disk. False where its file system has no such thing."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        return True
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    finally:
        os.close(handle)


LOCKS = []  # open files: closing one would free its lock


def lock(out: Path) -> None:
    """Make `out` this process's own until it ends, in whichever way. The lock is of the process,
    not of its children. Raises ValueError where another has it; goes on where no locks are."""
    LOCKS.append(open(out / ".lock", "a"))
    try:
        import fcntl  # which POSIX systems have
        fcntl.lockf(LOCKS[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(f"--out {out}: another run that has not ended writes there") from None
    except (ImportError, OSError):
        pass


def start(config: Config, out: Path, read_sha256: str, first: bool) -> tuple[Path | None, dict]:
    """Lock `out`, which the `first` node does for all. Returns the checkpoint to resume from, if
    any, and the state to start with. Raises ValueError for what is in the way, or for flags that
    would change the run."""
    if not config.resume:
        if found := checkpoints(out):
            raise ValueError(f"{out} holds {found[-1].name} of another run: --resume it, or choose "
                             "another --out")
        out.mkdir(parents=True, exist_ok=True)
        if first:
            lock(out)
        return None, {"history": [], "problems_sha256": read_sha256, "evals": [],
                      "rollouts_sha256": "", "rollouts_bytes": 0}
    if first and out.is_dir():
        lock(out)
    folder, state = latest_whole(out)
    changed = [as_flags({name: state["config"].get(name)}) for name, value in vars(config).items()
               if name not in HARMLESS and state["config"].get(name) != value]
    if state["problems_sha256"] != read_sha256:
        changed.append("problems in --data")
    if changed:
        raise ValueError(f"--resume: {folder} was made with {', '.join(changed)}")
    return folder, state


def latest_whole(out: Path) -> tuple[Path, dict]:
    """The whole checkpoint of the highest number, and its state. Names those that are damaged."""
    for folder in sorted(out.glob("period-*"), key=number, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of a damaged one
            state = json.loads((folder / "state.json").read_text())
            if state["files"] == digests(folder):
                return folder, state
        print(f"{folder} is damaged: the checkpoint before it is used")
    raise ValueError(f"--resume: no whole checkpoint in {out}")


def restore(config: Config, out: Path, folder: Path, state: dict, policy) -> None:
    """Give the policy the weights of a checkpoint, and complete its state."""
    for later in out.glob("period-*"):  # damaged: it must not count as one of those kept
        if number(later) > number(folder):
            with contextlib.suppress(OSError):
                (later / "state.json").rename(later / "damaged.json")
    policy.load_state_dict(load(str(folder))[0].state_dict())
    state["optimizer"] = torch.load(folder / "optimizer.pt", "cpu", weights_only=True)
    state["metrics"] = (folder / "metrics.jsonl").read_text()
    state["history"] = [{name: math.nan if value is None else value for name, value in
                         json.loads(line).items()} for line in state["metrics"].splitlines()]
    if any(state["config"].get(name) != getattr(config, name)
           for name in ("eval_data", "eval_samples", "eval_limit")):
        state["evals"] = []  # they compare with none of this evaluation's


# ---- The command

def train(config: Config, make_generator: Callable = built_in_generator,
          nodes: Nodes | None = None) -> dict:
    """A whole run; returns what is printed last. Raises UserError for what the user can mend."""
    nodes = nodes or connect(config.out)[0]
    try:
        config = config.checked()
        if config.plan:
            table, totals, too_much = memory_plan(**vars(config))
            print(f"GiB, activations estimated:\n{table}")
            if too_much:
                raise ValueError(too_much)
            nodes.close()
            return {"plan": totals}
        nodes.check(config)
        out, shared = Path(config.out), thread("all cores")
        with named_if_no_memory("the set-up", "--rows or --max-new-tokens"):
            run = shared.submit(set_up, config, out, shared, make_generator, nodes).result()
            shared.submit(nodes.alike, "flags, problems or weights", lambda: (
                config, run.problems, weights_sha256(run.trainer))).result()
    except (ValueError, OSError, MemoryError) as error:
        raise UserError(" ".join(str(error).split())) from error
    try:
        run_loop(run_periods(run))
    except BaseExceptionGroup as group:
        raise original(group) from None
    result = shared.submit(summary, run).result()
    nodes.close()
    if run.timeline.end:
        print(f"\nThe last period, {run.history[-1]['seconds']:.2f} s:\n{run.timeline.blocks()}\n")
    return result


def run_loop(coroutine):
    """As `asyncio.run`, which waits for every task and thread: here one that a reward left behind
    gets half a second."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(THREADS)  # of a reward's `asyncio.to_thread`
    try:
        return loop.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=0.5))
        loop.set_exception_handler(lambda *_: None)  # of those that are still there
        loop.close()


def original(error: BaseException) -> BaseException:
    """The first error in a group."""
    return original(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def main(arguments: Sequence[str] | None = None,
         make_generator: Callable = built_in_generator) -> None:
    """The command line. Exit codes: 0, 1 a failed run, 2 a user's mistake, 130 Ctrl-C, 143 TERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: end(f"error: {message}", 2)
    for f in fields(Config):
        kind = f.type if isinstance(f.type, type) else f.type.__args__[0]
        how = ({"action": argparse.BooleanOptionalAction} if kind is bool
               else {"type": kind, "choices": f.metadata["choices"]})
        parser.add_argument(flag(f.name), default=f.default, help=f.metadata["help"], **how)
    config = Config(**vars(parser.parse_args(arguments)))
    if hasattr(sys.stdout, "reconfigure"):  # what a console cannot print is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    if not config.out and not config.resume:
        config = replace(config, out=time.strftime(RUNS))
    nodes, out = connect(config.out)
    config = replace(config, out=out)

    def stopped(number, _):
        signal.signal(number, signal.SIG_DFL)  # a second one ends at once
        nodes.speak()
        end(f"interrupted; {going_on(config.out)}", 128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stopped)
    try:
        print(as_json(train(config, make_generator, nodes)), flush=True)
    except UserError as error:
        nodes.speak()
        end(f"error: {error}", 2)
    except BaseException as error:
        nodes.speak()
        said = f"error: {error}"
        if not isinstance(error, (OSError, MemoryError, GapError)) or hasattr(error, "__notes__"):
            traceback.print_exception(error)  # a fault, or a reward's own error
            said = "the run failed"
        end(f"{said}; {going_on(config.out)}", 1)


def going_on(out: str) -> str:
    """What an ended run leaves, in words."""
    saved = checkpoints(Path(out))
    return (f"{saved[-1]} is saved: the same command with --resume --out {shlex.quote(out)} "
            "goes on from there" if saved else f"no checkpoint is saved in {out} yet")


def end(message: str, code: int) -> None:
    """Leave at once: a normal exit would wait for a thread inside a torch call. Nothing is lost:
    metrics are flushed a period, and a checkpoint has its name once it is whole."""
    with contextlib.suppress(Exception):  # closed, full, or a signal came while it was printing
        sys.stdout.flush()
    os.write(2, f"{message}\n".encode(errors="backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main()
    late = threading.Timer(2, os._exit, (0,))  # an exit waits for threads of a reward's executors
    late.daemon = True
    late.start()
