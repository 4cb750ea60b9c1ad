"""Rewards of a user, missing rewards, data sets, and evaluation."""
import asyncio
import dataclasses
import itertools
import json
import math
import os
import statistics
import threading
import time
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import huggingface_hub
import pytest
import torch
from conftest import assert_gradients_agree, separate_logprobs, small_model
from test_periodic_async import (
    Recorder,
    SlowGenerator,
    config,
    flags,
    gradient_of,
    hashes,
    made_groups,
    made_run,
    made_trainer,
    nudged,
    problems,
    trained,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import periodic_async
from grpo import (
    CLOSING,
    LOSSES,
    Problem,
    Response,
    draw_problems,
    encode_prompt,
    fetch,
    group_advantages,
    math_reward,
    read_problems,
)
from periodic_async import (
    Config,
    Generator,
    Scorer,
    UserError,
    encoded,
    original,
    read_questions,
    reward_function,
    run_period,
    run_periods,
    set_up,
    train,
)

NAN = float("nan")

# ------------------------------------------------------------------------------ calls of a reward


class Digits:
    """A tokenizer: a response of the one id n reads `n`."""

    def decode(self, ids, skip_special_tokens):
        return str(ids[0])


STUCK = -1  # the id of a response that spins
FREED = threading.Event()


@pytest.fixture
def freed():
    """Ends the spinning threads of a test, and waits for every thread that it began."""
    FREED.clear()
    before = {*threading.enumerate()}
    yield
    FREED.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(5)
        assert not thread.is_alive()


def spin_if_stuck(text, problem):
    """A reward like a regular expression that never ends; pure Python, so it holds the lock."""
    while text == str(STUCK) and not FREED.is_set():
        pass
    return float(text)


def responses(numbers):
    return [Response((n,), (0.0,), True) for n in numbers]


def scored(function, numbers, *, seconds=5.0, threads=2, key=7):
    """The rewards of one call of a Scorer."""
    score = Scorer(function, Digits(), seconds, threads)
    return asyncio.run(score(Problem((1,), "gold", key), responses(numbers)))


# Two spinning threads hand the interpreter lock to one another: slow, and slower on a busy core.
@pytest.mark.parametrize(("stuck", "quick", "seconds", "pause"),
                         [(1, 200, 0.5, 0.2), (2, 20, 1.5, 0.7)])
def test_a_stuck_reward_counts_0_and_stops_nothing(freed, capsys, stuck, quick, seconds, pause):
    """A06: a reward that never ends blocks the event loop, the other rewards, or, once it has every
    seat, all rewards after it; or its thread is one for which the process waits at its end."""
    def reward(text, problem):
        called.append((time.perf_counter(), text))
        return spin_if_stuck(text, problem)
    score, called = Scorer(reward, Digits(), seconds, threads=2), []
    before, longest = {*threading.enumerate()}, 0.0

    async def tick():
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            last, before = time.perf_counter(), last
            longest = max(longest, last - before)

    async def both():
        ticker = asyncio.create_task(tick())
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(score(Problem((1,), "", key), responses(numbers)))
                         for key, numbers in ((4711, [STUCK] * stuck), (4712, range(quick)))]
        finally:
            ticker.cancel()
        return [call.result() for call in calls]
    assert asyncio.run(both()) == [[0.0] * stuck, [*range(quick)]]
    assert longest < pause
    (begun, _), (first, _) = (next(call for call in called if (call[1] == str(STUCK)) == kind)
                              for kind in (True, False))
    assert (first < begun + 0.8 * seconds) == (stuck == 1)  # at once, or on freed seats
    left = {*threading.enumerate()} - before
    assert len(left) == stuck and all(thread.daemon for thread in left)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == stuck
    assert all("4711" in line and f"--reward-seconds {seconds}" in line for line in lines)


def test_plain_rewards_at_once():
    """As many plain rewards at once as there are seats, over all groups: neither one nor all."""
    lock, now, most = threading.Lock(), 0, 0

    def reward(text, problem):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1
        return float(text) + problem.key
    score = Scorer(reward, Digits(), 5.0, threads=3)

    async def groups():
        return await asyncio.gather(*(score(Problem((1,), "", key), responses(range(8)))
                                      for key in (10, 20, 30)))
    assert asyncio.run(groups()) == [[key + n for n in range(8)] for key in (10, 20, 30)]
    assert most == 3


