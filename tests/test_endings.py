"""How a run ends, whatever code of a user does; folders, data and consoles that are in the way."""
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import small_model
from test_periodic_async import config, flags
from test_rewards import NAN, evaluated, lines, questions_file, scored
from transformers import AutoModelForCausalLM, AutoTokenizer

import periodic_async
from grpo import Problem
from model import InferenceCopy
from periodic_async import Generator, Timeline, UserError, Worker, original, train

ROOT = Path(__file__).parent.parent

REWARDS = """
import asyncio, functools, os, time
from concurrent.futures import ThreadPoolExecutor
began, pool = [], ThreadPoolExecutor(64)

def failing(stall):
    async def reward(response, problem):
        began.append(1)
        if len(began) > 1:
            await stall()
        await asyncio.sleep(0.3)
        print("RAISED", time.time(), flush=True)
        raise RuntimeError("planted fault")
    return reward

def stalling(stall):
    async def reward(response, problem):
        began.append(1)
        if len(began) == 1:
            await stall()
        return 1.0
    return reward

async def stubborn():
    end = time.monotonic() + 40
    while time.monotonic() < end:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass

def in_pool():
    return asyncio.get_running_loop().run_in_executor(pool, time.sleep, 40)

def in_thread():
    return asyncio.to_thread(time.sleep, 40)

fails_in_thread, stalls_in_thread = failing(in_thread), stalling(in_thread)
fails_in_pool, stalls_in_pool = failing(in_pool), stalling(in_pool)
fails_stubborn, stalls_stubborn = failing(stubborn), stalling(stubborn)

def missing(response, problem):
    return open("/no/such/file").read()

def fine(response, problem):
    return float(len(response)), {"length": len(response), "one": True}
"""


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "reward.py"
    path.write_text(REWARDS)
    return path


@pytest.mark.parametrize("stall", ["in_thread", "in_pool", "stubborn"])
def test_a_failure_waits_for_no_code_of_a_user(random_folder, tmp_path, child, reward_path, stall):
    """C13: a reward fails while others sleep 40 s in a thread of the default executor, in one of
    their own, or catch every cancellation: the error comes at once, the process goes."""
    run = child("", config(random_folder, tmp_path / "out",
                           reward=f"{reward_path}:fails_{stall}"))
    code, err = run.ended(30)
    ended = time.time()
    assert code == 1 and "RuntimeError: planted fault" in err
    assert err[-1].startswith("the run failed; ") and "destroyed" not in "".join(err)
    assert ended - float(run.text("out").split("RAISED")[1].split()[0]) < 3


