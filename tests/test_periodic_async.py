"""The schedule: both kinds equal, arrival order, liveness, users' mistakes, the command line."""
import asyncio
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import assert_gradients_agree, separate_logprobs, small_model
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

import periodic_async
from attention import attach, pack
from grpo import LOSSES, Group, Problem, Response
from model import TriModel, frozen_copy
from periodic_async import (
    WARMUP_PERIODS,
    Config,
    Timeline,
    Trainer,
    UserError,
    Worker,
    run_period,
    run_periods,
    set_up,
    summary,
    train,
)

ROOT = Path(__file__).parent.parent
SMOLLM2 = os.environ.get("SMOLLM2")


def config(folder, out, **changes):
    return Config(**{"model": str(folder), "out": str(out), "periods": 3, "prompts": 4,
                     "samples": 4, "max_new_tokens": 6, "learning_rate": 1e-3, "rows": 8,
                     "micro_batch_groups": 2, "save_every": 0} | changes)


# ------------------------------------------------------------------------ equal, whatever the order

def hashes(result):
    return result["rollouts_sha256"], result["weights_sha256"]


@pytest.mark.parametrize("changes", [
    {}, *(
        pytest.param(changes, marks=pytest.mark.slow) for changes in (
            {"loss": "dapo", "inner_steps": 2}, {"beta": 0.0}, {"attention": "repeat"},
            {"loss": "dr_grpo", "rows": 16},
            {"micro_batch_groups": 3, "mask_truncated": True}))],
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


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2 names the folder of the real model")
def test_real_model_async_is_sync(tmp_path):
    """A real model: hashes equal, and sampled log-probs within 1e-3 of the trained ones."""
    runs = [train(Config(model=SMOLLM2, out=str(tmp_path), periods=3, prompts=4, samples=4,
                         max_new_tokens=8, learning_rate=1e-5, schedule=schedule, rows=8,
                         save_every=0))
            for schedule in ("async", "sync")]
    assert hashes(runs[0]) == hashes(runs[1])
    assert runs[0]["logp_gap_max"] < 1e-3


def made_trainer(policy, **changes):
    """A trainer whose reference is not its policy: else the KL would have no gradient."""
    settings = config("", "", **{"gap_limit": 0.0} | changes).checked()  # groups are made up
    timeline = periodic_async.Timeline(Path(os.devnull))
    reference = nudged(frozen_copy(policy)) if settings.beta else None
    models = TriModel(policy, None, reference, temperature=settings.temperature)
    return Trainer(models, Worker("train", timeline), settings)


def nudged(model, size=0.02):
    """Another model of the same shape, in place."""
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator)
    return model


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


def trained(trainer, groups):
    """Train one period. Returns of each optimizer step the weights that it met and the gradient
    that it was given, as {name: tensor}, and the period's metrics."""
    steps = []

    def note(*_):
        named = dict(trainer.models.policy.named_parameters())
        steps.append(({name: p.detach().clone() for name, p in named.items()},
                      {name: p.grad.clone() for name, p in named.items() if p.grad is not None}))

    async def period():
        for group in groups:
            await trainer.consume(group)
        return await trainer.step()
    hook = trainer.optimizer.register_step_pre_hook(note)
    metrics = asyncio.run(period())
    hook.remove()
    return steps, metrics


def gradient_of(policy, groups, **changes):
    """The gradient of one period, {name: tensor}. A learning rate of 0 leaves the policy alone."""
    trainer = made_trainer(policy, prompts=len(groups), learning_rate=0, **changes)
    ((_, gradient),), _ = trained(trainer, groups)
    return gradient


def two_steps(policy, groups, update=None, **changes):
    """Of both inner steps of a period: weights met, and gradient. The update is smooth in the
    gradient: AdamW's own first one is its sign, which rounding turns around near 0; or it is
    given, as the weights that the second step shall meet."""
    trainer = made_trainer(policy, prompts=len(groups), inner_steps=2, learning_rate=0.5, **changes)
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1.0
    if update is not None:
        trainer.optimizer.register_step_post_hook(
            lambda *_: policy.load_state_dict(update, strict=False))
    steps, metrics = trained(trainer, groups)
    return *steps, trainer.models.reference, metrics


