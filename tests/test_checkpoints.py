"""Checkpoints: resumed = uninterrupted, damage, full disks and memory, signals, faults that end."""
import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from test_periodic_async import Recorder, SlowGenerator, config, hashes, made_run, problems
from transformers import AutoModelForCausalLM, AutoTokenizer

import periodic_async
from model import arithmetic
from periodic_async import HARMLESS, Config, UserError, as_flags, run_period, train

TIMING = {"seconds", "generate_busy", "train_busy", "first_group_seconds", "tail_seconds",
          "copy_seconds"}

# ------------------------------------------------------------------------------- runs to compare to

PERIODS = 6


@dataclasses.dataclass
class Straight:
    """An uninterrupted run of six periods that kept every checkpoint, and its settings."""
    folder: Path
    settings: Config
    result: dict

    def again(self, out, **changes):
        return dataclasses.replace(self.settings, out=str(out), **changes)

    def copied(self, out, *periods):
        """Its folder as it would be with these checkpoints alone: the other files hold more."""
        shutil.copytree(self.folder, out, ignore=lambda _, names: [
            name for name in names if name.startswith("period-") and int(name[7:]) not in periods])
        for file in ("metrics.jsonl", "rollouts.jsonl"):
            with open(out / file, "a") as log:
                log.write('{"period": 6, "re')  # and half a line
        return out

    def assert_same(self, out, result):
        """What a resumed run of six periods returned and left is what this one did."""
        assert hashes(result) == hashes(self.result)
        assert metrics(out) == metrics(self.folder)
        assert (out / "rollouts.jsonl").read_text() == (self.folder / "rollouts.jsonl").read_text()

    def assert_same_checkpoint(self, out, period, evaluated=False):
        """A checkpoint of a resumed run, file by file, but for times and flags."""
        found, right = (json.loads((place / name(period) / "state.json").read_text())
                        for place in (out, self.folder))
        for state in (found, right):
            del state["config"], state["files"]["metrics.jsonl"]
            if evaluated:
                del state["evals"]
        assert found == right
        assert evaluated or metrics(out / name(period)) == metrics(self.folder / name(period))


def name(period):
    return f"period-{period:06d}"


def metrics(folder):
    return [{key: value for key, value in json.loads(line).items() if key not in TIMING}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


def left(out):
    """The checkpoints in a folder, whole, half or wrong."""
    return sorted(path.name for path in out.iterdir() if "period-" in path.name)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_problems(path, count):
    path.write_text("".join(json.dumps(dict(zip(("question", "answer"), arithmetic(5, i)))) + "\n"
                            for i in range(count)))
    return str(path)


@pytest.fixture(scope="module")
def straight(warm_folder, tmp_path_factory):
    """straight(size) with `size` problems: the run, made once. With 6 problems an epoch ends inside
    of a period, and the run evaluates; with 8 at the end of one."""
    made = {}

    def run(size):
        if size not in made:
            folder = tmp_path_factory.mktemp("straight")
            data = write_problems(folder.parent / f"{size}.jsonl", size)
            settings = config(
                warm_folder, folder, data=data, prompt_template="{question}", periods=PERIODS,
                samples=2, max_new_tokens=4, save_every=1, keep=-1,
                eval_data=data if size == 6 else "", eval_every=2)
            made[size] = Straight(folder, settings, train(settings))
        return made[size]
    return run


# -------------------------------------------------------------------------- resumed = uninterrupted

KILLED = """
real = pa.Trainer._train
def dying(self, groups):
    real(self, groups)
    if self.version == {version}:
        for file, half in (("metrics", '{{"period": 9, "re'), ("rollouts", '{{"per')):
            with open(self.config.out + f"/{{file}}.jsonl", "a") as log:
                log.write(half)
        os.kill(os.getpid(), signal.SIGKILL)
pa.Trainer._train = dying
"""


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "keep"), [
    ("async", 6, 1), ("async", 8, 2), ("sync", 6, 2), ("sync", 8, 1)])