@pytest.mark.parametrize("stall", ["in_thread", "in_pool", "stubborn"])
def test_a_result_waits_for_no_code_of_a_user(random_folder, tmp_path, reward_path, stall):
    """C13: a call that timed out in the last period: the result line comes when that is done, and
    the process goes, in a run from the command line."""
    process = subprocess.Popen(
        [sys.executable, "-u", "periodic_async.py", *flags(
            random_folder, tmp_path, "--periods", "1", "--reward-seconds", "0.5", "--save-every",
            "0", "--reward", f"{reward_path}:stalls_{stall}")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in process.stdout:
            if line.startswith("period "):
                done = time.monotonic()
            if line.startswith("{"):
                break
        assert json.loads(line)["periods"] == 1 and time.monotonic() - done < 10
        assert process.wait(20) == 0  # and not after 40 s
    finally:
        process.kill()


def test_a_generator_left_while_a_call_waits():
    """C14: a call in flight raises when its generator is left, and so does a later one."""
    copy = InferenceCopy(small_model(), [1], rows=8, longest_prompt=8, max_new_tokens=200)
    timeline = Timeline(Path(os.devnull))

    async def left():
        async with Generator([copy], Worker("generate", timeline), 0) as generator:
            waiting = asyncio.create_task(generator.generate(Problem((3, 4), "", 0), 2))
            await asyncio.sleep(0.05)
        for call in (waiting, generator.generate(Problem((3, 4), "", 1), 2)):
            with pytest.raises(RuntimeError, match="the generator was closed"):
                async with asyncio.timeout(5):
                    await call
    asyncio.run(left())


SLOW = "real = pa.group_metrics\ndef slow(groups):\n    print('BUSY', flush=True)\n" \
       "    time.sleep(30)\npa.group_metrics = slow"


def test_one_run_a_folder(random_folder, tmp_path, child):
    """C15: a second run in a folder ends with one sentence and changes nothing; a kill frees it."""
    settings = config(random_folder, tmp_path / "out", periods=1)
    first = child(SLOW, settings)
    first.prints("BUSY")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match=f"--out {settings.out}: another run that has not ended"):
        train(settings)
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    first.signal(signal.SIGKILL)
    first.ended()
    train(settings)


@pytest.mark.parametrize("plant", [
    "sys.modules['fcntl'] = None", "import fcntl\ndef lockf(*_):\n    raise OSError("
    "errno.ENOLCK, 'planted')\nfcntl.lockf = lockf"], ids=["no module", "ENOLCK"])
def test_no_locks(random_folder, tmp_path, child, plant):
    """C15: where the system or the file system has no locks, a run goes on without."""
    assert child(plant, config(random_folder, tmp_path / "out", periods=1)).ended()[0] == 0


def test_an_os_error_of_a_reward(random_folder, tmp_path, child, reward_path):
    """C16: a file that a reward misses is no full disk of the run: traceback, and whose it is."""
    code, err = child("", config(random_folder, tmp_path / "out",
                                 reward=f"{reward_path}:missing")).ended()
    assert code == 1 and any("in missing" in line for line in err)
    assert any(line.startswith("raised by the reward of a response to problem") for line in err)
    assert err[-1].startswith("the run failed; ")


@pytest.mark.parametrize("wrong", [
    {"data": "{bad}/broken.jsonl"}, {"data": "{bad}/few.jsonl"},
    {"eval_data": "{bad}/broken.jsonl"}, {"prompt_template": "no place for it"},
    {"reward": "maths"}, {"resume": True}, {"train_devices": "cuda:77"},
    {"rollout_devices": "cuda:77"}, {"samples": 1}], ids=str)
def test_a_mistake_shows_before_a_model_is_loaded(random_folder, tmp_path, monkeypatch, wrong):
    """C17: named before any model is loaded; --out is not created."""
    monkeypatch.setattr(periodic_async, "load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "broken.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": \n')
    (tmp_path / "few.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    wrong = {name: value.replace("{bad}", str(tmp_path)) if isinstance(value, str) else value
             for name, value in wrong.items()}
    with pytest.raises(UserError) as caught:
        train(config(random_folder, tmp_path / "out", **wrong))
    assert f"--{next(iter(wrong))}".replace("_", "-") in str(caught.value) or (
        "broken.jsonl, line 2" in str(caught.value) or "cuda:77" in str(caught.value))
    assert not (tmp_path / "out").exists()


def test_gold_answers_that_are_no_numbers_are_counted(random_folder, tmp_path, capsys):
    """C17: they are compared by spelling, which its user should know."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{i}", "answer": gold}) + "\n" for i, gold
                            in enumerate(["1", "2/3", r"\sqrt{5}", "x+1"])))
    train(config(random_folder, tmp_path, periods=1, data=str(data), prompt_template="{question}"))
    assert f"{data}: 2 of 4 gold answers are no plain numbers" in capsys.readouterr().out


def test_files_that_cannot_be_synced(random_folder, tmp_path, child):
    """C18: EINVAL of fsync, of folders on some file systems: saved, with one line that says so."""
    plant = "def fsync(handle):\n    raise OSError(errno.EINVAL, 'planted')\npa.os.fsync = fsync"
    run = child(plant, config(random_folder, tmp_path / "out", periods=1, save_every=1))
    assert run.ended()[0] == 0
    assert run.text("out").count("period-000001 is saved, but not synced") == 1
    assert periodic_async.latest_whole(tmp_path / "out")[0].name == "period-000001"


def test_a_console_of_few_characters(random_folder, tmp_path, reward_path):
    """C19: a character that the console does not have is printed as its escape."""
    out = tmp_path / "out"
    settings = evaluated(random_folder, out, reward_path, periods=0)
    questions_file(Path(settings.eval_data), ["2×π"])
    done = subprocess.run(
        [sys.executable, "periodic_async.py", *flags(
            random_folder, out, "--periods", "0", "--eval-data", settings.eval_data)], cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert r"2\xd7\u03c0" in done.stdout


def test_a_resumed_run_keeps_the_trace(random_folder, tmp_path):
    """C20: what was measured before is still in trace.json; half a line, of a kill, is not."""
    settings = dict(periods=1, save_every=1)
    train(config(random_folder, tmp_path, **settings))
    trace = tmp_path / "trace.json"
    first = trace.read_text()
    trace.write_text(first + '{"name": "dec')
    train(config(random_folder, tmp_path, **settings | {"periods": 2, "resume": True}))
    assert trace.read_text().startswith(first) and len(trace.read_text()) > len(first) + 100
    assert len(json.loads(trace.read_text().rstrip().rstrip(",") + "]")) > 4
    train(config(random_folder, tmp_path / "other", **settings))
    assert (tmp_path / "other" / "trace.json").read_text().count("[") == 1


def test_the_hint_can_be_copied(random_folder, tmp_path, child):
    """C20: a folder whose name has a blank is quoted where the way to go on is named."""
    out = tmp_path / "my run"
    train(config(random_folder, tmp_path / "first", periods=1, save_every=1))
    shutil.copytree(tmp_path / "first", out)  # the first one is this process's until it ends
    plant = "def failing(*_):\n    raise RuntimeError('planted')\npa.math_reward = failing"
    _, err = child(plant, config(random_folder, out, periods=2, resume=True)).ended()
    assert err[-1].endswith(f"the same command with --resume --out '{out}' goes on from there")


def test_a_question_with_a_special_token(random_folder, tmp_path, capsys):
    """C22: the text of the stop token in a question would become that token: skipped, counted."""
    tokenizer = AutoTokenizer.from_pretrained(random_folder)
    stop = tokenizer.eos_token
    data = questions_file(tmp_path / "data.jsonl", ["1+1=", f"1{stop}2", "1+2=", "2+2=", "3+3="])
    train(config(random_folder, tmp_path, periods=1, data=str(data), prompt_template="{question}"))
    assert f"{data}: 1 of 5 questions hold the text of a special token" in capsys.readouterr().out
    assert all(stop not in record["problem"] for record in lines(tmp_path / "rollouts.jsonl"))


def test_a_template_that_prints_the_date(random_folder, tmp_path, monkeypatch, capsys):
    """C23: prompts of another day: the run goes on and says so; on the same day it does not."""
    day = ["1"]
    encode = periodic_async.encode_prompt
    monkeypatch.setattr(periodic_async, "encode_prompt",
                        lambda tokenizer, question: encode(tokenizer, day[0] + question))
    settings = dict(save_every=1)
    train(config(random_folder, tmp_path, periods=1, **settings))
    train(config(random_folder, tmp_path, periods=2, resume=True, **settings))
    assert "the prompts are not those" not in capsys.readouterr().out
    day[0] = "2"
    train(config(random_folder, tmp_path, periods=3, resume=True, **settings))
    assert "the prompts are not those" in capsys.readouterr().out


def test_stop_ids_are_saved(random_folder, tmp_path, monkeypatch):
    """C24: all that ended a response in training end one of the saved model."""
    load = periodic_async.load

    def two(*args, **more):
        model, tokenizer = load(*args, **more)
        model.generation_config.eos_token_id = 3
        return model, tokenizer
    monkeypatch.setattr(periodic_async, "load", two)
    train(config(random_folder, tmp_path, periods=1, save_every=1))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "period-000001")
    eos = AutoTokenizer.from_pretrained(random_folder).eos_token_id
    assert eos != 3 and stock.generation_config.eos_token_id == sorted([eos, 3])


async def plus_one(text, problem):
    await asyncio.sleep(0)
    return float(text) + 1


class Judge:
    async def __call__(self, text, problem):
        return await plus_one(text, problem)


def logged(function):
    def called(*args):
        return function(*args)
    return called


@pytest.mark.parametrize("function", [Judge(), lambda *args: plus_one(*args), logged(plus_one)],
                         ids=["object", "lambda", "decorator"])
def test_async_rewards_of_every_form_are_awaited(function):
    """C25: what is no coroutine function, and returns an awaitable."""
    assert scored(function, range(40)) == [n + 1 for n in range(40)]


def test_checkpoints_by_number(tmp_path):
    """C26: after 999,999 periods names have seven digits, which as text come first."""
    names = ["period-999999", "period-1000000", "period-000003", "period-abc", "period-9x"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text('{"files": {}}')
    assert [folder.name for folder in periodic_async.checkpoints(tmp_path)] == [
        names[2], names[0], names[1]]
    for name in names[3:]:
        (tmp_path / name / "state.json").unlink()
    assert periodic_async.latest_whole(tmp_path)[0].name == names[1]


def test_numbers_beside_rewards(random_folder, tmp_path, reward_path):
    """Means of a period in metrics.jsonl, without those of evaluation's answers."""
    train(evaluated(random_folder, tmp_path, reward_path, periods=2, eval_every=1,
                    reward=f"{reward_path}:fine"))
    records = lines(tmp_path / "rollouts.jsonl")
    for period, metrics in enumerate(lines(tmp_path / "metrics.jsonl")):
        texts = [r["response"] for r in records if r["period"] == period]
        assert metrics["reward/length"] == pytest.approx(sum(map(len, texts)) / 16)
        assert metrics["reward/one"] == 1 and metrics["reward"] == metrics["reward/length"]


@pytest.mark.parametrize("result", [
    (1.0, 2.0), (1.0,), (1.0, {"a": NAN}), (1.0, {"a": None}), (1.0, {2: 1.0}), (1.0, {}, {}),
    "good", [1.0], {"a": 1.0}, (float("inf"), {})], ids=str)
def test_no_reward(result):
    """What is neither a number nor one with numbers is named in one sentence."""
    with pytest.raises(BaseException) as caught:
        scored(lambda *_: result, [1], key=4711)
    message = str(original(caught.value))
    assert "reward of a response to problem 4711 is" in message and "\n" not in message