@pytest.mark.parametrize("loss", LOSSES)
def test_proposition_2_arrival_order_does_not_change_the_gradient(random_policy, unclipped, loss):
    """The paper's proposition 2, and A02: any order of the groups and any micro-batch size give the
    period's gradient; also with masked responses, which leave every sum but not the divisors."""
    groups = made_groups()
    for masked in (False, True):
        settings = {"loss": loss, "mask_truncated": masked}
        expected = gradient_of(random_policy, groups, micro_batch_groups=6, **settings)
        for order, size in (((5, 3, 1, 0, 2, 4), 1), ((4, 5, 0, 1, 2, 3), 4),
                            ((1, 0, 2, 4, 3, 5), 2)):
            found = gradient_of(random_policy, [groups[i] for i in order],
                                micro_batch_groups=size, **settings)
            assert_gradients_agree(found, expected, 1e-5)


def micro_batches(trainer, groups):
    """The micro-batches of a period, untrained."""
    batches, size = [], trainer.config.micro_batch_groups
    trainer._forward_backward = batches.append
    for first in range(0, len(groups), size):
        trainer._train(groups[first:first + size])
    del trainer._forward_backward
    return batches


def with_like_prompts(groups):
    """The second group has the first one's prompt, as where an epoch ends and the next begins; the
    third one's prompt is only as long."""
    prompt = groups[0].problem.prompt_ids
    likes = [dataclasses.replace(group, problem=dataclasses.replace(group.problem, prompt_ids=ids))
             for group, ids in zip(groups, (prompt, prompt, prompt[::-1]))]
    return [*likes, *groups[3:]]