def test_async_rewards_are_awaited():
    """An async reward runs in the event loop, and the number of threads does not limit it: 100
    calls wait for one another."""
    async def reward(text, problem):
        assert threading.current_thread() is threading.main_thread()
        await barrier.wait()
        return float(text)

    async def score():
        nonlocal barrier
        barrier = asyncio.Barrier(100)
        return await Scorer(reward, Digits(), 5.0, 1)(Problem((1,), "", 0), responses(range(100)))
    barrier = None
    assert asyncio.run(score()) == list(range(100))


def test_an_async_reward_has_the_same_limit(capsys):
    """An async reward that never answers, as a judge that is down, counts 0 and is named."""
    async def reward(text, problem):
        await asyncio.sleep(60 if text == "5" else 0)
        return float(text)
    assert scored(reward, [4, 5, 6], seconds=0.1, key=4711) == [4.0, 0.0, 6.0]
    assert "problem 4711 took more than --reward-seconds 0.1" in capsys.readouterr().out


@pytest.mark.parametrize("awaited", [False, True])
def test_what_a_reward_may_return(awaited):
    """None and NaN are unscored, not 0; a bool, an int and a tensor are numbers."""
    values = [None, NAN, True, False, 1, 0.25, torch.tensor(0.5)]

    def plain(text, problem):
        assert problem.answer == "gold"
        return values[int(text)]

    async def coroutine(text, problem):
        return plain(text, problem)
    found = scored(coroutine if awaited else plain, range(7))
    assert [type(reward) for reward in found] == [float] * 7
    assert all(math.isnan(reward) for reward in found[:2])
    assert found[2:] == [1.0, 0.0, 1.0, 0.25, 0.5]
    values[1] = -math.inf  # it would make every advantage of the group NaN, and so the step
    with pytest.raises(BaseException) as caught:
        scored(coroutine if awaited else plain, range(7), key=4711)
    assert "problem 4711 is -inf" in str(original(caught.value))


@pytest.mark.parametrize("error", [ValueError, TimeoutError, StopIteration])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_reward_that_raises(freed, error, awaited):
    """The original error ends the scoring at once, though another call is stuck; a TimeoutError of
    the reward itself, or the StopIteration of a `next`, is no call that took too long."""
    def plain(text, problem):
        if text == "3":
            raise error("planted")
        return 1.0 if awaited else spin_if_stuck(text, problem)

    async def coroutine(text, problem):
        return plain(text, problem)
    began = time.perf_counter()
    with pytest.raises(BaseException) as caught:
        scored(coroutine if awaited else plain, [STUCK, 1, 3, 2], seconds=1.0)
    found = original(caught.value)
    if error is StopIteration and isinstance(found, RuntimeError):
        found = found.__cause__  # as Python makes of one that leaves a coroutine
    assert type(found) is error and found.args == ("planted",)
    assert time.perf_counter() - began < 0.8


def test_a_reward_given_up_before_it_began_disturbs_nothing(monkeypatch):
    """A thread that gets to run only after its call has timed out raises nothing."""
    gate, called, threads = threading.Event(), [], []

    class Late(threading.Thread):
        def run(self):
            threads.append(self)
            gate.wait(5)
            super().run()
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(threading, "Thread", Late)
    assert scored(lambda text, problem: called.append(text), [1], seconds=0.05) == [0.0]
    gate.set()
    for thread in threads:
        thread.join(5)
    assert called == ["1"] and not failed


@pytest.mark.parametrize("overlap", [True, False])
def test_stuck_rewards_keep_the_order_of_training(freed, overlap):
    """A03, P2: groups are trained in the order their generation ended, with their own rewards, also
    where the rewards of the first one get stuck in their threads."""
    def reward(text, problem):
        return spin_if_stuck(str(STUCK) if problem.key == 1 else text, problem) + problem.key
    trainer, score = Recorder(), Scorer(reward, Digits(), 0.2, threads=2)
    groups, _ = asyncio.run(run_period(SlowGenerator(0.02), trainer, problems([3, 1, 2]), 2, score,
                                       overlap))
    assert trainer.keys == [1, 2, 3]
    assert [group.rewards for group in groups] == [(0.0, 0.0), (3.0, 3.0), (4.0, 4.0)]


