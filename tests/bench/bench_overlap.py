"""What the overlap gains: a period's generation, its training, one after the other, at once.

    python tests/bench/bench_overlap.py MODEL [--data FILE] [--groups 48] [--rows 8] [--repeats 1]

One core each first, then both schedules on all cores. Groups of 4 samples, lengths mixed (a
response ends after a length drawn in advance), every group really trained (beta > 0). More --rows
make generation faster, the longer prompts of a --data training slower: in balance the bound is 2.
Prints the seconds of a period, the bound (Tg + Tt) / max(Tg, Tt), the share of it reached, and the
timelines.
"""
import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
import periodic_async
from grpo import draw_problems
from periodic_async import Config, run_period, set_up


class Silent:
    """A trainer that takes groups and does nothing: generation alone, with its weight copy."""
    version = 0

    def __init__(self, models):
        self.models = models

    async def consume(self, group):
        pass

    async def step(self):
        return {}


class Replay:
    """A generator that has everything already, weights too: training alone."""
    version = 0

    def __init__(self, groups):
        self.responses = {g.problem.key: list(g.responses) for g in groups}

    async def generate(self, problem, samples):
        return self.responses[problem.key]

    async def update(self, policy, version):
        pass


async def rewards(problem, responses):
    return [float(len(r.ids) % 2) for r in responses]


def fix_lengths(copy, longest):
    """Responses end after a length drawn from (key, sample), and never before."""
    def stopped(row):
        seed = [row.prompt_length, int(row.uniforms[0] * 2**24)]
        return len(row.ids) == int(np.random.default_rng(seed).integers(longest // 6, longest + 1))
    copy._stopped = stopped


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", default="", help="problems, as the program's own --data")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--micro-batch-groups", type=int, default=2)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as out:
        config = Config(model=given.model, data=given.data, prompts=given.groups, beta=0.04,
                        samples=given.samples, rows=given.rows, max_new_tokens=given.new_tokens,
                        learning_rate=1e-9, periods=1,
                        micro_batch_groups=given.micro_batch_groups).checked()
        shared = periodic_async.thread("all cores")
        measure(given, shared.submit(set_up, config, Path(out), shared).result())


def measure(given, run):
    fix_lengths(run.generator.copies[0], given.new_tokens)
    problems = draw_problems(run.problems, 0, 0, given.groups)
    timelines = {}

    def begin_again():
        """The version is 0 once more, so that every period does the same work."""
        for side in (run.trainer, *run.generator.copies):
            side.version = 0

    async def period(generator, trainer, overlap):
        """Seconds of one period, optimizer step and weight copy included."""
        run.timeline.open()
        groups, _ = await run_period(generator, trainer, problems, given.samples, rewards, overlap)
        run.timeline.close()
        begin_again()
        return groups, run.timeline.end - run.timeline.start

    async def measured():
        seconds = {}
        async with run.generator as generator:
            await run_period(generator, run.trainer, problems[:2], given.samples, rewards, True)
            begin_again()  # that was the warm-up
            groups = []
            cases = {"generate": (generator, Silent(run.trainer.models), True, False),
                     "train": (None, run.trainer, True, False),
                     "sync": (generator, run.trainer, False, False),
                     "async": (generator, run.trainer, True, False),
                     "sync_all_cores": (generator, run.trainer, False, True),
                     "lending": (generator, run.trainer, True, True)}
            for _ in range(given.repeats):  # interleaved: the machine's speed drifts
                for name, (source, trainer, overlap, lend) in cases.items():
                    periodic_async.LENDING = lend
                    groups, taken = await period(source or Replay(groups), trainer, overlap)
                    seconds.setdefault(name, []).append(taken)
                    print(f"{name.replace('_', ' '):15}{taken:8.2f} s", flush=True)
                    timelines[name] = run.timeline.blocks()
        return {name: statistics.median(values) for name, values in seconds.items()}

    seconds = asyncio.run(measured())
    bound = ((seconds["generate"] + seconds["train"]) / max(seconds["generate"], seconds["train"]))
    speedup = seconds["sync"] / seconds["async"]
    print(f"{given.model}, {given.data or 'sums'}, float32, {os.cpu_count()} cores; "
          f"{given.groups} groups of "
          f"{given.samples} samples, up to {given.new_tokens} tokens, {given.rows} rows; median of "
          f"{given.repeats}")
    for name, taken in seconds.items():
        print(f"{name.replace('_', ' '):15}{taken:8.2f} s, median")
    print(f"async over sync, one core each: {speedup:.2f}x of a bound of {bound:.2f}x: "
          f"{speedup / bound:.0%}")
    print(f"async with lending over sync on all cores: "
          f"{seconds['sync_all_cores'] / seconds['lending']:.2f}x")
    for name in ("sync", "async", "lending"):
        print(f"\n{name}\n{timelines[name]}")
    print(json.dumps({f"{name}_seconds": taken for name, taken in seconds.items()}
                     | {"bound": bound, "speedup": speedup, "share_of_bound": speedup / bound}))


if __name__ == "__main__":
    main()
