"""The simulation of a period (`bench_schedule.simulate`) against periods worked out by hand."""
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import small_model

from attention import attach
from model import InferenceCopy, frozen_copy
from periodic_async import Generator

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from bench_schedule import Period, fix_lengths, generation, simulate


def made(groups=4, samples=2, length=5, **changes):
    """4 groups of 2 responses of 5 tokens, one group in flight; a step takes 1 s, a token of a
    micro-batch 0.1 s forward and 0.2 s backward."""
    given = {"prompts": [0] * groups, "lengths": [[length] * samples] * groups,
             "decode": lambda rows, places: 1.0, "prefill": lambda tokens: 0.0,
             "forward": 0.1, "backward": 0.2, "rows": samples}
    return Period(**given | changes)


def drawn(seed, **changes):
    """12 groups of 3 responses of 1 to 39 tokens."""
    rng = np.random.default_rng(seed)
    return made(**{"prompts": rng.integers(1, 9, 12).tolist(), "rows": 8, "micro_batch_groups": 2,
                   "lengths": rng.integers(1, 40, (12, 3)).tolist(),
                   "prefill": lambda tokens: 0.3 * tokens} | changes)


def test_one_stage_by_hand():
    """The first token comes with the prefill, so a group takes 4 s of decoding and then 10 tokens x
    0.3 s of training. sync: 16 + 12 s; async: 16 s and the last group's 3."""
    sync, overlapped = simulate(made(), "sync"), simulate(made(), "async")
    assert (sync.seconds, overlapped.seconds) == pytest.approx((28, 19))
    assert (overlapped.started, overlapped.tail) == pytest.approx((4, 3))
    assert (overlapped.generate_busy, overlapped.train_busy) == pytest.approx((16 / 19, 12 / 19))
    assert overlapped.bound == sync.bound == pytest.approx(28 / 16)


def test_slower_beside_each_other():
    """Half the speed while both work: the first group is there after 4 s and trains for 6 s, beside
    3 s of the second one's steps; its last step and its training are alone."""
    slow = simulate(made(2, generate_slower=2.0, train_slower=2.0), "async")
    assert slow.seconds == pytest.approx(4 + 6 + 1 + 3)
    assert simulate(made(2, generate_slower=2.0), "sync").seconds == pytest.approx(14)


@pytest.mark.parametrize("batches", [1, 16])
def test_pipeline_is_1f1b(batches):
    """F = 1 and B = 2 on each of 4 stages, all there at once: (M + S - 1)(F + B), which for 16
    micro-batches is 84 % busy. A pass launched too late, or one that waits too long, adds to it."""
    period = made(batches, 1, 1, stages=[0.25] * 4, forward=4.0, backward=8.0)
    for schedule in ("sync", "async"):
        outcome = simulate(period, schedule)
        assert outcome.seconds == pytest.approx(3 * (batches + 3))
        assert outcome.train_busy == pytest.approx(batches / (batches + 3))


def test_too_many_tokens_are_split_between_responses():
    """3 responses of 4 tokens to a prompt of 2, filled up to 8 each, at most 24: two, then one with
    its prompt again."""
    period = made(1, 3, 4, prompts=[2], micro_batch_tokens=24, decode=lambda rows, places: 0.0)
    assert simulate(period, "async").seconds == pytest.approx(0.3 * (10 + 6))


@pytest.mark.parametrize("seed", range(8))
def test_sums_and_order(seed):
    """sync is the sum of its parts, async never above it and never below the busier side; every
    token but the first of a response, which the prefill samples, is decoded exactly once."""
    period = drawn(seed, stages=[0.5, 0.3, 0.2], copies=1 + seed % 3, copy=2.0, step=1.0,
                   decode=lambda rows, places: rows)
    sync, overlapped = simulate(period, "sync"), simulate(period, "async")
    assert sync.seconds == pytest.approx(sync.generate_alone + sync.train_alone + 2 + 1)
    assert max(sync.generate_alone, sync.train_alone) + 3 - 1e-6 < overlapped.seconds
    assert overlapped.seconds < sync.seconds + 1e-6
    steps = list(generation(drawn(seed, decode=lambda rows, places: rows, copies=1 + seed % 3,
                                  prefill=lambda tokens: 0.0)))
    decoded = sum(seconds * share * period.copies for seconds, share, _ in steps)
    assert decoded == pytest.approx(sum(n - 1 for lengths in period.lengths for n in lengths))
    assert sorted(prompt for *_, complete in steps for prompt in complete) == list(range(12))


@pytest.mark.parametrize("number", [1, 2])
def test_steps_are_those_of_inference_copies(number):
    """Real copies take as many prefills and decode steps until each group is complete."""
    period = drawn(number, copies=number, prefill=lambda tokens: 1.0)
    model, now, simulated, real = frozen_copy(attach(small_model())), 0, {}, {}
    copies = [InferenceCopy(model, [], rows=8, longest_prompt=8, max_new_tokens=39)
              for _ in range(number)]
    coming = {copy: fix_lengths(copy) for copy in copies}
    for prompt, lengths in enumerate(period.lengths):
        copy = min(copies, key=lambda copy: copy.tokens_waiting)
        coming[copy].append(lengths)
        copy.submit(prompt, [1] * period.prompts[prompt], np.zeros((3, 39), np.float32))
    while busy := [copy for copy in copies if not copy.idle]:
        now += 1
        real |= {prompt: now for prompt, *_ in Generator(copies, None, 0)._advance(busy)}
    now = 0
    for seconds, _, complete in generation(period):
        now += seconds
        simulated |= dict.fromkeys(complete, now)
    assert simulated == real
