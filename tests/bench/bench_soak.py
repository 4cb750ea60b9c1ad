"""Hundreds of periods with a fault every 20: nothing lost, nothing doubled, nothing left behind.

    python tests/bench/bench_soak.py [--periods 500] [--every 20] [--in-a-row 150]

One run without faults, and one that in turn is killed (-9, at a random moment), has a reward that
raises once, a file size limit while it saves, as on a full disk, a second run started in its folder
before it is killed, and a reward that raises while another sleeps a minute in `asyncio.to_thread`;
each time it is resumed. Both in processes of their own. Memory is that of the longest part in a
row, 150 periods at least: at its end, over that after 50. Prints a table and one JSON object as the
last line.
"""
import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import model

WARM_UP = 80      # steps of the tiny model's supervised warm-up
SAVE_EVERY = 7
FAULTS = ("kill -9", "reward raises", "disk full", "second run", "reward sleeps")

# A run that notes after every period what it holds, and at its end what it leaves.
CHILD = """
import asyncio, json, os, resource, sys, threading, time
import periodic_async as pa
notes, fault, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
def note(**values):
    with open(notes, "a") as file:
        print(json.dumps(values), file=file)
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
running, periods = {"now": -1}, pa.run_periods
save, score, group_metrics, reward = pa.save, pa.Scorer.__call__, pa.group_metrics, pa.math_reward
async def noted(run):
    running["run"], before = run, {*threading.enumerate()}
    idle = len(asyncio.all_tasks())
    try:
        return await periods(run)
    finally:
        ours = ("generate", "train", "all cores", "tqdm")  # and one of the progress bar
        threads = [thread.name for thread in {*threading.enumerate()} - before
                   if not thread.name.startswith(ours) and fault != "reward sleeps"]
        tasks = len(asyncio.all_tasks()) - idle
        note(rss=rss(), threads=threads, tasks=tasks, all_threads=threading.active_count())
def period_ended(groups):
    note(period=running["run"].trainer.version, rss=rss(), all_threads=threading.active_count())
    return group_metrics(groups)
async def rewarded(response, problem):
    if fault.startswith("reward") and running["run"].trainer.version >= at:
        running["calls"] = running.get("calls", 0) + 1
        if fault == "reward sleeps" and running["calls"] == 1:
            await asyncio.to_thread(time.sleep, 60)
        raise RuntimeError("planted: a reward that raises")
    return reward(response, problem.answer)
def saved(run):
    if fault == "disk full" and run.trainer.version >= at:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
    return save(run)
pa.run_periods, pa.group_metrics, pa.save = noted, period_ended, saved
pa.reward_function = lambda name: rewarded
pa.main(sys.argv[4:])
"""