# -------------------------------------------------------------------------------- missing rewards

@pytest.mark.parametrize("rewards, expected", [
    ([1, NAN, 0, 0, NAN], [2 / 3, NAN, -1 / 3, -1 / 3, NAN]),    # deviation 1 / sqrt(3)
    ([NAN, 3, 1], [NAN, 1, -1]),                                 # sqrt(2)
    ([5, 5, NAN, 5], [0, 0, NAN, 0]), ([NAN, 0.35, NAN], [NAN, 0, NAN]), ([NAN] * 3, [NAN] * 3)])
def test_advantages_of_the_scored(rewards, expected):
    """A03: a missing reward stays missing, and takes no part in the mean, in the deviation or in
    the number that divides it; it is not a 0."""
    scored = [x for x in expected if x == x]
    deviation = math.sqrt(sum(x * x for x in scored) / (len(scored) - 1)) if any(scored) else 1
    for scale, divisor in ((True, deviation + 1e-4 if any(scored) else 1), (False, 1)):
        torch.testing.assert_close(group_advantages(rewards, scale=scale),
                                   torch.tensor(expected) / divisor, equal_nan=True)


def test_a_missing_response_borrows_nothing():
    """A03: with a response missing the others' advantages are those of a group without it, wherever
    it stood; nobody gets its neighbour's."""
    whole = group_advantages([0.0, 0.5, 2.0])
    for place in range(4):
        rewards = [0.0, 0.5, 2.0]
        rewards.insert(place, NAN)
        found = group_advantages(rewards)
        assert found.isnan().tolist() == [i == place for i in range(4)]
        assert torch.equal(found[~found.isnan()], whole)


REWARDS = [(NAN, 1.0, 0.0, 0.0), (0.0, 1.0, NAN, NAN), (1.0, 0.0, 0.0, 3.0), (NAN, NAN, 1.0, NAN),
           (1.0, 1.0, NAN, 1.0), (NAN,) * 4]


def unscored_groups():
    return [dataclasses.replace(group, rewards=rewards)
            for group, rewards in zip(made_groups(len(REWARDS)), REWARDS)]


def textbook_gradient(groups, loss, beta, max_length):
    """Response by response, on stock models, with the responses without a reward left out."""
    policy, reference = small_model(), nudged(small_model())
    total, tokens = 0.0, 0
    for group in groups:
        rewards = [r for r in group.rewards if r == r]
        for response, reward in zip(group.responses, group.rewards):
            if reward != reward:
                continue
            new, old = (separate_logprobs(model, [group.problem.prompt_ids], [[response.ids]])
                        for model in (policy, reference))
            advantage = reward - statistics.mean(rewards)
            if loss != "dr_grpo" and len(set(rewards)) > 1:
                advantage /= statistics.stdev(rewards) + 1e-4
            d = old.detach() - new
            terms = -(new - new.detach()).exp() * advantage + beta * (d.exp() - d - 1)
            length = {"grpo": len(new), "dr_grpo": max_length, "dapo": 1}[loss]
            total, tokens = total + terms.sum() / length, tokens + len(new)
    count = tokens if loss == "dapo" else sum(len(group.responses) for group in groups)  # P * K
    (total / count).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_unscored_response_has_no_gradient(random_policy, monkeypatch, loss, beta):
    """A response without a reward leaves the sum: as a wrong one it would be trained away from, and
    its KL would stay; it counts in P*K, but not in dapo's number of tokens."""
    monkeypatch.setattr(periodic_async, "CLIP_NORM", float("inf"))
    groups = unscored_groups()
    expected = textbook_gradient(groups, loss, beta, max_length=6)
    for size in (1, 4):
        found = gradient_of(random_policy, groups, loss=loss, beta=beta, micro_batch_groups=size)
        assert_gradients_agree(found, expected, 1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_groups_with_one_score_are_skipped(random_policy, beta):
    """A10: without a KL term a group with one scored response, or equal ones, or none, is not
    computed at all; the loss has no NaN."""
    trainer = made_trainer(random_policy, prompts=6, beta=beta, learning_rate=0)
    _, metrics = trained(trainer, unscored_groups())
    assert metrics["skipped_groups"] == (0 if beta else 3)
    assert math.isfinite(metrics["loss"]) and metrics["gradient_norm"] > 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_period_without_any_reward(random_policy, loss, beta):
    """A10: where a judge is down for a whole period the loss is 0 and no weight moves."""
    groups = [dataclasses.replace(group, rewards=(NAN,) * 4) for group in made_groups()]
    trainer = made_trainer(random_policy, prompts=6, beta=beta, loss=loss, inner_steps=2)
    before = [p.clone() for p in random_policy.parameters()]
    _, metrics = trained(trainer, groups)
    assert metrics["loss"] == metrics["gradient_norm"] == metrics["bad_steps"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, random_policy.parameters()))