def test_killed_twice_and_resumed_is_uninterrupted(straight, child, tmp_path, schedule, size, keep):
    """A21: kill -9 inside a period, when the files hold more than the checkpoint and half a line;
    a cursor ahead of training, an epoch drawn anew or a tail not cut would show. Twice: the second
    resume starts from what the first one wrote."""
    right, out = straight(size), tmp_path / "out"
    again = right.again(out, schedule=schedule, keep=keep, save_every=2)
    assert child(KILLED.format(version=3), again).ended() == (-signal.SIGKILL, [])
    assert left(out) == [name(2)]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4  # three, and a half
    (out / "eval-000000.jsonl").unlink(missing_ok=True)
    resumed = dataclasses.replace(again, resume=True)
    assert child(KILLED.format(version=5), resumed).ended() == (-signal.SIGKILL, [])
    result = train(resumed)
    right.assert_same(out, result)
    assert left(out) == [name(period) for period in (2, 4, 6)][-keep if keep > 0 else 0:]
    assert result.get("eval_first") == right.result.get("eval_first")
    assert not (out / "eval-000000.jsonl").exists()  # it was not evaluated again
    right.assert_same_checkpoint(out, 6)


def test_bfloat16_resumed_is_uninterrupted(straight, tmp_path):
    """A21: saved are the float32 weights that are trained, not those rounded for generation."""
    again = straight(8).again(tmp_path, dtype="bfloat16", periods=3)
    right = Straight(tmp_path, again, train(again))
    out = right.copied(tmp_path / "out", 1)
    right.assert_same(out, train(right.again(out, resume=True)))


def test_bad_steps_are_counted_across_a_resume(straight, tmp_path, monkeypatch):
    """A23: two steps in a row without a finite gradient before the checkpoint, and one after it,
    end the run: a count that starts anew would let a broken run be resumed for ever."""
    right, out = straight(8), tmp_path / "out"
    state = right.copied(out, 1) / name(1) / "state.json"
    state.write_text(state.read_text().replace('"bad_steps": 0', '"bad_steps": 2'))
    monkeypatch.setattr(periodic_async, "group_advantages",
                        lambda rewards, scale: torch.full((len(rewards),), torch.inf))
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        train(right.again(out, resume=True, periods=2))
    assert left(out) == [name(1)]


