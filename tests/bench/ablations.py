"""What a flag changes for the built-in model: a row a flag, mean and spread over seeds.

    taskset -c 0 python tests/bench/ablations.py [--periods 30] [--seeds 0 1 2] [--only loss beta]

Every run differs from the first row's by the flags that its own row names. Columns: reward_last,
the mean reward of the last five periods; its difference to the first row, seed by seed; seconds a
period, and seconds of the processor a period, set-up included, which other work on the machine
disturbs less. Each is the mean over the seeds and, after ±, their standard deviation. A seed
decides model, problems and samples; its model is made once.
"""
import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from model import TINY, load
from periodic_async import Config, as_flags, train

ROWS = [{}, {"schedule": "sync"}, {"attention": "dense"}, {"attention": "repeat"},
        {"loss": "dr_grpo"}, {"loss": "dapo"}, {"beta": 0.0}, {"samples": 8}, {"inner_steps": 2},
        {"rows": 16}, {"micro_batch_groups": 1}, {"importance_cap": 2.0}]


def shown(values) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--periods", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="flags' names, with _; the first row always runs")
    given = parser.parse_args()
    logging.disable_progress_bar()
    rows = [row for row in ROWS if row.keys() <= vars(Config()).keys()
            and (given.only is None or not row or row.keys() & set(given.only))]
    found = [{"flags": as_flags(row), "reward": [], "seconds": [], "cpu": []} for row in rows]
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for part in load("tiny", seed=seed):  # model, tokenizer
                part.save_pretrained(f"{folder}/model")
            for number, row in enumerate(rows):
                settings = TINY | {"model": f"{folder}/model", "out": f"{folder}/{number}",
                                   "seed": seed, "periods": given.periods, "save_every": 0} | row
                begun = time.process_time()
                with contextlib.redirect_stdout(io.StringIO()):
                    result = train(Config(**settings))
                for name, value in (
                        ("reward", result["reward_last"]),
                        ("seconds", result["seconds"] / given.periods),
                        ("cpu", (time.process_time() - begun) / given.periods)):
                    found[number][name].append(value)
                print(json.dumps({"seed": seed} | {name: values[-1] if name != "flags" else values
                                                   for name, values in found[number].items()}),
                      file=sys.stderr, flush=True)
    print(f"{given.periods} periods, seeds {given.seeds}; ±: standard deviation over the seeds\n\n"
          "| flag | final reward | difference | seconds | of the processor |\n"
          "|---|---|---|---|---|")
    for row in found:
        row["difference"] = [a - b for a, b in zip(row["reward"], found[0]["reward"])]
        flags = f"`{row['flags']}`" if row["flags"] else "defaults"
        print(f"| {flags} | {shown(row['reward'])} | {shown(row['difference'])} "
              f"| {shown(row['seconds'])} | {shown(row['cpu'])} |")
    print(json.dumps({"periods": given.periods, "seeds": given.seeds, "rows": found}))


if __name__ == "__main__":
    main()