# ----------------------------------------------------------------------------- a user's own reward

REWARD = """
import math
from statistics import mean

WORTH = 100
called = []

def score(response, problem):
    called.append(response)
    if sum(map(ord, response)) % 3 == 2:
        return None
    return helper(response) + WORTH * int(problem.answer) + problem.question.count("?") / 4

def helper(text):
    return mean(map(ord, text)) if text else math.floor(0.5)

async def awaited(response, problem):
    return score(response, problem)
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "own: reward.py"  # a colon in a folder or name, too
    path.write_text(REWARD)
    return path


def worth(text, answer, question):
    """The reward of `reward_file`."""
    if sum(map(ord, text)) % 3 == 2:
        return None
    return (statistics.mean(map(ord, text)) if text else 0) + 100 * int(answer) + (
        question.count("?") / 4)


def test_the_math_reward():
    """`math` compares with the gold answer of its problem, and sees the response alone."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: ("#### 42.0", "#### 41", "Is it?")[ids[0]])
    score = Scorer(reward_function("math"), tokenizer, seconds=5.0)
    problem = Problem((1,), "42", 0, "Is it #### 42?")
    responses = [Response((n,), (-1.0,), True) for n in range(3)]
    assert asyncio.run(score(problem, responses)) == [1.0, 0.0, 0.0]


def test_a_reward_of_ones_own(reward_file):
    """Imports, globals and functions of the file are there when its function is called."""
    for name in ("score", "helper", "awaited"):
        assert callable(reward_function(f"{reward_file}:{name}"))
    reward = reward_function(f"{reward_file}:score")
    problem = Problem((1,), "3", 0, "a?")
    for text in ("", "a", "ab", "abc"):
        assert reward(text, problem) == worth(text, "3", "a?")


@pytest.mark.parametrize("content, function, cause", [
    (None, "score", "No such file"), ("x = 1\n", "nothing", "nothing"),
    ("x = 1\n", "x", "no function"), ("x = 1\ndef score(:\n", "score", "line 2"),
    ("x = 1 / 0\n", "score", "division by zero"),
    ("import no_such_module\n", "score", "no_such_module"), (REWARD, "", "")])
def test_a_reward_that_does_not_load(tmp_path, content, function, cause):
    """A18: one sentence that names the flag, the file and what is wrong with it."""
    path = tmp_path / "own.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as caught:
        reward_function(f"{path}:{function}")
    message = str(caught.value)
    assert "--reward" in message and "own.py" in message and cause in message
    assert "\n" not in message


def test_a_reward_that_is_none(random_folder, tmp_path):
    """A18: neither math nor FILE.py:FUNCTION is a user's mistake that names the flag."""
    for name in ("maths", "own.py", ""):
        with pytest.raises(ValueError, match="--reward"):
            reward_function(name)
    with pytest.raises(UserError, match="--reward"):
        train(config(random_folder, tmp_path, reward="maths"))


def questions_file(path, questions):
    """A JSONL file of questions, whose answers are their numbers."""
    path.write_text("".join(json.dumps({"question": question, "answer": str(number)}) + "\n"
                            for number, question in enumerate(questions)))
    return path