class Soak:
    """A folder in which runs start, with their table."""

    def __init__(self, folder):
        self.folder, self.rows = folder, []
        before, model.TINY_STEPS = model.TINY_STEPS, WARM_UP
        for part in model.load("tiny"):
            part.save_pretrained(folder / "model")
        model.TINY_STEPS = before

    def segment(self, name, periods, fault="none", at=0, resume=False, kill_after=0.0):
        """One process: a run to `periods`, or to its fault. Returns its notes and its result."""
        notes = self.folder / f"notes-{len(self.rows)}"
        notes.touch()
        flags = {"model": self.folder / "model", "out": self.folder / name, "periods": periods,
                 "prompts": 4, "samples": 4, "rows": 8, "max-new-tokens": 4,
                 "save-every": SAVE_EVERY, "micro-batch-groups": 2}
        began = time.monotonic()
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "w") as err:
            words = [sys.executable, "-c", CHILD, notes, fault, str(at),
                     *(f"--{key}={value}" for key, value in flags.items()), *["--resume"] * resume]
            process = subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=out, stderr=err)
            while process.poll() is None:
                time.sleep(0.02)
                if time.monotonic() > began + periods + 60:
                    process.kill()
                    sys.exit(f"{name}, {fault}: it does not end")
                if fault in ("kill -9", "second run") and f'"period": {at},' in notes.read_text():
                    if fault == "second run":
                        process.send_signal(signal.SIGSTOP)  # it would end before the second starts
                        second = subprocess.run(words, cwd=Path(__file__).parents[2],
                                                capture_output=True, text=True)
                        if second.returncode != 2 or len(second.stderr.splitlines()) != 1:
                            process.kill()
                            sys.exit(f"a second run in its folder: {second}")
                    time.sleep(kill_after)
                    process.kill()
                    process.wait()
        noted = [json.loads(line) for line in notes.read_text().splitlines() if line[-1:] == "}"]
        ended = {0: "finished", -9: "killed"}.get(process.returncode, f"exit {process.returncode}")
        last = (self.folder / "stderr").read_text().splitlines()[-1:] or [""]
        counted = [note["period"] for note in noted if "period" in note] or [0]
        self.rows.append((name, f"{counted[0]}-{counted[-1]}", fault, ended,
                          time.monotonic() - began, noted[-1]["rss"] if noted else 0,
                          noted[-1].get("all_threads", 0) if noted else 0,
                          noted[-1].get("tasks", "-") if noted else "-"))
        print("{:10}{:>10}  {:14}{:10}{:7.1f} s {:6.0f} MB{:4} threads{:>3} tasks".format(
            *self.rows[-1][:5], self.rows[-1][5] / 2**20, *self.rows[-1][6:]), flush=True)
        if (fault == "none") != (process.returncode == 0):
            sys.exit(f"the segment ended otherwise than it should: {last[0]}")
        lines = (self.folder / "stdout").read_text().splitlines()
        return noted, json.loads(lines[-1]) if process.returncode == 0 else None


def prompts(folder):
    """How many samples there are of each (period, key)."""
    with open(folder / "rollouts.jsonl") as file:
        records = [json.loads(line) for line in file]
    return Counter((record["period"], record["key"]) for record in records)


def memory_ratio(notes):
    """RSS at the end over that after 50 periods of a part, which has more."""
    sizes = [note["rss"] for note in notes if "period" in note]
    return sizes[-1] / sizes[49]


def soak(given, soaking):
    notes, straight = soaking.segment("straight", given.periods)
    everything = [*notes]
    if given.periods < given.in_a_row:
        notes, _ = soaking.segment("longer", given.in_a_row)
        everything += notes
    ratio, chance, count = memory_ratio(notes), random.Random(0), 0
    for count, at in enumerate(range(given.every, given.periods, given.every)):
        fault = FAULTS[count % len(FAULTS)]
        # Something must be saved, and left to save, for these to strike.
        part, _ = soaking.segment("faults", given.periods, fault, at - chance.randrange(5),
                                  resume=count > 0, kill_after=chance.random() * 0.3)
        everything += part
    part, resumed = soaking.segment("faults", given.periods, resume=True)
    everything += part
    right, found = prompts(soaking.folder / "straight"), prompts(soaking.folder / "faults")
    return {"periods": given.periods, "faults": count + 1,
            "lost_prompts": sum((right - found).values()) // 4,
            "doubled_prompts": sum((found - right).values()) // 4,
            "memory_ratio": round(ratio, 3),
            "leftover_tasks": sum(note.get("tasks", 0) for note in everything),
            "leftover_threads": sum(len(note.get("threads", [])) for note in everything),
            "equal_to_uninterrupted": all(straight[name] == resumed[name] for name in
                                          ("weights_sha256", "rollouts_sha256"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--periods", type=int, default=500)
    parser.add_argument("--every", type=int, default=20, help="periods from one fault to the next")
    parser.add_argument("--in-a-row", type=int, default=150,
                        help="periods of the part that measures memory, at least; above 50")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("run          periods  fault         ended     seconds   RSS at the end")
        result = soak(given, Soak(Path(folder)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