@pytest.mark.parametrize("attention", ["shared", "repeat"])
def test_micro_batches_fill_the_token_limit(random_policy, attention):
    """--micro-batch-tokens, up to everything at once: no micro-batch of two responses or more
    exceeds it as attention computes it (C05), none ends before it must, and every response is in
    one, in its order, with its advantage. A prompt counts once where it is packed once."""
    groups = with_like_prompts(made_groups(3))
    trainer = made_trainer(random_policy, prompts=3, attention=attention, loss="dr_grpo")
    rows = [(number, g.problem.prompt_ids, r.ids) for number, g in enumerate(groups)
            for r in g.responses]
    advantages = [reward - 0.5 if min(g.rewards) == 0 else 0.0 for g in groups
                  for r, reward in zip(g.responses, g.rewards) for _ in r.ids]

    @functools.cache
    def tokens(first, last):
        """What `pack` says of these rows, the prompt of each group once."""
        of_group = itertools.groupby(rows[first:last], lambda row: row[0])
        prompts, responses = zip(*[(part[0][1], [ids for *_, ids in part])
                                   for part in (list(part) for _, part in of_group)])
        return pack(prompts, responses, share=attention == "shared",
                    multiple=8).cost()["tokens_computed"]
    for size, limit in itertools.product((1, 2, 3), range(1, tokens(0, len(rows)) + 1, 3)):
        trainer.config = dataclasses.replace(trainer.config, micro_batch_groups=size,
                                             micro_batch_tokens=limit)
        batches = micro_batches(trainer, groups)
        assert torch.cat([b.packed.targets for b in batches]).tolist() == [
            token for *_, ids in rows for token in ids]
        assert torch.cat([b.advantages for b in batches]).tolist() == advantages
        last = 0
        for batch in batches:
            first, last = last, last + len(batch.packed.lengths)
            length = tokens(first, last)
            assert length == batch.packed.cost()["tokens_computed"]
            assert length <= limit or last - first == 1
            if last % (4 * size) and last < len(rows):  # else its groups end here
                assert tokens(first, last + 1) > limit


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["shared", "repeat"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_split_changes_the_gradient(unclipped, loss, beta, attention):
    """A02: --micro-batch-groups and --micro-batch-tokens decide what is computed together, and
    nothing else: from one response a pass to all groups in one, every parameter has the same
    gradient, in the second inner step too, whose ratios are not 1."""
    groups = with_like_prompts(made_groups(4))
    expected, splits = None, set()
    for size, limit in ((4, 10**6), (1, 10**6), (2, 10**6), (3, 10**6), (4, 1), (4, 32), (4, 56),
                        (4, 72), (2, 48)):
        policy = attach(small_model(num_hidden_layers=1).train())
        changes = {"loss": loss, "beta": beta, "attention": attention, "micro_batch_groups": size,
                   "micro_batch_tokens": limit}
        splits.add(tuple(len(batch.packed.lengths) for batch in
                         micro_batches(made_trainer(policy, prompts=4, **changes), groups)))
        (_, first), (_, second), _, metrics = two_steps(policy, groups, **changes)
        expected = expected or (first, second)
        assert_gradients_agree(first, expected[0], 1e-5)
        assert_gradients_agree(second, expected[1], 1e-5)
    assert metrics["clip_low_share"] + metrics["clip_high_share"] > 0
    assert len(splits) >= 7


def textbook_gradient(now, before, reference, groups, settings):
    """A period's gradient as the papers write it: stock models, one response at a time."""
    policy, old = small_model(), small_model()
    policy.load_state_dict(now)
    old.load_state_dict(before)
    kept = [r for g in groups for r in g.responses if r.finished or not settings.mask_truncated]
    responses, loss = sum(len(g.responses) for g in groups), 0
    for group in groups:
        rewards = torch.tensor(group.rewards)
        advantages = rewards - rewards.mean()
        if settings.loss != "dr_grpo":
            advantages = advantages / (rewards.std() + 1e-4)
        for response, advantage in zip(group.responses, advantages):
            if response not in kept:
                continue
            one = [group.problem.prompt_ids], [[response.ids]]
            logprobs = separate_logprobs(policy, *one, settings.temperature)
            ratio = (logprobs - separate_logprobs(old, *one, settings.temperature).detach()).exp()
            tokens = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if settings.beta:
                d = separate_logprobs(reference, *one, settings.temperature).detach() - logprobs
                tokens = tokens + settings.beta * (d.exp() - d - 1)
            loss += {"grpo": tokens.mean() / responses,
                     "dr_grpo": tokens.sum() / settings.max_new_tokens / responses,
                     "dapo": tokens.sum() / sum(len(r.ids) for r in kept)}[settings.loss]
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("masked, beta", [
    (True, 0.1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (False, 0.0), (False, 0.1), (True, 0.0)))])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_period_is_the_textbooks(random_policy, unclipped, loss, beta, masked):
    """A02, A12, A27: with ragged groups, truncated responses and one group of equal rewards, both
    inner steps have the gradient of the formula: each token has its own response's advantage and
    divisor, rewards are scaled by the deviation but in dr_grpo, and the first pass is `old`."""
    changes = {"loss": loss, "beta": beta, "mask_truncated": masked, "temperature": 0.8}
    groups, settings = made_groups(4), config("", "", **changes).checked()
    first, second, reference, _ = two_steps(random_policy, groups, micro_batch_tokens=24, **changes)
    if reference:
        stock = small_model()
        stock.load_state_dict(reference.state_dict())
        reference = stock
    for now, found in (first, second):
        expected = textbook_gradient(now, first[0], reference, groups, settings)
        assert_gradients_agree(found, expected, 2e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_skipping_equal_rewards_is_exact(random_policy, unclipped, loss):
    """With beta 0 a group of equal rewards is not trained on, and still counts in every divisor:
    bit for bit where it would have been a micro-batch of its own."""
    for size in (1, 2):
        changes = {"loss": loss, "micro_batch_groups": size}
        skipped = gradient_of(random_policy, made_groups(), beta=0.0, **changes)
        trained = gradient_of(random_policy, made_groups(), beta=1e-30, **changes)
        assert_gradients_agree(skipped, trained, 1e-5 if size > 1 else 0)


@pytest.mark.parametrize("inner", [1, 2])
def test_equal_rewards_cost_no_forward_pass(random_policy, inner):
    """With beta 0 the policy runs for the groups that have a gradient, once an inner step, and a
    period of equal rewards runs nothing at all."""
    passes = []
    random_policy.model.register_forward_hook(lambda *_: passes.append(1))
    changes = {"prompts": 6, "micro_batch_groups": 1, "beta": 0.0, "inner_steps": inner}
    _, metrics = trained(made_trainer(random_policy, **changes), made_groups())
    assert (len(passes), metrics["skipped_groups"]) == (5 * inner, 1)
    equal = [dataclasses.replace(g, rewards=(0.35,) * 4) for g in made_groups()]
    _, metrics = trained(made_trainer(random_policy, **changes), equal)
    assert (len(passes), metrics["skipped_groups"]) == (5 * inner, 6)


def test_equal_rewards_carry_the_kl(random_policy, unclipped):
    """With beta such groups are trained: their gradient is the KL's, in proportion to beta."""
    equal = [dataclasses.replace(g, rewards=(0.35,) * 4) for g in made_groups()]
    one, two = (gradient_of(random_policy, equal, beta=beta) for beta in (0.1, 0.2))
    assert sum(g.norm() for g in one.values()) > 0.01
    assert_gradients_agree(one, {name: g / 2 for name, g in two.items()}, 1e-5)


def test_entropy_of_a_period(random_policy):
    """The mean over all response tokens, those of masked and of equally rewarded responses too, of
    the policy that sampled: the first pass, not a later inner step's."""
    stock, groups = small_model(), made_groups()
    right = [Categorical(logits=stock(torch.tensor([[*g.problem.prompt_ids, *r.ids]]))
                         .logits[0, len(g.problem.prompt_ids) - 1:-1] / 0.7).entropy()
             for g in groups for r in g.responses]
    for inner in (1, 2):
        policy = attach(small_model().train())
        trainer = made_trainer(policy, prompts=6, temperature=0.7, mask_truncated=True,
                               inner_steps=inner, learning_rate=0.1, micro_batch_tokens=30)
        _, metrics = trained(trainer, groups)
        assert metrics["entropy"] == pytest.approx(torch.cat(right).mean().item(), rel=1e-5)


def test_inner_steps_use_the_first_pass_as_old_policy(random_policy):
    """Inner steps 2..n compare with the first pass's log-probs: those of the old weights, which the
    inference copy still holds. Micro-batches run in the same order each time."""
    trainer = made_trainer(random_policy, inner_steps=3, prompts=6, learning_rate=1e-2,
                           micro_batch_tokens=30)
    trainer.models.old = frozen_copy(random_policy)
    seen = []
    backward = trainer._forward_backward

    def watched(batch):
        backward(batch)
        seen.append((batch, trainer.models.logprobs(batch.packed, forward_old=True)[:2]))
    trainer._forward_backward = watched
    steps, metrics = trained(trainer, made_groups())
    assert len(steps) == 3
    count = len(seen) // 3
    passes = [[id(batch) for batch, _ in seen[i:i + count]] for i in range(0, len(seen), count)]
    assert passes == [passes[0]] * 3 and len(set(passes[0])) == count > 3
    for batch, (_, old) in seen:
        assert (batch.old - old).abs().max() < 1e-5
    for batch, (new, _) in seen[count:]:
        assert (new - batch.old).abs().max() > 1e-3  # the policy had moved
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


def test_bad_periods(random_policy):
    """A23 as a run meets it: a period whose gradient is NaN moves no weight, takes no second inner
    step and leaves nothing in the next gradient; a good one between bad ones resets the count."""
    trainer = made_trainer(random_policy, prompts=6, inner_steps=2)
    for period, bad in enumerate((True, True, False, True, True, False, True, True, True)):
        groups = made_groups(version=period)
        if bad:
            groups[2] = dataclasses.replace(groups[2], rewards=(float("inf"), 0.0, 0.0, 0.0))
        before = [p.clone() for p in random_policy.parameters()]
        if period == 8:
            with pytest.raises(FloatingPointError, match="3 steps in a row"):
                trained(trainer, groups)
        else:
            steps, metrics = trained(trainer, groups)
            assert len(steps) == (0 if bad else 2)
            assert metrics["bad_steps"] == (period % 3 + 1 if bad else 0)
        moved = [not torch.equal(a, b) for a, b in zip(before, random_policy.parameters())]
        assert not any(moved) if bad else all(moved)
        assert all(p.isfinite().all() for p in random_policy.parameters())


@pytest.mark.parametrize("inner", [1, 2])
def test_learning_rate_warms_up_by_periods(random_policy, inner):
    """Linear over the first WARMUP_PERIODS periods, not steps, then constant: as the metric says,
    and as the weights move: AdamW's first step is the rate itself, wherever there is a gradient."""
    trainer = made_trainer(random_policy, prompts=6, inner_steps=inner, learning_rate=1e-3)
    used = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    right = [1e-3 * n / WARMUP_PERIODS for n in range(1, WARMUP_PERIODS + 1)] + [1e-3] * 2
    before = [p.detach().clone() for p in random_policy.parameters()]
    for period, rate in enumerate(right):
        _, metrics = trained(trainer, made_groups(version=period))
        assert metrics["learning_rate"] == pytest.approx(rate)
        assert used[-inner:] == pytest.approx([rate] * inner)
        if period == 0 and inner == 1:
            moved = max((a - b).abs().max() for a, b in zip(before, random_policy.parameters()))
            assert moved.item() == pytest.approx(rate, rel=1e-2)
    assert len(used) == inner * len(right)


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_gradient_is_clipped_once_a_step(random_policy, monkeypatch, loss):
    """By the global norm of the whole period's gradient, dapo's divisor in it: not a micro-batch at
    a time, nor a parameter, and a small one is not scaled up. The metric is the norm before."""
    monkeypatch.setattr(periodic_async, "CLIP_NORM", float("inf"))
    whole = gradient_of(random_policy, made_groups(), loss=loss)
    norm = float(torch.cat([g.flatten() for g in whole.values()]).norm())
    for limit in (norm / 100, norm / 2, norm * 10):
        monkeypatch.setattr(periodic_async, "CLIP_NORM", limit)
        trainer = made_trainer(random_policy, loss=loss, prompts=6, learning_rate=0)
        ((_, found),), metrics = trained(trainer, made_groups())
        scale = min(1.0, limit / norm)
        assert_gradients_agree(found, {name: g * scale for name, g in whole.items()}, 1e-4)
        assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)


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

    async def update(self, policy, version):
        self.version = version