def lines(path):
    """The objects of a JSONL file; NaN, which is no JSON, is an error."""
    def refuse(constant):
        raise ValueError(constant)
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("function, schedule", [("score", "async"), ("awaited", "sync")])
def test_rollouts_hold_what_was_rewarded(random_folder, tmp_path, monkeypatch, reward_file,
                                         function, schedule):
    """A run with its own reward: P*K lines a period in the order of its prompts, whichever ends
    first, each with the reward of its own text and question; null, not 0 or NaN, for None."""
    generate = Generator.generate

    async def delayed(self, problem, samples):
        found = await generate(self, problem, samples)
        await asyncio.sleep(0.1 * (problem.key % 2))
        return found
    monkeypatch.setattr(Generator, "generate", delayed)
    questions = ["a", "b?", "c??", "d???", "e????"]
    data = questions_file(tmp_path / "data.jsonl", questions)
    train(config(random_folder, tmp_path, periods=2, data=str(data), schedule=schedule,
                 reward=f"{reward_file}:{function}", prompt_template="{question}"))
    records = lines(tmp_path / "rollouts.jsonl")
    rows = [Problem((), str(i), i, question) for i, question in enumerate(questions)]
    order = draw_problems(rows, 0, 0, 8)
    assert [(r["period"], r["key"], r["problem"]) for r in records] == [
        (i // 4, problem.key, problem.question) for i, problem in enumerate(order)
        for _ in range(4)]
    for i, record in enumerate(records):
        assert record["reward"] == worth(record["response"], order[i // 4].answer,
                                         record["problem"])
    given = [record["reward"] for record in records]
    assert None in given and len({*given}) > 8
    metrics = lines(tmp_path / "metrics.jsonl")
    for period, period_metrics in enumerate(metrics):
        mine = given[16 * period:16 * period + 16]
        assert period_metrics["unscored"] == mine.count(None)
        assert period_metrics["reward"] == pytest.approx(
            statistics.mean(reward for reward in mine if reward is not None))


def test_an_error_of_the_reward_ends_the_run(random_folder, tmp_path):
    """A06: what a reward raises comes out of `train` as it is, not in a group."""
    (tmp_path / "own.py").write_text("def score(response, problem):\n    return {}['planted']\n")
    with pytest.raises(KeyError, match="planted"):
        train(config(random_folder, tmp_path, reward=f"{tmp_path}/own.py:score"))


# --------------------------------------------------------------------------------------- data sets

class Characters:
    """A tokenizer whose ids are code points: a prompt can be read back."""
    chat_template = bos_token_id = None
    added_tokens_decoder = MappingProxyType({})

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=[*map(ord, text)])


def read_prompts(settings, source):
    return encoded(settings, source, read_questions(settings, source), Characters())


def prompts(tmp_path, template, questions):
    """The prompts of a run as text."""
    data = questions_file(tmp_path / "data.jsonl", questions)
    settings = config("", "", data=str(data), prompts=1, prompt_template=template)
    return ["".join(map(chr, problem.prompt_ids))
            for problem in read_prompts(settings, "data")]


LATEX = [r"Find $\frac{a}{b}$ for {question} in \{1, 2\}, {0}, {} and %s.", "plain"]


def test_templates(tmp_path):
    """A template is text, or a file of it; it is no format string: the braces of a question, or of
    a template, stand in the prompt as they are."""
    template = "{system} Put it in \\boxed{}: {question}\nNow, {question}"
    expected = [template.replace("{question}", "\0").replace("\0", question) for question in LATEX]
    assert prompts(tmp_path, template, LATEX) == expected
    (tmp_path / "template.txt").write_text(template)
    assert prompts(tmp_path, str(tmp_path / "template.txt"), LATEX) == expected
    assert prompts(tmp_path, "", ["q"]) == [f"q\n\n{CLOSING}"]
    assert prompts(tmp_path, "{question}", ["q"]) == ["q"]


def test_a_template_file_without_the_question(random_folder, tmp_path):
    """A18: without {question} in it every prompt would be the same; the error names the flag."""
    path = tmp_path / "template.txt"
    path.write_text("Solve it.")
    with pytest.raises(UserError, match="--prompt-template"):
        train(config(random_folder, tmp_path, prompt_template=str(path)))


@pytest.mark.parametrize("template", ["Solve it.", "{Question}", "long " * 99, "."],
                         ids=["text", "misspelt", "long", "folder"])
def test_a_template_that_is_no_file(tmp_path, template):
    """A18: text without {question} is no missing file alone: the error names the flag."""
    with pytest.raises((ValueError, OSError), match="--prompt-template"):
        prompts(tmp_path, template, ["q"])


@pytest.mark.parametrize("name, text, rows", [
    ("deepscaler.json", json.dumps([
        {"problem": "Let $a_{1}$ be", "answer": "-\\frac{2}{3}", "solution": "by #### 7"},
        {"problem": "q", "answer": "26", "solution": ""}], indent=2),
     [("Let $a_{1}$ be", "-\\frac{2}{3}"), ("q", "26")]),
    ("math500.jsonl", json.dumps(
        {"problem": "Convert", "solution": "We \\boxed{no}", "subject": "Precalculus", "level": 2,
         "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "test/1.json"}) + "\n",
     [("Convert", "\\left( 3, \\frac{\\pi}{2} \\right)")]),
    ("aime.jsonl", "".join(json.dumps(
        {"ID": f"2024-I-{n}", "Problem": f"q{n}", "Solution": "s", "Answer": n}) + "\n"
        for n in (0, 33, 809)), [("q0", "0"), ("q33", "33"), ("q809", "809")])])
def test_data_sets_of_mathematics(tmp_path, name, text, rows):
    """A26: DeepScaleR, MATH-500 and AIME as they are published, capital letters and numbers too;
    the solution is no answer."""
    (tmp_path / name).write_text(text)
    assert read_problems(tmp_path / name) == rows
    settings = config("", "", prompts=1, data=str(tmp_path / name))
    found = read_prompts(settings, "data")
    assert [(problem.question, problem.answer) for problem in found] == rows
    assert [problem.key for problem in found] == [*range(len(rows))]


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache of the hub that holds one file of one data set, and no network."""
    commit = "0123456789" * 4
    folder = tmp_path / "hub" / "datasets--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "dir").mkdir(parents=True)
    questions_file(folder / "snapshots" / commit / "dir" / "file.jsonl", ["cached"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_cached_data_set_needs_no_network(hub_cache, tmp_path):
    """hub:OWNER/NAME/FILE is read from the cache, its folders too; any other path is a path."""
    path = fetch("hub:owner/name/dir/file.jsonl")
    assert Path(path).is_relative_to(tmp_path) and read_problems(path) == [("cached", "0")]
    assert read_problems("hub:owner/name/dir/file.jsonl") == [("cached", "0")]
    settings = config("", "", eval_data="hub:owner/name/dir/file.jsonl")
    assert [p.question for p in read_prompts(settings, "eval_data")] == ["cached"]
    assert fetch("some/file.jsonl") == "some/file.jsonl"


@pytest.mark.parametrize("name", ["owner/name/dir/other.jsonl", "owner/other/dir/file.jsonl",
                                  "nonsense", "owner/other", "", "a b/c?/d"])
def test_a_data_set_out_of_reach(hub_cache, name):
    """A18: what is not in the cache and cannot be downloaded, or is no file of a data set, is one
    sentence that says what to do."""
    with pytest.raises(ValueError) as caught:
        read_problems(f"hub:{name}")
    message = str(caught.value)
    assert f"hub:{name}" in message and "download it and give its path" in message
    assert "\n" not in message


def test_a_data_set_without_its_file(hub_cache, random_folder, tmp_path):
    """A18: hub:OWNER/NAME is no file, be that data set unknown or its folder in the cache."""
    for name in ("hub:owner/other", "hub:owner/name"):
        with pytest.raises(UserError, match=name):
            train(config(random_folder, tmp_path, data=name))


# -------------------------------------------------------------------------------------- evaluation

HELD_OUT = ["1?", "longer than whatever is trained on, by far", "2??", "last of the file"]


def evaluated(folder, out, reward_file, **changes):
    """The settings of a run that evaluates."""
    out.mkdir(exist_ok=True)
    return config(folder, out, **{"eval_data": str(questions_file(out / "held.jsonl", HELD_OUT)),
                                  "reward": f"{reward_file}:score", "max_new_tokens": 5,
                                  "prompt_template": "{question}"} | changes)


def test_evaluation_in_its_periods(random_folder, tmp_path, reward_file):
    """Before the first period, after every eval_every and after the last: a file with one object a
    problem in the order of the data, a metric in those periods alone, first and last in the
    summary."""
    result = train(evaluated(random_folder, tmp_path, reward_file, periods=5, eval_every=2,
                             eval_limit=3, eval_samples=2, prompts=2, samples=2))
    files = sorted(tmp_path.glob("eval-*"))
    assert [file.name for file in files] == [f"eval-{n:06d}.jsonl" for n in (0, 2, 4, 5)]
    means = []
    for file in files:
        records = lines(file)
        assert [set(r) for r in records] == [{"question", "answer", "responses", "rewards"}] * 3
        assert [(r["question"], r["answer"]) for r in records] == [
            (question, str(n)) for n, question in enumerate(HELD_OUT[:3])]
        assert all(len(r["responses"]) == 2 for r in records)
        for r in records:
            assert r["rewards"] == [worth(text, r["answer"], r["question"])
                                    for text in r["responses"]]
        means.append(statistics.mean(x for r in records for x in r["rewards"] if x is not None))
    metrics = lines(tmp_path / "metrics.jsonl")
    assert [m["period"] for m in metrics if "eval_reward" in m] == [1, 3, 4]
    assert [m["eval_reward"] for m in metrics if "eval_reward" in m] == pytest.approx(means[1:])
    assert (result["eval_first"], result["eval_last"]) == pytest.approx((means[0], means[-1]))


def greedy(folder, questions):
    """What a stock model answers."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM,
                                                                  AutoTokenizer))
    answers = []
    for question in questions:
        ids = torch.tensor([encode_prompt(tokenizer, question)])
        whole = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5,
                                      do_sample=False)
        answers.append(tokenizer.decode(whole[0, ids.shape[1]:], skip_special_tokens=True))
    return answers


