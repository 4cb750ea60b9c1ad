"""The schedule: both kinds equal, arrival order, liveness, users' mistakes, the command line."""
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import periodic_async
from grpo import Group, Problem, Response
from model import TriModel, frozen_copy
from periodic_async import Config, Trainer, UserError, Worker, run_period, train

ROOT = Path(__file__).parent.parent
SMOLLM2 = os.environ.get("SMOLLM2")


def config(folder, out, **changes):
    return Config(**{"model": str(folder), "out": str(out), "periods": 3, "prompts": 4,
                     "samples": 4, "max_new_tokens": 6, "learning_rate": 1e-3, "rows": 8,
                     "micro_batch_groups": 2} | changes)


# ------------------------------------------------------------------------ equal, whatever the order

def hashes(result):
    return result["rollouts_sha256"], result["weights_sha256"]


@pytest.mark.parametrize("changes", [
    {}, {"beta": 0.0}, {"loss": "dapo", "inner_steps": 2}, {"loss": "dr_grpo", "rows": 16},
    {"attention": "repeat"}, {"micro_batch_groups": 3, "mask_truncated": True}],
    ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()) or "default")
def test_async_is_sync_bit_for_bit(warm_folder, tmp_path, monkeypatch, changes):
    """Both schedules, with and without lent cores: the same tokens and the same weights."""
    seen = set()
    for schedule in ("async", "sync"):
        for lending in (True, False):
            monkeypatch.setattr(periodic_async, "LENDING", lending)
            result = train(config(warm_folder, tmp_path, schedule=schedule, **changes))
            assert result["logp_gap_max"] < 1e-4
            seen.add(hashes(result))
    assert len(seen) == 1


def test_seeds_differ(warm_folder, tmp_path):
    """Another seed gives other rollouts, the same seed the same: the digests can tell."""
    first, again, other = (train(config(warm_folder, tmp_path, periods=1, seed=seed))
                           for seed in (0, 0, 1))
    assert hashes(first) == hashes(again) != hashes(other)
    assert first["rollouts_sha256"] != other["rollouts_sha256"]


@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2 names the folder of the real model")
def test_real_model_async_is_sync(tmp_path):
    """A real model: hashes equal, and sampled log-probs within 1e-3 of the trained ones."""
    runs = [train(Config(model=SMOLLM2, out=str(tmp_path), periods=3, prompts=4, samples=4,
                         max_new_tokens=8, learning_rate=1e-5, schedule=schedule, rows=8))
            for schedule in ("async", "sync")]
    assert hashes(runs[0]) == hashes(runs[1])
    assert runs[0]["logp_gap_max"] < 1e-3


def made_trainer(policy, **changes):
    settings = config("", "", **changes).checked()
    timeline = periodic_async.Timeline(Path(os.devnull))
    models = TriModel(policy, None, frozen_copy(policy) if settings.beta else None)
    return Trainer(models, Worker("train", torch.device("cpu"), timeline), settings)