def test_every_prompt_is_trained_once(straight):
    """A21: of the run that the others are compared to: a key names its epoch and its row, so six
    periods of 4 prompts have each key below 24 once, with 2 samples, in whole epochs in order."""
    for size in (6, 8):
        lines = (straight(size).folder / "rollouts.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        keys = [record["key"] for record in records[::2]]
        assert [r["key"] for r in records] == [key for key in keys for _ in range(2)]
        assert [r["period"] for r in records] == [n for n in range(6) for _ in range(8)]
        assert sorted(keys) == [*range(24)] and keys != [*range(24)]
        assert [key // size for key in keys] == sorted(key // size for key in keys)


def test_another_schedule_and_harmless_flags_may_change(straight, tmp_path):
    """A21: folder, schedule, number of periods, evaluation, checkpoints: the bits of what follows
    stay, whatever of these a resumed run changes, all at once."""
    right, out = straight(8), tmp_path / "moved"
    resumed = right.again(right.copied(out, 1, 2), schedule="sync", periods=5, recompute=True,
                          eval_data=right.settings.data, eval_every=3, eval_samples=2, eval_limit=3,
                          save_every=2, keep=2, resume=True, gap_limit=0.5)
    changed = {f.name for f in dataclasses.fields(Config)
               if getattr(resumed, f.name) != getattr(right.settings, f.name)}
    assert changed == HARMLESS - {"plan"}  # which stops before there is a run
    assert train(resumed)["eval_first"] is not None
    right.assert_same_checkpoint(out, 5, evaluated=True)
    assert left(out) == [name(4), name(5)]
    evaluated = sorted(path.name for path in out.glob("eval-*"))
    assert evaluated == [f"eval-00000{n}.jsonl" for n in (2, 3, 5)]


CHANGES = {
    "model": "{random}", "data": "{copy}", "prompt_template": "{question} ", "seed": 1,
    "reward": "{reward}:reward", "reward_seconds": 9.0, "prompts": 3, "samples": 3,
    "inner_steps": 2, "micro_batch_groups": 1, "micro_batch_tokens": 9999, "max_prompt_tokens": 99,
    "max_new_tokens": 3, "temperature": 0.9, "rows": 4, "loss": "dapo", "beta": 0.0,
    "clip_low": 0.1, "clip_high": 0.3, "importance_cap": 2.0, "mask_truncated": True,
    "learning_rate": 2e-3,
    "attention": "dense", "dtype": "bfloat16", "train_devices": "cpu", "rollout_devices": "cpu"}


def test_a_flag_that_changes_the_run_is_refused_by_name(straight, random_folder, tmp_path):
    """Every other flag: to go on under another value would be neither this run nor that one. The
    refusal names the flag, its old value, and no other."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 2)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    (tmp_path / "reward.py").write_text("def reward(response, problem):\n    return 1.0\n")
    names = {"{random}": str(random_folder), "{reward}": str(tmp_path / "reward.py"),
             "{copy}": shutil.copy(right.settings.data, tmp_path / "copy.jsonl")}
    assert CHANGES.keys() == {f.name for f in dataclasses.fields(Config)} - HARMLESS
    for field, value in CHANGES.items():
        for short, path in names.items():
            value = value.replace(short, str(path)) if isinstance(value, str) else value
        with pytest.raises(UserError) as caught:
            train(right.again(out, resume=True, **{field: value}))
        old = getattr(right.settings.checked(), field)
        also = ", problems in --data" if field == "prompt_template" else ""
        assert str(caught.value) == (
            f"--resume: {out / name(2)} was made with {as_flags({field: old})}{also}".strip())
    del before[out / "metrics.jsonl"], before[out / "rollouts.jsonl"]
    assert all(path.read_bytes() == was for path, was in before.items())


@pytest.mark.parametrize("change", ["answer", "order", "more"])
def test_changed_problems_are_refused(straight, tmp_path, change):
    """A21: the same path with other contents: the order in which prompts come would be another."""
    right, data = straight(8), tmp_path / "data.jsonl"
    out = right.copied(tmp_path / "out", 1)
    lines = Path(right.settings.data).read_text().split("\n")
    state = json.loads((out / name(1) / "state.json").read_text())
    state["config"]["data"] = str(data)
    (out / name(1) / "state.json").write_text(json.dumps(state))
    resumed = right.again(out, data=str(data), resume=True, periods=1)
    data.write_text("\n".join(lines))
    train(resumed)  # the contents unchanged
    data.write_text({"answer": "\n".join(lines).replace('"answer": "', '"answer": "1', 1),
                     "order": "\n".join(lines[::-1]),
                     "more": "\n".join([*lines, lines[0]])}[change])
    with pytest.raises(UserError, match=r"was made with problems in --data$"):
        train(resumed)


def test_what_cannot_be_resumed(straight, tmp_path):
    """--resume without --out, and where no checkpoint is; a fresh run where one is, which would
    mix two runs or delete one; nor does it delete what a live run is about to save."""
    right = straight(8)
    with pytest.raises(UserError, match="--resume needs --out"):
        train(Config(resume=True))
    for out in (tmp_path / "new", right.copied(tmp_path / "empty")):
        with pytest.raises(UserError, match=rf"--resume: no whole checkpoint in {out}"):
            train(right.again(out, resume=True))
    out = right.copied(tmp_path / "old", 3, 4)
    (out / ".period-000005").mkdir()
    (out / ".period-000005" / "optimizer.pt").write_text("half")
    files = [path for path in out.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    with pytest.raises(UserError, match=f"{out} holds {name(4)} of another run: --resume it, or"):
        train(right.again(out))
    assert files == [path for path in out.rglob("*") if path.is_file()]
    assert before == [path.read_bytes() for path in files]


@pytest.mark.parametrize("periods", [PERIODS, 4])
def test_a_finished_run_resumed_is_as_it_was(straight, tmp_path, periods):
    """Where nothing, or less than nothing, is left to train: no period, and the same result."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 6)
    before = contents(out / name(6))
    right.assert_same(out, train(right.again(out, resume=True, periods=periods)))
    assert contents(out / name(6)) == before and left(out) == [name(6)]


def test_a_checkpoint_moved_alone(straight, tmp_path):
    """A checkpoint without the run's other files, on another disk: rollouts that were filled up
    with zero bytes to the length that they had."""
    right, out = straight(8), tmp_path / "out"
    out.mkdir()
    shutil.copytree(right.folder / name(4), out / name(4))
    assert hashes(train(right.again(out, resume=True))) == hashes(right.result)
    whole = (right.folder / "rollouts.jsonl").read_text()
    assert whole.endswith((out / "rollouts.jsonl").read_text())
    assert metrics(out) == metrics(right.folder)


def test_resumed_with_other_held_out_problems(straight, tmp_path):
    """Results on one test that stand beside those on another: a resumed run whose evaluation has
    changed evaluates at its start, and its summary knows nothing else."""
    right, out = straight(6), tmp_path / "out"
    right.copied(out, 4)
    assert right.result["eval_last"] < 1
    record = next(record for record in map(json.loads, open(right.folder / "eval-000004.jsonl"))
                  if re.search(r"\d", record["responses"][0]))
    other = tmp_path / "other.jsonl"  # whose one gold answer is what the model says
    says = re.findall(r"\d+", record["responses"][0])[-1]
    other.write_text(json.dumps(record | {"answer": says}))
    result = train(right.again(out, resume=True, eval_data=str(other), periods=4))
    assert result["eval_first"] == result["eval_last"] == 1


def test_a_tokenizer_with_several_templates(warm_folder, tmp_path):
    """Templates that lie in a folder of the checkpoint, where a digest of files alone fails."""
    folder, data = tmp_path / "model", write_problems(tmp_path / "data.jsonl", 8)
    shutil.copytree(warm_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = dict.fromkeys(("default", "other"), "{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(folder)
    settings = config(folder, tmp_path / "out", data=data, prompt_template="{question}",
                      periods=1, save_every=1)
    train(settings)
    other, = (tmp_path / "out" / name(1)).glob("*/other.jinja")
    train(dataclasses.replace(settings, periods=2, resume=True))
    assert left(tmp_path / "out") == [name(1), name(2)]
    other.write_text("changed")
    (tmp_path / "out" / name(2) / "state.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        train(dataclasses.replace(settings, periods=2, resume=True))


@pytest.mark.parametrize(("save_every", "expected"), [(0, []), (4, [4, 6])])
def test_when_checkpoints_are_saved(straight, tmp_path, save_every, expected):
    """Every --save-every periods and at the end; 0: never."""
    right = straight(8)
    right.assert_same(tmp_path, train(right.again(tmp_path, save_every=save_every)))
    assert left(tmp_path) == [name(period) for period in expected]


# ------------------------------------------------------------------------------ a whole one or none

LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))\n"  # SIGXFSZ is ignored
PLANTED = """
import shutil
def planted(*args, **_):
    {does}
{where} = planted
"""
WRITERS = {  # what saving does when half of it is done, and what the message says
    "half the files": (PLANTED.format(where="pa.torch.save", does="raise ValueError('planted')"),
                       "planted"),
    "half a file": (PLANTED.format(where="pa.torch.save", does="args[1].write_bytes(b'half'); "
                                   "raise OSError(errno.ENOSPC, 'no space')"), "no space"),
    "the last step": (PLANTED.format(where="pa.Path.rename", does="raise OSError(5, 'planted')"),
                      "planted"),
    "sync": (PLANTED.format(where="pa.os.fsync", does="raise OSError(5, 'planted')"), "planted"),
    "disk full in the weights": (LIMIT.format(bytes=500_000), "File too large"),
    "disk full in the optimizer": (LIMIT.format(bytes=1_500_000), ""),
    "disk full in state.json": (
        "os.dup2(0, 1)\nreal = pa.digests\ndef digests(folder):\n    files = real(folder)\n"
        "    if folder.name.startswith('.'):\n        " + LIMIT.format(bytes=1000)
        + "    return files\npa.digests = digests", "File too large"),
}


@pytest.mark.parametrize("where", [
    where if where in ("the last step", "disk full in the optimizer")
    else pytest.param(where, marks=pytest.mark.slow) for where in WRITERS])
def test_a_checkpoint_that_cannot_be_written(straight, child, tmp_path, where):
    """A20: one sentence, exit code 1; the checkpoint before stays bit for bit and is resumed from.
    With --keep 1: it would be gone if old ones were deleted before the new one is complete."""
    right, out = straight(8), tmp_path / "out"
    before = contents(right.copied(out, 1) / name(1))
    resumed = right.again(out, resume=True, keep=1, periods=3)
    plant, says = WRITERS[where]
    code, err = child(plant, resumed).ended()
    assert code == 1 and len(err) == 1, err
    assert err[0].startswith(f"error: {out / name(2)} could not be saved: ") and says in err[0]
    assert err[0].endswith(f"; {out / name(1)} is saved: the same command with --resume --out "
                           f"{out} goes on from there")
    assert left(out) == [name(1)] and contents(out / name(1)) == before
    train(resumed)
    right.assert_same_checkpoint(out, 3)


@pytest.mark.parametrize(("when", "at", "stays"), [
    ("pa.digests", f".{name(2)}", [f".{name(2)}", name(1)]),
    ("shutil.rmtree", name(1), [name(1), name(2)])])
def test_killed_while_saving(straight, child, tmp_path, monkeypatch, when, at, stays):
    """A20: kill -9 in half a checkpoint, and when the old one is about to be deleted: the new one
    is complete by then. The half one is never chosen, and removed at the next start."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 1)
    resumed = right.again(out, resume=True, keep=1, periods=3)
    plant = (f"import shutil\nreal = {when}\ndef killed(folder, *args, **kwargs):\n"
             f"    if folder.name == '{at}':\n        os.kill(os.getpid(), signal.SIGKILL)\n"
             f"    return real(folder, *args, **kwargs)\n{when} = killed")
    assert child(plant, resumed).ended() == (-signal.SIGKILL, [])
    assert left(out) == stays
    saving, real = [], periodic_async.save
    monkeypatch.setattr(periodic_async, "save",
                        lambda run: (saving.append(left(run.out)), real(run)))
    train(resumed)
    assert saving[0] == [found for found in stays if not found.startswith(".")]
    assert left(out) == [name(3)]
    right.assert_same_checkpoint(out, 3)


BUFFERED = "sys.stdout = open(1, 'w', closefd=False)"  # as where it is no terminal
FULL = {
    "metrics": lambda out: (out / "metrics.jsonl").symlink_to("/dev/full"),
    "rollouts": "os.dup2(0, 1)\n" + LIMIT.format(bytes=2000),
    "standard output": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n" + BUFFERED,
    "a closed pipe": "ends = os.pipe()\nos.dup2(ends[1], 1)\nos.close(ends[0])\n"
                     "os.close(ends[1])\n" + BUFFERED,
}


@pytest.mark.parametrize("where", FULL)
def test_a_full_disk(straight, child, tmp_path, where):
    """A20: a log on a full disk, for real, or standard output there or closed: exit code 1, one
    sentence, no traceback; a second error while leaving must not hide the first."""
    out = tmp_path / "out"
    out.mkdir()
    plant = FULL[where] if isinstance(FULL[where], str) else FULL[where](out) or ""
    code, err = child(plant, straight(8).again(out, save_every=0, periods=4)).ended()
    assert code == 1 and len(err) == 1 and err[0].startswith("error: "), err
    assert re.search("No space left on device|File too large|Broken pipe", err[0])
    assert err[0].endswith(f"no checkpoint is saved in {out} yet")


def test_a_full_disk_at_the_start_of_a_resumed_run(straight, child, tmp_path):
    """A20: the log of the checkpoint cannot be copied back: one sentence, nothing lost."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 1)
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").symlink_to("/dev/full")
    code, err = child("", right.again(out, resume=True)).ended()
    assert code in (1, 2) and len(err) == 1 and err[0].startswith("error: ")
    assert "No space left on device" in err[0] and left(out) == [name(1)]
    (out / "metrics.jsonl").unlink()
    right.assert_same(out, train(right.again(out, resume=True)))


# ------------------------------------------------------------------------------ damaged checkpoints

def flip(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": flip,
    "a truncated file": lambda folder: os.truncate(folder / "optimizer.pt", 10_000),
    "a missing file": lambda folder: (folder / "model.safetensors").unlink(),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "an empty state": lambda folder: (folder / "state.json").write_text(""),
    "half a state": lambda folder: os.truncate(folder / "state.json", 300),
    "another file": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"),
    "a list": lambda folder: (folder / "state.json").write_text("[1, 2]"),
    "no files named": lambda folder: (folder / "state.json").write_text("{}"),
    "a number": lambda folder: (folder / "state.json").write_text("5"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(straight, tmp_path, capfd, damage):
    """A20: whatever is wrong with the latest checkpoint: the run goes on from the one before it,
    and in its turn writes the damaged one whole."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 1, 2)
    DAMAGES[damage](out / name(2))
    capfd.readouterr()
    train(right.again(out, resume=True, periods=2))
    printed = capfd.readouterr().out
    assert printed.count(f"{out / name(2)} is damaged: the checkpoint before it is used\n") == 1
    assert printed.count("is damaged") == 1 and "\nperiod    1 " in printed
    right.assert_same_checkpoint(out, 2)
    if damage == "a flipped bit":
        for period in (1, 2):
            DAMAGES[damage](out / name(period))
        with pytest.raises(UserError, match="no whole checkpoint"):
            train(right.again(out, resume=True, periods=2))


def test_a_damaged_checkpoint_is_not_one_of_those_kept(straight, tmp_path):
    """A20: one that the resumed run passes by took the place of a whole one of --keep."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 1, 2)
    flip(out / name(2))
    train(right.again(out, resume=True, periods=3, save_every=3, keep=2))
    assert periodic_async.checkpoints(out) == [out / name(1), out / name(3)]


STRAY = {"a file": lambda out: (out / "period-000099").write_text("not a folder"),
         "a folder": lambda out: (out / "period-abc").mkdir(),
         "a damaged one": lambda out: shutil.copytree(out / name(2), out / "period-000099")
         and (out / "period-000099" / "optimizer.pt").unlink()}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("stray", STRAY)
def test_what_is_no_checkpoint_displaces_none(straight, tmp_path, capfd, stray, keep):
    """A20: something with the name of a later checkpoint is named, not used, and does not count as
    one of those kept: else with --keep 1 the only whole checkpoint would go."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, 1, 2)
    STRAY[stray](out)
    strays = [*{*left(out)} - {name(1), name(2)}]
    train(right.again(out, resume=True, periods=3, keep=keep))
    assert f"{out / strays[0]} is damaged" in capfd.readouterr().out
    kept = [name(n) for n in (1, 2, 3)][-keep:]
    assert [found for found in left(out) if found not in strays] == kept
    right.assert_same_checkpoint(out, 3)


@pytest.mark.parametrize("attention", ["shared", "dense"])
def test_a_checkpoint_is_a_hugging_face_folder(straight, warm_folder, tmp_path, attention):
    """Any tool loads it, bit for bit: no trace of this program's attention in its config."""
    run = made_run(warm_folder, tmp_path, periods=1, save_every=1, attention=attention)
    asyncio.run(periodic_async.run_periods(run))
    folder, policy = tmp_path / name(1), run.trainer.models.policy
    stock = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert "attn_impl" not in (folder / "config.json").read_text()
    assert stock.config._attn_implementation == "sdpa"
    found, right = stock.state_dict(), policy.state_dict()
    assert found.keys() == right.keys()
    for key, tensor in right.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    assert stock.lm_head.weight is stock.model.embed_tokens.weight  # tied, as it was
    before = AutoModelForCausalLM.from_pretrained(warm_folder).state_dict()
    assert not torch.equal(before["model.norm.weight"], found["model.norm.weight"])
    text = "12+3=15"
    assert tokenizer(text).input_ids == run.tokenizer(text).input_ids
    assert tokenizer.eos_token_id == run.tokenizer.eos_token_id
    assert stock.generation_config.eos_token_id == policy.generation_config.eos_token_id


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_saved(straight, child, tmp_path, bad):
    """A23: bad checkpoints would rotate the good ones out; exit code 1, the one before stays."""
    right, out = straight(8), tmp_path / "out"
    before = contents(right.copied(out, 1) / name(1))
    plant = ("real = pa.Trainer._end_period\ndef step(self):\n    result = real(self)\n"
             f"    self.parameters[-1].data.view(-1)[-1] = float('{bad}')\n    return result\n"
             "pa.Trainer._end_period = step")
    code, err = child(plant, right.again(out, resume=True, keep=1)).ended()
    assert code == 1 and "not all weights are finite" in "\n".join(err)
    assert err[-1].startswith(f"the run failed; {out / name(1)} is saved")
    assert left(out) == [name(1)] and contents(out / name(1)) == before


# ------------------------------------------------------------------------------ shutdown and faults

BUSY = {
    "sleeping reward": "def sleeping(*_):\n    print('BUSY', flush=True)\n    time.sleep(60)\n"
                       "pa.math_reward = sleeping",
    "long torch call": "def long(*_):\n    print('BUSY', flush=True)\n"
                       "    torch.linalg.svd(torch.ones(3000, 3000))\npa.Trainer._train = long",
    "loading": "def loading(*_, **__):\n    print('BUSY', flush=True)\n    time.sleep(60)\n"
               "pa.load = loading",
    "saving": "def saving(*_):\n    print('BUSY', flush=True)\n    time.sleep(60)\n"
              "pa.digests = saving",
}


@pytest.mark.parametrize(("where", "resume", "number", "code"), [
    ("sleeping reward", True, signal.SIGINT, 130), ("sleeping reward", False, signal.SIGTERM, 143),
    ("long torch call", False, signal.SIGINT, 130), ("long torch call", True, signal.SIGTERM, 143),
    ("loading", False, signal.SIGINT, 130), ("saving", False, signal.SIGTERM, 143)])
def test_signals_end_the_run(straight, child, tmp_path, where, resume, number, code):
    """A22: whatever the threads do, within three seconds, with the exit code of the signal and one
    line that says how to go on, or that nothing is saved; the last checkpoint is intact."""
    right, out = straight(8), tmp_path / "out"
    right.copied(out, *([1] if resume else []))
    run = child(BUSY[where], right.again(out, resume=resume, save_every=1, reward_seconds=10.0))
    run.prints("BUSY")
    began = time.monotonic()
    run.signal(number)
    assert run.ended(10) == (code, [
        f"interrupted; {out / name(1)} is saved: the same command with --resume --out {out} goes "
        "on from there" if resume else f"interrupted; no checkpoint is saved in {out} yet"])
    assert time.monotonic() - began < 3
    if resume:
        assert left(out) == [name(1)]
        assert contents(out / name(1)) == contents(right.folder / name(1))


MEMORY = """
real = pa.{where}
def short(*args):
    pages = int(open("/proc/self/statm").read().split()[0])
    size = pages * resource.getpagesize() + 20 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return real(*args)
pa.{where} = short
"""


def test_out_of_memory(straight, child, tmp_path):
    """A micro-batch that does not fit, for real (RLIMIT_AS): exit code 1 and one sentence that
    names the flag to lower and its value, for the CPU's allocator raises a bare RuntimeError."""
    settings = straight(8).again(tmp_path / "out", samples=1500, rows=256, micro_batch_tokens=12345,
                                 max_new_tokens=6, prompts=1, micro_batch_groups=1)
    code, err = child(MEMORY.format(where="Trainer._train"), settings).ended()
    assert code == 1 and len(err) == 1, err
    assert err[0].startswith("error: out of memory in train: lower --micro-batch-tokens 12345 or ")
    assert err[0].endswith(f"; no checkpoint is saved in {tmp_path / 'out'} yet")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("std::bad_alloc"),
                                   torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB"),
                                   RuntimeError("NPU out of memory. Tried to allocate 9 GiB"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")],
                         ids=str)
@pytest.mark.parametrize(("where", "says"), [("train", "--micro-batch-tokens 777"),
                                             ("decode", "--rows 8")])
def test_every_kind_of_memory_error_is_named(straight, tmp_path, monkeypatch, error, where, says):
    """An allocator's error of any type, with or without text, in training and in rollouts."""
    def raising(*_):
        raise error
    monkeypatch.setattr(*((periodic_async.Trainer, "_train") if where == "train"
                          else (periodic_async.InferenceCopy, "decode")), raising)
    with pytest.raises(MemoryError, match=f"out of memory in \\w+: lower {says}"):
        train(straight(8).again(tmp_path, micro_batch_tokens=777))


BROKEN = """
import asyncio, os
from concurrent.futures import ProcessPoolExecutor
def died(response, problem):
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(os._exit, 3).result()
async def cancels(response, problem):
    if not hasattr(cancels, "done"):
        cancels.done = True
        next(task for task in asyncio.all_tasks() if "{task}" in repr(task.get_coro())
             and task is not asyncio.current_task()).cancel()
    await asyncio.sleep(0.05)
    return 1.0
"""


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_a_rewards_worker_process_that_dies(straight, child, tmp_path, schedule):
    """A06: BrokenProcessPool, the original error, ends the run with exit code 1."""
    (tmp_path / "reward.py").write_text(BROKEN)
    code, err = child("", straight(8).again(
        tmp_path / "out", reward=f"{tmp_path}/reward.py:died", schedule=schedule)).ended(20)
    assert code == 1 and any("BrokenProcessPool" in line for line in err)
    assert err[-1].startswith("the run failed; no checkpoint is saved in ")
    assert not any("never retrieved" in line or "was destroyed" in line for line in err)


@pytest.mark.parametrize(("task", "schedule"), [
    ("finish", "async"), ("Scorer._reward", "sync")])
def test_a_cancelled_scoring_ends_the_process(straight, child, tmp_path, schedule, task):
    """A06: by whatever hand the scoring of a rollout is cancelled in a whole run: no hang."""
    (tmp_path / "reward.py").write_text(BROKEN.replace("{task}", task))
    code, err = child("", straight(8).again(
        tmp_path / "out", reward=f"{tmp_path}/reward.py:cancels", schedule=schedule, rows=4,
        periods=1)).ended(20)
    assert any("CancelledError" in line for line in err)
    assert code == 1 and err[-1].startswith("the run failed; ")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("key", [1, 2, 3])
def test_a_cancelled_scoring_ends_the_period(overlap, key):
    """A06: nobody waits for ever for the group that a cancelled scoring does not bring."""
    async def score(problem, responses):
        await asyncio.sleep(0.2)
        return [1.0] * len(responses)

    def cancel():
        coroutines = {task: task.get_coro() for task in asyncio.all_tasks()}
        found, = (task for task, coroutine in coroutines.items()
                  if coroutine.__name__ == "finish"
                  and coroutine.cr_frame.f_locals["problem"].key == key)
        found.cancel()
        cancelled.append(key)

    async def period():
        asyncio.get_running_loop().call_later(0.1, cancel)
        async with asyncio.timeout(5):
            await run_period(SlowGenerator(0.02), Recorder(), problems([1, 2, 3]), 2, score,
                             overlap)
    cancelled = []
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(period())
    assert cancelled == [key]


@pytest.mark.parametrize("out", ["{file}/below", "{file}", "/proc/x"])
def test_a_folder_that_cannot_be_written(straight, child, tmp_path, out):
    """Exit code 2 and one sentence, before anything is loaded."""
    (tmp_path / "file").write_text("")
    out = out.replace("{file}", str(tmp_path / "file"))
    code, err = child("", straight(8).again(out)).ended()
    assert code == 2 and len(err) == 1 and err[0].startswith("error: ") and out in err[0], err