def test_one_answer_is_greedy_and_of_the_weights_as_they_are(random_folder, tmp_path, reward_file):
    """eval_samples 1 is the greedy answer of a stock model: of the untrained one at the start, of
    the trained one at the end."""
    settings = dataclasses.asdict(evaluated("", tmp_path, reward_file, periods=2, beta=0.0,
                                            learning_rate=3e-2))
    del settings["model"], settings["out"]
    run = made_run(random_folder, tmp_path, **settings)
    asyncio.run(run_periods(run))
    AutoTokenizer.from_pretrained(random_folder).save_pretrained(tmp_path / "trained")
    run.trainer.models.policy.save_pretrained(tmp_path / "trained")
    found = [[r["responses"] for r in lines(tmp_path / f"eval-{n:06d}.jsonl")] for n in (0, 2)]
    expected = [[[answer] for answer in greedy(folder, HELD_OUT)]
                for folder in (random_folder, tmp_path / "trained")]
    assert found == expected and found[0] != found[1]


@pytest.mark.slow
def test_evaluation_changes_nothing(random_folder, tmp_path, reward_file):
    """Rollouts and weights are those of a run without evaluation: its sampling, its greedy
    temperature and its prompts, longer than those trained on, stay outside."""
    plain, greedy, sampled = (
        train(evaluated(random_folder, tmp_path / str(number), reward_file, eval_every=1,
                        eval_limit=2, periods=2, **changes))
        for number, changes in enumerate(({"eval_data": ""}, {}, {"eval_samples": 3})))
    assert hashes(plain) == hashes(greedy) == hashes(sampled)
    assert "eval_first" not in plain and "eval_last" not in plain