def made_groups(count=6, samples=4, version=0):
    """Groups with ragged prompts and responses; the last one has equal rewards."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return tuple(torch.randint(3, 50, (n,), generator=generator).tolist())

    groups = []
    for i in range(count):
        responses = tuple(Response(ids(1 + (i + k) % 5), (-1.0,) * (1 + (i + k) % 5), k != 1)
                          for k in range(samples))
        rewards = tuple(float(k % 2 or i == count - 1) for k in range(samples))
        groups.append(Group(Problem(ids(2 + i), "", i), responses, rewards, version))
    return groups


def gradient_of(policy, groups, **changes):
    """The gradient of one period, as it stands before the step, in float64 for the comparison."""
    trainer = made_trainer(policy, prompts=len(groups), **changes)
    policy.zero_grad()

    async def consume():
        for group in groups:
            await trainer.consume(group)
    asyncio.run(consume())
    if trainer.groups:
        trainer._train(trainer.groups)
    scale = 1 / trainer.unmasked_tokens if trainer.config.loss == "dapo" else 1
    return torch.cat([p.grad.flatten() for p in policy.parameters()]).double() * scale


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_proposition_2_arrival_order_does_not_change_the_gradient(random_policy, loss):
    """The paper's proposition 2, and A02: any order of the groups and any micro-batch size give the
    period's gradient; also with masked responses, which leave every sum but not the divisors."""
    groups = made_groups()
    for masked in (False, True):
        settings = {"loss": loss, "mask_truncated": masked}
        expected = gradient_of(random_policy, groups, micro_batch_groups=6, **settings)
        assert expected.norm() > 1e-3
        for order, size in (((5, 3, 1, 0, 2, 4), 1), ((4, 5, 0, 1, 2, 3), 4),
                            ((1, 0, 2, 4, 3, 5), 2)):
            found = gradient_of(random_policy, [groups[i] for i in order],
                                micro_batch_groups=size, **settings)
            assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_skipping_equal_rewards_is_exact(random_policy, loss):
    """With beta 0 a group of equal rewards is not trained on, and still counts in every divisor."""
    skipped = gradient_of(random_policy, made_groups(), loss=loss, beta=0.0)
    trained = gradient_of(random_policy, made_groups(), loss=loss, beta=1e-30)
    assert (skipped - trained).norm() <= 1e-6 * trained.norm()


def test_inner_steps_use_the_first_pass_as_old_policy(random_policy):
    """Inner steps 2..n compare with the first pass's log-probs: those of the old weights."""
    trainer = made_trainer(random_policy, inner_steps=2, prompts=6, learning_rate=1e-2)
    trainer.models.old = frozen_copy(random_policy)
    seen = []
    backward = trainer._backward

    def watched(batch):
        backward(batch)
        seen.append((batch, trainer.models.logprobs(batch.packed, forward_old=True)[:2]))
    trainer._backward = watched

    async def period():
        for group in made_groups():
            await trainer.consume(group)
        return await trainer.step()
    metrics = asyncio.run(period())
    assert len(seen) == 6  # three micro-batches, twice
    for batch, (_, old) in seen:
        assert (batch.old - old).abs().max() < 1e-5
    assert (seen[-1][1][0] - seen[-1][0].old).abs().max() > 1e-3  # the second pass had moved
    assert metrics["clip_low_share"] + metrics["clip_high_share"] > 0


# ----------------------------------------------------------------------------- on-policy, checked