class Recorder:
    """A trainer that only notes what it is given, and when."""
    models, version = TriModel.__new__(TriModel), 1
    models.policy = None

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


def test_cores_are_lent_while_the_other_side_is_idle(tmp_path):
    """Alone a side works on all cores, in the shared thread; beside the other on half of them, in
    its own: there it neither waits for the other side nor takes its cores."""
    timeline, shared = Timeline(tmp_path / "trace.json"), periodic_async.thread("shared")
    working = set()
    generate, train = (Worker(side, timeline, shared, working) for side in ("generate", "train"))
    release = threading.Event()

    def where():
        return threading.current_thread().name, torch.get_num_threads()

    async def both():
        alone = await generate.run("decode", where)
        training = asyncio.create_task(train.run("train", release.wait, 30))
        await asyncio.sleep(0)  # it has begun
        beside = await asyncio.wait_for(generate.run("decode", where), 10)
        release.set()
        await training
        return alone, beside, await generate.run("decode", where)
    alone, beside, after = asyncio.run(both())
    assert alone == after == ("shared_0", periodic_async.CORES)
    assert beside == ("generate_0", max(1, periodic_async.CORES // 2))


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
calls = 0
def raise_on_third(*_):
    global calls
    calls += 1
    if calls == 3:
        print("RAISED", time.time(), flush=True)
        raise RuntimeError("planted fault")
    return 1.0
def long_call(*_):
    a = torch.randn(1400, 1400)
    for _ in range(3):
        torch.linalg.svd(a)      # a few seconds inside one torch call
def generator_raises(self):
    raise_on_third(); raise_on_third(); raise_on_third()
real_train = pa.Trainer._train
def train_raises(self, groups):
    raise_on_third(); raise_on_third(); raise_on_third()
"""
PLANTS = {
    "reward": "pa.math_reward = raise_on_third",
    "reward while training": "pa.Trainer._train = long_call\n"
                             "def late(*_):\n    time.sleep(0.2)\n    return raise_on_third()\n"
                             "pa.math_reward = late",
    "generator": "model.InferenceCopy.launch = generator_raises",
    "trainer": "pa.Trainer._train = train_raises",
    "trainer while generating": "pa.Trainer._train = train_raises\n"
                                "real = model.InferenceCopy.decode\n"
                                "def slow(self):\n"
                                "    if calls: long_call()\n    return real(self)\n"
                                "model.InferenceCopy.decode = slow",
}


def flags(folder, out, *more):
    return ["--model", str(folder), "--out", str(out), "--prompts", "4", "--samples", "4", "--rows",
            "8", "--max-new-tokens", "6", "--micro-batch-groups", "1", *more]


@pytest.mark.parametrize("where", [
    where if where in ("reward", "generator") else pytest.param(where, marks=pytest.mark.slow)
    for where in PLANTS])
def test_an_error_ends_the_process(random_folder, tmp_path, child, where):
    """A06: the original error is printed and the process is gone within three seconds, also while
    the other side is inside a long torch call; exit code 1."""
    run = child(PLANT + PLANTS[where], config(random_folder, tmp_path / "out", periods=2,
                                              micro_batch_groups=1))
    code, _ = run.ended(60)
    ended, err = time.time(), run.text("err")
    assert code == 1
    assert "RuntimeError: planted fault" in err and "ExceptionGroup" not in err
    assert "never retrieved" not in err and "was destroyed" not in err
    assert ended - float(run.text("out").split("RAISED")[1].split()[0]) < 3


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
    odd = folder / "odd"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3}))
    shutil.copytree(random_folder, folder / "other")
    (folder / "other" / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    return folder


@pytest.mark.parametrize("wrong, says", [
    (["--nonsense", "1"], "--nonsense"), (["--periods", "many"], "--periods"),
    (["--schedule", "later"], "--schedule"), (["--samples", "1"], "--samples must be 2 or more"),
    (["--temperature", "0"], "--temperature"), (["--learning-rate", "nan"], "--learning-rate"),
    (["--data", "{bad}/none.jsonl"], "none.jsonl"), (["--data", "{bad}"], "{bad}"),
    (["--data", "{bad}/empty.jsonl"], "empty.jsonl holds no problems"),
    (["--data", "{bad}/broken.jsonl"], "broken.jsonl, line 2"),
    (["--data", "{bad}/binary.jsonl"], "binary.jsonl"),
    (["--data", "{bad}/three.jsonl"], "3 problems read, 3 kept, but --data with --prompts 4 needs"),
    (["--data", "{bad}/three.jsonl", "--prompts", "2", "--max-prompt-tokens", "2"],
     "3 problems read, 0 kept"),
    (["--model", "{bad}/nowhere"], "nowhere"), (["--model", "{bad}"], "{bad}"),
    (["--model", "/\udcff"], "no model /\\udcff"),  # a name that is no UTF-8
    (["--model", "{bad}/sliding"], "sliding_window=4096"),
    (["--model", "{bad}/odd"], "cannot load the model {bad}/odd: "),
    (["--model", "{bad}/other"], "cannot load the model {bad}/other: "),
    (["--seed", str(2**63)], "--seed must be below 2**63"),
    (["--rows", "1000000000"], "out of memory in the set-up: lower --rows"),
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
    at the rounding of bfloat16; and until it is trained its KL to the reference is exactly 0."""
    result = train(config(warm_folder, tmp_path, dtype="bfloat16", inner_steps=1))
    assert 0 < result["logp_gap_max"] < 0.2
    kl = [json.loads(line)["kl"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kl[0] == 0 and min(kl[1:]) > 0


# -------------------------------------------------------------- tokens of other weights: the guard

LOST = """
import itertools
copied, number = pa.copy_weights, itertools.count(1)
def lose_one(src, dst, version):
    if next(number) == 2:
        dst.version = version  # as where a request was answered, and nothing done
    else:
        copied(src, dst, version)
pa.copy_weights = lose_one
"""


def test_gap_limit_ends_a_run_whose_weights_were_not_copied(warm_folder, tmp_path, child):
    """A weight copy left out after period 1 has the right version: only the gap tells, before the
    step of period 2 and its checkpoint. One sentence, exit code 1."""
    settings = config(warm_folder, tmp_path / "out", save_every=1)
    code, err = child(LOST, settings).ended(60)
    assert code == 1 and len(err) == 1, err
    assert err[0].startswith("error: what was sampled is not from the weights being trained")
    assert "--gap-limit" in err[0] and "period-000002" in err[0]
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2
    off = dataclasses.replace(settings, gap_limit=0.0, out=str(tmp_path / "off"))
    assert child(LOST, off).ended(60)[0] == 0


def test_gap_limit_is_read_before_the_optimizer(random_policy):
    """Groups whose recorded log-probs are made up: the weights, the optimizer and the version stay;
    missing ones (NaN) leave the mean, and where all are missing there is nothing to read."""
    before = {name: p.clone() for name, p in random_policy.named_parameters()}
    trainer = made_trainer(random_policy, gap_limit=1e-3)
    with pytest.raises(periodic_async.GapError, match=r"--gap-limit is 0\.001"):
        trained(trainer, made_groups())
    assert trainer.version == 0 and not trainer.optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in random_policy.named_parameters())
    groups = made_groups()
    _, one = trained(made_trainer(random_policy, learning_rate=0.0), groups)
    missing = [dataclasses.replace(g, responses=tuple(
        dataclasses.replace(r, logprobs=(math.nan,) * len(r.ids)) for r in g.responses))
        for g in groups]
    _, none = trained(made_trainer(random_policy, learning_rate=0.0, gap_limit=1e-3), missing)
    _, half = trained(made_trainer(random_policy, learning_rate=0.0), [*groups, *missing])
    assert none["logp_gap_mean"] == none["logp_gap_max"] == 0
    assert half["logp_gap_mean"] == pytest.approx(one["logp_gap_mean"], rel=1e-5)
    assert half["logp_gap_max"] == one["logp_gap_max"] > 0


def test_gap_limit_default():
    """It depends on the dtype, unless given; 0 is given."""
    assert Config().checked().gap_limit == 1e-3
    assert Config(dtype="bfloat16").checked().gap_limit == 0.1
    assert Config(dtype="bfloat16", gap_limit=0.0).checked().gap_limit == 0


def test_importance_cap_reaches_the_loss(random_policy, unclipped):
    """With log-probs recorded log 2 below the trainer's every weight is 2, and so is the gradient;
    a cap of 1.5 cuts off all of them, and the metric says so."""
    def recorded(apart):
        found = []
        for group in made_groups(5):
            prompt, responses = [group.problem.prompt_ids], [[r.ids for r in group.responses]]
            with torch.no_grad():
                values = iter(separate_logprobs(small_model(), prompt, responses).tolist())
            found.append(dataclasses.replace(group, responses=tuple(
                dataclasses.replace(r, logprobs=tuple(next(values) - apart for _ in r.ids))
                for r in group.responses)))
        return found
    groups = recorded(math.log(2))
    plain = gradient_of(random_policy, groups, beta=0.0)
    for cap, factor in ((3.0, 2.0), (1.5, 1.5)):
        found = gradient_of(random_policy, groups, beta=0.0, importance_cap=cap)
        assert_gradients_agree({name: g / factor for name, g in found.items()}, plain, 1e-4)
        _, metrics = trained(made_trainer(random_policy, learning_rate=0, importance_cap=cap,
                                          beta=0.0), groups)
        assert metrics["importance_capped_share"] == (cap < 2)
    with pytest.raises(ValueError, match="--importance-cap"):
        Config(importance_cap=0.5).checked()


# ---------------------------------------------------------------------------- the parts of a run

def made_run(folder, out, **changes):
    return set_up(config(folder, out, **changes).checked(), out, periodic_async.thread("shared"))


def test_an_untrained_run_has_three_equal_models(random_folder, tmp_path):
    """A27 in bfloat16: as `set_up` makes them, reference and inference copy score a packed row as
    the policy does under autocast, bit for bit; after a period and a weight copy, the copy does."""
    (tmp_path / "reward.py").write_text("def reward(r, _):\n    return sum(map(ord, r)) % 2\n")
    run = made_run(random_folder, tmp_path, dtype="bfloat16", periods=1, learning_rate=1e-2,
                   reward=f"{tmp_path}/reward.py:reward")
    run.trainer.models.old = run.generator.copies[0].model
    packed = pack([range(5, 13), [7]], [[[1, 2, 3], [4]], [[5, 6]]], multiple=8)
    new, old, reference = run.trainer.models.logprobs(packed, forward_old=True)
    assert torch.equal(new, old) and torch.equal(new, reference)
    asyncio.run(run_periods(run))
    new, old, still = run.trainer.models.logprobs(packed, forward_old=True)
    assert torch.equal(new, old) and torch.equal(still, reference)
    assert (new - reference).abs().max() > 1e-3


class Casts(TorchDispatchMode):
    """Counts the casts of some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.of, self.count = {x.data_ptr() for x in tensors}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.of
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", [
    "async", pytest.param("sync", marks=pytest.mark.slow)])
def test_weights_are_cast_once_a_step(random_folder, tmp_path, monkeypatch, schedule):
    """C06: with bfloat16 a micro-batch in flight held a copy of the weights. They do not move
    within a step, so one serves all its passes, in whichever thread, while generation leaves
    autocast again and again; after a step it is made anew. Weights are those of a cast a pass."""
    results = {}
    for once in (True, False):
        run = made_run(random_folder, tmp_path, dtype="bfloat16", periods=3, prompts=6,
                       micro_batch_groups=1, inner_steps=2, learning_rate=1e-2, schedule=schedule)
        weights = [m.weight for m in run.trainer.models.policy.model.modules()
                   if isinstance(m, torch.nn.Linear)]
        counts, plain = [], {name: getattr(Trainer, name) for name in ("_train", "_end_period")}

        def watched(name, *args, counts=counts, plain=plain, weights=weights, once=once):
            if not once:
                torch.clear_autocast_cache()
            with Casts(weights) as casts:
                result = plain[name](*args)
            counts.append(casts.count)
            return result
        for name in plain:
            monkeypatch.setattr(run.trainer, name, functools.partial(watched, name, run.trainer))
        asyncio.run(run_periods(run))
        results[once] = hashes(summary(run))
        if once:
            assert sum(counts) == 3 * 2 * len(weights)  # periods, inner steps
        else:
            assert sum(counts) == 3 * (6 + 1) * len(weights)
    assert results[True] == results[False]


@pytest.mark.parametrize(("beta", "copies"), [(0.0, 1), (0.01, 2)])
def test_no_reference_without_beta(random_folder, tmp_path, monkeypatch, beta, copies):
    """With beta 0 no third set of weights is made: the only copy is the generator's."""
    made = []
    monkeypatch.setattr(periodic_async, "frozen_copy",
                        lambda *args: made.append(frozen_copy(*args)) or made[-1])
    run = made_run(random_folder, tmp_path, beta=beta)
    models = run.trainer.models
    assert run.generator.copies[0].model is made[-1] and len(made) == copies
    assert (models.reference is None) == (beta == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recompute_changes_no_bit(warm_folder, tmp_path, dtype):
    """--recompute: what is in the policy's layers runs twice a pass, under autocast both times, and
    its last norm once; inference copy and reference run once. Rollouts, gradients and weights
    stay."""
    results = {}
    for recompute in (False, True):
        run = made_run(warm_folder, tmp_path, recompute=recompute, dtype=dtype, periods=2,
                       inner_steps=2)
        calls, models = [], run.trainer.models
        for model in (models.policy, models.reference, run.generator.copies[0].model):
            for part in (*(layer.self_attn for layer in model.model.layers), model.model.norm):
                part.register_forward_pre_hook(lambda part, *_: calls.append(part))
        history = asyncio.run(run_periods(run))
        for model in (models.policy, models.reference, run.generator.copies[0].model):
            passes = calls.count(model.model.norm)
            layers = [calls.count(layer.self_attn) for layer in model.model.layers]
            assert passes > 3
            assert layers == [passes * (2 if recompute and model is models.policy else 1)] * 2
        results[recompute] = (*hashes(summary(run)), passes,
                              [(h["gradient_norm"], h["loss"], h["entropy"]) for h in history])
    assert results[False] == results[True]


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