def test_evaluation_draws_numbers_of_its_own(random_folder, tmp_path, reward_file):
    """Sampled answers to a problem that is trained on, too, are not those of the first period."""
    settings = evaluated(random_folder, tmp_path, reward_file, periods=1, eval_samples=4)
    train(dataclasses.replace(settings, data=settings.eval_data))
    trained_on = lines(tmp_path / "rollouts.jsonl")
    for record in lines(tmp_path / "eval-000000.jsonl"):
        seen = [r["response"] for r in trained_on if r["problem"] == record["question"]]
        assert len(seen) == 4 and seen != record["responses"]


def test_no_periods_evaluate_and_stop(random_folder, tmp_path, capsys):
    """`--periods 0 --eval-data F` ends with one JSON object, and fewer problems than --prompts
    will do; without --eval-data there is nothing to do, and that is a user's mistake."""
    held = questions_file(tmp_path / "held.jsonl", HELD_OUT[:2])
    capsys.readouterr()
    periodic_async.main(flags(random_folder, tmp_path, "--periods", "0", "--eval-data", str(held),
                              "--data", str(held)))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["periods"] == 0 and last["eval_first"] == last["eval_last"]
    assert len(lines(tmp_path / "eval-000000.jsonl")) == 2
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with pytest.raises(UserError, match=r"--periods 0.*--eval-data"):
        train(config(random_folder, tmp_path, periods=0))