def test_another_version_is_refused(random_policy):
    """A group of any version but the trained one raises: newer ones as well as older ones."""
    trainer = made_trainer(random_policy)
    for version in (-1, 1):
        with pytest.raises(RuntimeError, match="off-policy"):
            asyncio.run(trainer.consume(made_groups(version=version)[0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(random_policy, bad):
    """A23: weights and optimizer stay as they were; steps are counted; three in a row raise."""
    trainer = made_trainer(random_policy)
    before = [p.clone() for p in random_policy.parameters()]
    for count in (1, 2, 3):
        for parameter in random_policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.parameters[1].grad.view(-1)[0] = bad
        if count == 3:
            with pytest.raises(FloatingPointError, match="3 steps in a row"):
                trainer._optimizer_step()
        else:
            trainer._optimizer_step()
            assert trainer.bad_steps == count and not trainer.optimizer.state
    for old, new in zip(before, random_policy.parameters()):
        assert torch.equal(old, new)


def test_a_period_without_any_gradient(random_policy):
    """A10: all rewards equal and beta 0, or all responses masked: loss 0, same weights, no NaN."""
    equal = [dataclasses.replace(g, rewards=(0.5,) * 4) for g in made_groups()]
    cut = [dataclasses.replace(g, responses=tuple(dataclasses.replace(r, finished=False)
                                                  for r in g.responses)) for g in made_groups()]
    for groups, settings in ((equal, {"beta": 0.0}), (cut, {"mask_truncated": True}),
                             (cut, {"mask_truncated": True, "loss": "dapo"})):
        trainer = made_trainer(random_policy, prompts=6, **settings)
        before = [p.clone() for p in random_policy.parameters()]

        async def period(trainer=trainer, groups=groups):
            for group in groups:
                await trainer.consume(group)
            return await trainer.step()
        metrics = asyncio.run(period())
        assert metrics["loss"] == 0 and metrics["gradient_norm"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, random_policy.parameters()))


# ------------------------------------------------------------- the period, with stand-in backends

class SlowGenerator:
    """Another rollout backend: response i takes i * `seconds`, the last one ends last."""
    version = 0

    def __init__(self, seconds):
        self.seconds, self.ended = seconds, []

    async def generate(self, problem, samples):
        await asyncio.sleep(problem.key * self.seconds)
        self.ended.append(time.perf_counter())
        return [Response((1,), (0.0,), True)] * samples


class Recorder:
    """A trainer that only notes what it is given, and when."""

    def __init__(self):
        self.keys, self.begun = [], []

    async def consume(self, group):
        self.begun.append(time.perf_counter())
        self.keys.append(group.problem.key)

    async def step(self):
        return {}


async def ones(problem, responses):
    return [1.0] * len(responses)


def problems(keys):
    return [Problem((5,), "", key) for key in keys]


@pytest.mark.parametrize("overlap", [True, False])
def test_training_begins_before_the_last_rollout_ends(overlap):
    """The point of it all: in async the first `consume` comes before the last rollout's end."""
    generator, trainer = SlowGenerator(0.05), Recorder()
    asyncio.run(run_period(generator, trainer, problems([4, 1, 3, 2]), 2, ones, overlap))
    assert (trainer.begun[0] < generator.ended[-1]) == overlap
    assert trainer.keys == [1, 2, 3, 4]  # the order in which generation ended, in both schedules


def test_a_slow_reward_does_not_reorder_groups():
    """Groups are trained in the order their generation ended, however long their scoring takes."""
    async def slow_first(problem, responses):
        await asyncio.sleep(0.2 if problem.key == 1 else 0)
        return [1.0] * len(responses)
    trainer = Recorder()
    asyncio.run(run_period(SlowGenerator(0.02), trainer, problems([2, 1, 3]), 2, slow_first, True))
    assert trainer.keys == [1, 2, 3]


def test_groups_are_scored_and_kept_by_prompt():
    """A03: whatever finishes when, a group's rewards are those of its own responses."""
    async def score(problem, responses):
        return [float(problem.key)] * len(responses)
    groups, _ = asyncio.run(run_period(SlowGenerator(0.01), Recorder(), problems([3, 1, 2]), 4,
                                       score, True))
    assert [g.rewards for g in groups] == [(1.0,) * 4, (2.0,) * 4, (3.0,) * 4]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["generate", "early", "score", "consume", "step"])
def test_whatever_raises_ends_the_period(where, overlap):
    """A06, A07: no error is swallowed and nobody waits for ever; a producer that comes back early
    with too few responses is an error too."""
    class Failing(SlowGenerator):
        async def generate(self, problem, samples):
            if where == "generate" and problem.key == 2:
                raise RuntimeError("planted")
            return (await super().generate(problem, samples))[where == "early":]

    class FailingTrainer(Recorder):
        async def consume(self, group):
            if where == "consume":
                raise RuntimeError("planted")

        async def step(self):
            raise RuntimeError("planted")

    async def score(problem, responses):
        if where == "score" and problem.key == 3:
            raise RuntimeError("planted")
        return [1.0] * len(responses)

    async def period():
        async with asyncio.timeout(5):
            await run_period(Failing(0.01), FailingTrainer(), problems([1, 2, 3]), 2, score,
                             overlap)
    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        asyncio.run(period())
    message = str(periodic_async.original(caught.value))
    assert message == ("2 responses were asked for, 1 came" if where == "early" else "planted")


# --------------------------------------------------------------------------------- whole processes

PLANT = """
import sys, time
import torch
import periodic_async as pa, model, grpo
calls = 0
def raise_on_third(*_):
    global calls
    calls += 1
    if calls == 3:
        print("RAISED", time.time(), flush=True)
        raise RuntimeError("planted fault")
    return 1.0
def long_call(*_):
    print("BUSY", time.time(), flush=True)
    a = torch.randn(1400, 1400)
    for _ in range(3):
        torch.linalg.svd(a)      # a few seconds inside one torch call
def generator_raises(self):
    raise_on_third(); raise_on_third(); raise_on_third()
real_train = pa.Trainer._train
def train_raises(self, groups):
    raise_on_third(); raise_on_third(); raise_on_third()
{plant}
pa.main(sys.argv[1:])
"""
PLANTS = {
    "reward": "pa.math_reward = raise_on_third",
    "reward while training": "pa.Trainer._train = long_call\n"
                             "def late(*_):\n    time.sleep(0.2)\n    return raise_on_third()\n"
                             "pa.math_reward = late",
    "generator": "model.InferenceCopy.step = generator_raises",
    "trainer": "pa.Trainer._train = train_raises",
    "trainer while generating": "pa.Trainer._train = train_raises\n"
                                "real = model.InferenceCopy.decode\n"
                                "def slow(self):\n"
                                "    if calls: long_call()\n    return real(self)\n"
                                "model.InferenceCopy.decode = slow",
}


def start(plant, *flags):
    """A run with a planted fault; Ctrl-C reaches it even where the tests run in the background."""
    code = PLANT.replace("{plant}", plant)
    return subprocess.Popen([sys.executable, "-c", code, *flags], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def flags(folder, out, *more):
    return ["--model", str(folder), "--out", str(out), "--prompts", "4", "--samples", "4", "--rows",
            "8", "--max-new-tokens", "6", "--micro-batch-groups", "1", *more]


@pytest.mark.parametrize("where", PLANTS)
def test_an_error_ends_the_process(random_folder, tmp_path, where):
    """A06: the original error is printed and the process is gone within three seconds, also while
    the other side is inside a long torch call; exit code 1."""
    process = start(PLANTS[where], *flags(random_folder, tmp_path, "--periods", "2"))
    out, err = process.communicate(timeout=60)
    ended = time.time()
    assert process.returncode == 1
    assert "RuntimeError: planted fault" in err and "ExceptionGroup" not in err
    assert "never retrieved" not in err and "was destroyed" not in err
    raised = float(next(line for line in out.splitlines() if "RAISED" in line).split("RAISED")[1])
    assert ended - raised < 3


@pytest.mark.parametrize("plant", ["pa.Trainer._train = long_call",
                                   "pa.math_reward = lambda *_: print('BUSY', flush=True) or "
                                   "time.sleep(60)"], ids=["long torch call", "sleeping reward"])
def test_ctrl_c_ends_the_process(random_folder, tmp_path, plant):
    """A22: Ctrl-C ends the run within three seconds, exit code 130, whatever the threads do."""
    process = start(plant, *flags(random_folder, tmp_path))
    for line in process.stdout:
        if "BUSY" in line:
            break
    began = time.time()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and time.time() - began < 3
    assert "interrupted" in err and "Traceback" not in err and "was destroyed" not in err


@pytest.fixture(scope="session")
def bad_inputs(tmp_path_factory, random_folder):
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": \n')
    (folder / "three.jsonl").write_text('{"question": "a", "answer": "1"}\n' * 3)
    (folder / "binary.jsonl").write_bytes(b"\x1f\x8b\xff\xfe")
    sliding = folder / "sliding"
    sliding.mkdir()
    config = json.loads((Path(random_folder) / "config.json").read_text())
    (sliding / "config.json").write_text(json.dumps(config | {"model_type": "mistral",
                                                              "sliding_window": 4096}))
    return folder


@pytest.mark.parametrize("wrong, says", [
    (["--nonsense", "1"], "--nonsense"), (["--periods", "many"], "--periods"),
    (["--schedule", "later"], "--schedule"), (["--samples", "1"], "--samples must be 2 or more"),
    (["--temperature", "0"], "--temperature"), (["--learning-rate", "nan"], "--learning-rate"),
    (["--data", "{bad}/none.jsonl"], "none.jsonl"), (["--data", "{bad}"], "{bad}"),
    (["--data", "{bad}/empty.jsonl"], "empty.jsonl holds no problems"),
    (["--data", "{bad}/broken.jsonl"], "broken.jsonl, line 2"),
    (["--data", "{bad}/binary.jsonl"], "binary.jsonl"),
    (["--data", "{bad}/three.jsonl"], "3 problems read, 3 kept, but a period needs --prompts 4"),
    (["--data", "{bad}/three.jsonl", "--max-prompt-tokens", "2"], "3 problems read, 0 kept"),
    (["--model", "{bad}/nowhere"], "nowhere"), (["--model", "{bad}"], "{bad}"),
    (["--model", "{bad}/sliding"], "sliding_window=4096"),
    (["--out", "{bad}/empty.jsonl"], "empty.jsonl"),
    (["--train-devices", "cuda:0"], "no device cuda:0"),
])
def test_a_users_mistake_is_one_sentence(bad_inputs, random_folder, tmp_path, capfd, monkeypatch,
                                         wrong, says):
    """Exit code 2 and one line that says what is wrong, and where (A18)."""
    if "cuda:0" in wrong and torch.cuda.is_available():
        pytest.skip("here that device exists")

    class Gone(BaseException):
        pass

    def leave(code):
        raise Gone(code)
    monkeypatch.setattr(os, "_exit", leave)
    wrong = [w.replace("{bad}", str(bad_inputs)) for w in wrong]
    with pytest.raises(Gone) as caught:
        periodic_async.main(flags(random_folder, tmp_path) + wrong)
    err = [line for line in capfd.readouterr().err.splitlines() if "Loading weights" not in line]
    assert caught.value.args == (2,)
    assert len(err) == 1 and says.replace("{bad}", str(bad_inputs)) in err[0]


def test_a_whole_run_from_the_command_line(warm_folder, tmp_path):
    """One line a period, metrics.jsonl, a trace, and one JSON object as the last line."""
    done = subprocess.run([sys.executable, "periodic_async.py", *flags(warm_folder, tmp_path,
                                                                       "--periods", "2")],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("period ") for line in lines) == 2
    last = json.loads(lines[-1])
    assert {"schedule", "periods", "seconds", "tokens", "tokens_per_second", "reward_first",
            "tokens_per_second_per_device", "reward_last", "generate_busy", "train_busy",
            "overlap_bound", "rollouts_sha256", "weights_sha256", "logp_gap_max"} <= set(last)
    assert 1 <= last["overlap_bound"] <= 2
    periods = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [p["period"] for p in periods] == [0, 1]
    events = json.loads((tmp_path / "trace.json").read_text().rstrip().rstrip(",") + "]")
    assert {"prefill", "decode", "train", "step", "copy"} <= {e["name"] for e in events}
    assert {e["tid"] for e in events} == {"generate", "train"}


def test_bfloat16_runs(warm_folder, tmp_path):
    """`--dtype bfloat16`: the policy keeps float32 parameters; the gap of sampled log-probs stays
    at the rounding of bfloat16."""
    result = train(config(warm_folder, tmp_path, dtype="bfloat16"))
    assert 0 < result["logp_gap_max"] < 0.2


def test_user_error_is_raised_by_train(tmp_path):
    """`train` as a function: a mistake is a UserError, not an exit."""
    with pytest.raises(UserError, match="--prompts must be 1 or more"):
        train(Config(prompts=0, out=str(tmp_path)))


def test_attention_kinds_agree(warm_folder, tmp_path):
    """`--attention dense` and `repeat` are other ways to the same numbers."""
    results = {}
    for kind in ("shared", "dense", "repeat"):
        result = train(config(warm_folder, tmp_path / kind, attention=kind, periods=1))
        metrics = json.loads((tmp_path / kind / "metrics.jsonl").read_text())
        results[kind] = result["rollouts_sha256"], metrics["loss"], metrics["gradient_norm"]
    for kind in ("dense", "repeat"):
        assert results[kind][0] == results["shared"][0]
        assert results[kind][1:] == pytest.approx(results["shared"][1:], rel=1e-4, abs=1e-6)