def test_the_last_line_is_json_without_any_reward(random_folder, tmp_path, capsys):
    """The summary of a run none of whose responses was scored is JSON, which knows no NaN."""
    (tmp_path / "own.py").write_text("def score(response, problem):\n    return None\n")
    held = questions_file(tmp_path / "held.jsonl", HELD_OUT[:2])
    periodic_async.main(flags(random_folder, tmp_path, "--periods", "1", "--eval-data", str(held),
                              "--reward", f"{tmp_path}/own.py:score"))
    (tmp_path / "last.jsonl").write_text(capsys.readouterr().out.splitlines()[-1])
    (last,) = lines(tmp_path / "last.jsonl")
    assert last["eval_first"] is last["reward_first"] is None


# ------------------------------------------------------------- real data, and a real model on it

SMOLLM2, GSM8K = os.environ.get("SMOLLM2"), os.environ.get("GSM8K")


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K, reason="GSM8K names a folder with its train.jsonl and test.jsonl")
def test_real_model_data():
    """Every gold answer of GSM8K scores 1 against itself, after #### and in a box, and 0 against
    its neighbour's, where that is another number."""
    golds = [gold for name in ("train", "test")
             for _, gold in read_problems(Path(GSM8K) / f"{name}.jsonl")]
    assert len(golds) == 8792
    for gold, neighbour in zip(golds, golds[1:] + golds[:1]):
        same = Fraction(gold.replace(",", "")) == Fraction(neighbour.replace(",", ""))
        for form in ("so it is\n#### {}", r"so \boxed{{{}}}."):
            assert math_reward(form.format(gold), gold) == 1.0
            assert math_reward(form.format(neighbour), gold) == float(same)


@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 and GSM8K), reason="SMOLLM2 and GSM8K name the folders")
def test_real_model_answers_as_generate_does(tmp_path):
    """Greedy evaluation through the generator: the tokens of `generate`, or others first where its
    two best logits are within 1e-4. EVAL_LIMIT and EVAL_TOKENS make it longer."""
    limit, tokens = (int(os.environ.get(name, default))
                     for name, default in (("EVAL_LIMIT", 6), ("EVAL_TOKENS", 24)))
    settings = Config(model=SMOLLM2, periods=0, eval_data=f"{GSM8K}/test.jsonl", eval_limit=limit,
                      max_new_tokens=tokens, rows=32, out=str(tmp_path)).checked()
    run = set_up(settings, tmp_path, periodic_async.thread("shared"))
    answers = {}
    generate = run.generator.generate

    async def noted(problem, samples, **settings):
        answers[problem] = await generate(problem, samples, **settings)
        return answers[problem]
    run.generator.generate = noted
    asyncio.run(run_periods(run))
    assert len(answers) == limit
    stock = AutoModelForCausalLM.from_pretrained(SMOLLM2)
    for problem, (response,) in answers.items():
        out = stock.generate(torch.tensor([problem.prompt_ids]), max_new_tokens=tokens,
                             do_sample=False, output_logits=True, return_dict_in_generate=True)
        right = out.sequences[0, len(problem.prompt_ids):].tolist()
        for ours, theirs, logits in itertools.zip_longest(response.ids, right, out.logits):
            if ours != theirs:
                best = logits[0].topk(2).values
                assert best[0] - best[1] < 1e-4
                break
