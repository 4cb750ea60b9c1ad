"""Tests of grpo.py: problems, advantages, loss. A01.., C01.. are the faults they pin."""
import asyncio
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import model
from grpo import (
    LOSSES,
    Group,
    Problem,
    Response,
    draw_problems,
    encode_prompt,
    group_advantages,
    grpo_loss,
    read_problems,
    token_weights,
)
from model import arithmetic
from periodic_async import Generator

MAX_LENGTH = 8  # the constant length of dr_grpo in these tests

# ---------------------------------------------------------------------------------- problems


def test_arithmetic_is_right_and_seeded():
    """A21: question i is a function of the seed and i alone, and its answer is the sum."""
    stream = [arithmetic(3, i) for i in range(100)]
    for question, answer in stream:
        left, right = question.removesuffix("=").split("+")
        assert int(left) + int(right) == int(answer)
    assert [arithmetic(3, i) for i in reversed(range(100))] == stream[::-1]
    assert [arithmetic(4, i) for i in range(100)] != stream
    assert len(set(stream)) > 40  # of 100 possible questions


def write(folder, content):
    path = folder / "problems.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_bom_crlf_and_blank_lines(tmp_path):
    """A26: a file that Windows wrote holds two clean records."""
    one, two = b'{"question": "a", "answer": "1"}', b'{"question": "b", "answer": "2"}'
    path = write(tmp_path, b"\xef\xbb\xbf" + one + b"\r\n\r\n" + two + b"\r\n\r\n\r\n  ")
    assert read_problems(path) == [("a", "1"), ("b", "2")]
    assert read_problems(str(write(tmp_path, one + b"\n" + two))) == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize("text", ['{"problem": "q", "answer": 0.00005}',
                                  '[{"problem": "q", "answer": 0.00005}]'])
def test_a_number_stays_as_it_is_written(tmp_path, text):
    """As a float it would become 5e-05, which no response spells so."""
    assert read_problems(write(tmp_path, text)) == [("q", "0.00005")]


@pytest.mark.parametrize("record, row", [
    ({"question": "q", "answer": "so 40+2=<<40+2=42>>42\n#### 42"}, ("q", "42")),
    ({"question": "q", "answer": "#### 1\n#### 1,234 "}, ("q", "1,234")),
    ({"problem": "q", "answer": "025", "solution": "s"}, ("q", "025")),
    ({"prompt": "q", "answer": r"\frac{1}{2}"}, ("q", r"\frac{1}{2}")),
    ({"problem": "q", "answer": 42}, ("q", "42")), ({"question": None, "problem": "q",
                                                     "answer": 42}, ("q", "42")),
    ({"problem": "q", "answer": 0}, ("q", "0")),
    ({"problem": "q", "answer": 2.5}, ("q", "2.5")),
    ({"question": "\U0001f600", "answer": "7"}, ("\U0001f600", "7")),
    ({"question": "one\u2028two\u0085three", "answer": "7"}, ("one\u2028two\u0085three", "7")),
])
def test_shapes_of_records(tmp_path, record, row):
    """A26: GSM8K, DeepScaleR and AIME records, alone and in an array; U+2028 ends no line."""
    text = json.dumps(record, ensure_ascii=False)
    assert read_problems(write(tmp_path, text)) == [row]
    assert read_problems(write(tmp_path, f"{text}\n{text}\n")) == [row, row]
    assert read_problems(write(tmp_path, f"\n [{text},\n{text}]\n")) == [row, row]


GOOD = '{"question": "q", "answer": "1"}'


@pytest.mark.parametrize("text, where", [
    (f"{GOOD}\n\n{{broken\n", "line 3"),
    (f'{GOOD}\n"a string"\n', "line 2"),
    (f"{GOOD}\n[1, 2]\n", "line 2"),
    (f"{GOOD}\nnull\n", "line 2"),
    (f'{GOOD}\n{{"question": "q"}}', "line 2.*answer"),
    (f'{GOOD}\n{{"question": "q", "answer": null}}', "line 2.*answer"),
    (f'{GOOD}\n{{"question": "q", "answer": true}}', "line 2.*answer"),
    (f'{GOOD}\n{{"question": "q", "answer": " "}}', "line 2.*answer"),
    (f'{GOOD}\n{{"question": "q", "answer": "reasoning ####"}}', "line 2.*answer"),
    (f'{GOOD}\n{{"text": "q", "answer": "1"}}', "line 2.*question"),
    (f'{GOOD}\n{{"question": "", "answer": "1"}}', "line 2.*question"),
    *[(f'{GOOD}\n{{"question": "q", "answer": {number}}}', "line 2.*answer")
      for number in ("Infinity", "-Infinity", "NaN", "1e999")],
    (f'{GOOD}\n{{"question": "a\\ud83d", "answer": "1"}}', "line 2.*question.*surrogate"),
    (f'[{GOOD}, {{"question": "q", "answer": "\\ude00"}}]', "entry 2.*answer.*surrogate"),
    (f"{GOOD}\n{'[' * 100_000}", "line 2.*recursion"), ("[" * 100_000, "recursion"),
    (f"[{GOOD}, 7]", "entry 2"),
    (f'[{GOOD}, {{"question": "q"}}]', "entry 2.*answer"),
    (f"[{GOOD}", "JSON"),
    (GOOD.encode() + b'\n{"question": "caf\xe9", "answer": "1"}', ""),  # Latin-1, not UTF-8
    ("", "no problems"),
    ("\n \r\n", "no problems"),
    ("[]", "no problems"),
])
def test_errors_name_the_file_and_the_line(tmp_path, text, where):
    """A26, A18, C21: a bad line or an empty file is an error that says where; so are numbers and
    text that no other program reads, and brackets deeper than Python's stack."""
    with pytest.raises(ValueError, match=rf"problems\.jsonl.*{where}"):
        read_problems(write(tmp_path, text))


def test_missing_file(tmp_path):
    """A18: a wrong path is an OSError."""
    with pytest.raises(OSError):
        read_problems(tmp_path / "nothing.jsonl")


BOS = 0
TEMPLATE = ("{% for m in messages %}u{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}a{% endif %}")
BOS_TEMPLATE = "{{ bos_token }}" + TEMPLATE


def character_tokenizer(has_bos, adds_bos, template):
    vocabulary = {token: i for i, token in enumerate(["<s>", "?", *"abcdu"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?", chat_template=template,
                                   bos_token="<s>" if has_bos else None)


@pytest.mark.parametrize("has_bos, adds_bos, template, expected", [
    (True, True, BOS_TEMPLATE, "<s>ubca"),   # both write one
    (True, True, TEMPLATE, "<s>ubca"),       # the tokenizer alone
    (True, False, BOS_TEMPLATE, "<s>ubca"),  # the template alone
    (True, False, TEMPLATE, "ubca"),         # neither
    (False, False, TEMPLATE, "ubca"),        # there is no BOS
    (True, True, None, "<s>bc"),             # there is no template
    (True, False, None, "bc"),
    (False, False, None, "bc"),
])
def test_exactly_one_bos(has_bos, adds_bos, template, expected):
    """A25 (b), (c): one BOS, whoever writes it, and a tuple of plain ints, not a BatchEncoding."""
    tokenizer = character_tokenizer(has_bos, adds_bos, template)
    assert (tokenizer("bc").input_ids[0] == BOS) is adds_bos  # the tokenizer is the one we mean
    ids = encode_prompt(tokenizer, "bc")
    assert "".join(tokenizer.convert_ids_to_tokens(list(ids))) == expected
    assert type(ids) is tuple and {type(i) for i in ids} == {int}


ROWS = [Problem((i, i + 1), str(i), key=i) for i in range(6)]


@pytest.mark.parametrize("start, count", [(0, 6), (6, 6), (0, 60), (4, 5), (17, 1), (5, 30)])
def test_drawing_in_pieces_is_drawing_at_once(start, count):
    """A21: the stream is a function of the seed and the position, so a resumed run continues it."""
    whole = draw_problems(ROWS, 7, 0, 100)
    assert draw_problems(ROWS, 7, start, count) == whole[start:start + count]
    head, tail = draw_problems(ROWS, 7, 0, start), draw_problems(ROWS, 7, start, count)
    assert head + tail == whole[:start + count]


def test_epochs_stand_end_to_end():
    """A07, A21: every row once an epoch, none dropped at the boundary, a new order each time."""
    stream = draw_problems(ROWS, 7, 0, 60)
    epochs = [stream[i:i + 6] for i in range(0, 60, 6)]
    for epoch in epochs:
        assert sorted(p.answer for p in epoch) == [row.answer for row in ROWS]
    assert len({tuple(p.answer for p in epoch) for epoch in epochs}) > 5
    assert stream != draw_problems(ROWS, 8, 0, 60)


def test_keys_are_unique_and_name_the_row():
    """A21: no two prompts of a run share a key; the rest of key / size is the row."""
    stream = draw_problems(ROWS, 7, 0, 60)
    assert len({p.key for p in stream}) == 60
    assert [p.prompt_ids for p in stream] == [ROWS[p.key % 6].prompt_ids for p in stream]


def test_one_row_is_a_data_set():
    """A07: one prompt with four a period does not hang; the prompt repeats, its key does not."""
    drawn = draw_problems(ROWS[:1], 0, 0, 4)
    assert [p.answer for p in drawn] == ["0"] * 4 and len({p.key for p in drawn}) == 4


def test_no_two_streams_of_random_numbers_coincide(monkeypatch):
    """C10: the epochs of the data, sampling, the built-in sums and the built-in model, with equal
    seed, period, epoch, index and problem: no two streams ever give the same numbers. They differ
    in the key or in words 1 to 3 of the counter; word 0 is what a stream counts up."""
    philox, made = np.random.Philox, []

    def recorded(key, counter=(0, 0, 0, 0)):
        made.append((source, *(int(k) for k in np.atleast_1d(key)), *(0,) * (2 - np.size(key)),
                     *counter))
        return philox(key=key, counter=counter)
    monkeypatch.setattr(np.random, "Philox", recorded)
    monkeypatch.setattr(model, "TINY_STEPS", 0)
    for seed in (0, 1, 2):
        source = "epochs"
        draw_problems(ROWS[:2], seed, 0, 5)
        source = "sums"
        for index in range(3):
            arithmetic(seed, index)
        source = "built-in model"
        model._tiny(seed)
        source = "sampling"
        for version, problem in itertools.product(range(3), ROWS[:3]):
            copy = SimpleNamespace(
                tokens_waiting=0, max_new_tokens=4, version=version, temperature=1.0, idle=True,
                submit=lambda future, ids, uniforms: future.set_result([]))
            asyncio.run(Generator([copy], None, seed).generate(problem, 2))
    assert len({stream[0] for stream in made}) == 4 and len(made) == 3 * (3 + 3 + 1 + 9 * 2)
    assert len({(*stream[1:3], *stream[4:]) for stream in made}) == len(made)
    numbers = [philox(key=stream[1:3], counter=stream[3:]).random_raw(50).tolist()
               for stream in made]
    assert len({*itertools.chain(*numbers)}) == 50 * len(made)


# ------------------------------------------------------------------------------- advantages

def test_groups_in_any_order():
    """A03: groups may end in any order; an advantage depends on its own group alone."""
    responses = (Response((1,), (-0.5,), True), Response((2,), (-0.5,), True))
    one = Group(Problem((1,), "1", key=0), responses, rewards=(1.0, 0.0), version=0)
    two = Group(Problem((2,), "2", key=1), responses, rewards=(1.0, 1.0), version=0)
    for arrived in ([one, two], [two, one]):
        result = {g.problem.key: group_advantages(g.rewards, scale=False).tolist() for g in arrived}
        assert result == {0: [0.5, -0.5], 1: [0.0, 0.0]}
    assert group_advantages([1.0]).tolist() == [0.0]  # one response missing: nothing to compare


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("rewards", [[0.35] * 8, [0.1] * 7, [0.0] * 4, [1.0] * 4, [-1e6] * 3])
def test_equal_rewards(rewards, scale):
    """A16: equal rewards give exact zeros; a standard deviation of 3e-8 would not."""
    assert group_advantages(rewards, scale=scale).tolist() == [0.0] * len(rewards)


def test_sample_deviation_and_epsilon():
    """Advantages of 1, 0, 0, 0 by hand: mean 1/4, variance (9 + 1 + 1 + 1) / 16 / (4 - 1) = 1/4."""
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(group_advantages([1, 0, 0, 0]), expected / (0.5 + 1e-4))
    torch.testing.assert_close(group_advantages([1, 0, 0, 0], epsilon=0.5), expected)
    torch.testing.assert_close(group_advantages([1, 0, 0, 0], scale=False), expected)
    assert group_advantages([1, 0]).dtype == torch.float32


# ------------------------------------------------------------------------------------- loss

def flat(lists):
    return torch.tensor([value for values in lists for value in values], dtype=torch.float64)


def loss_by_hand(logprobs, old, reference, advantages, keep, kind, low, high, beta, sampled=None,
                 cap=math.inf):
    """Loss, gradient of each token, and metrics of a period, one token after the other."""
    loss, gradient = 0.0, []
    sums = {"clip_low_tokens": 0, "clip_high_tokens": 0, "kept_tokens": 0, "kl_sum": 0.0}
    if sampled:
        sums["importance_capped_tokens"] = 0
    for i, advantage in enumerate(advantages):
        for new, before, fixed, at in zip(logprobs[i], old[i], reference[i], (sampled or old)[i]):
            if not keep[i]:
                gradient.append(0.0)
                continue
            ratio = math.exp(new - before)
            too_low = advantage < 0 and ratio < 1 - low
            too_high = advantage > 0 and ratio > 1 + high
            used = 1 - low if too_low else 1 + high if too_high else ratio
            slope = 0.0 if too_low or too_high else -ratio * advantage
            k3 = math.exp(fixed - new) - (fixed - new) - 1
            weight = {"grpo": 1 / len(logprobs[i]) / len(logprobs),
                      "dr_grpo": 1 / MAX_LENGTH / len(logprobs), "dapo": 1}[kind]
            importance = 1.0 if math.isnan(at) else math.exp(before - at)
            if importance > cap:
                importance = cap
                sums["importance_capped_tokens"] += 1
            loss += weight * (-used * advantage * importance + beta * k3)
            gradient.append(weight * (slope * importance + beta * (1 - math.exp(fixed - new))))
            sums["clip_low_tokens"] += too_low
            sums["clip_high_tokens"] += too_high
            sums["kept_tokens"] += 1
            sums["kl_sum"] += k3
    return loss, gradient, sums


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("low, high, beta, cap", [
    (0.2, 0.2, 0.0, 0.0), (0.2, 0.28, 0.04, 0.0), (0.1, 0.5, 1.0, 0.0),
    (0.2, 0.28, 0.04, 1.2), (0.1, 0.5, 1.0, 1.0)])
def test_loss_is_the_plain_loop(kind, low, high, beta, cap):
    """A02: value, gradient and metrics of the vectorised loss equal those of a loop over tokens;
    also where log-probs of another engine weigh them, some of which are missing."""
    generator = torch.Generator().manual_seed(0)
    lengths, keep = [1, 5, 2, 7, 3, 8], [True, True, True, False, True, True]
    advantages = [1.5, -0.5, 0.0, 1.0, 0.7, -1.2]
    old = [(-2 * torch.rand(n, generator=generator)).tolist() for n in lengths]
    new, reference = ([[x + 0.5 * torch.randn(1, generator=generator).item() for x in values]
                       for values in old] for _ in range(2))
    sampled = [[x + 0.6 * torch.randn(1, generator=generator).item() if j % 4 else math.nan
                for j, x in enumerate(values)] for values in old] if cap else None
    loss, gradient, sums = loss_by_hand(new, old, reference, advantages, keep, kind,
                                        low, high, beta, sampled, cap or math.inf)
    assert not cap or 1 < sums["importance_capped_tokens"] < sums["kept_tokens"] - 1
    assert sums["clip_low_tokens"] > 0 and sums["clip_high_tokens"] > 0  # both sides are at work

    response_of = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    weights = token_weights(torch.tensor(lengths), torch.tensor(keep), kind, 6, MAX_LENGTH)
    logprobs = flat(new).requires_grad_()
    result, metrics = grpo_loss(logprobs, flat(old), flat(reference),
                                torch.tensor(advantages)[response_of], weights[response_of],
                                clip_low=low, clip_high=high, beta=beta,
                                sampled=flat(sampled) if cap else None, importance_cap=cap)
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert {name: metrics[name].item() for name in sums} == pytest.approx(sums, rel=1e-5)
    assert metrics["loss"].item() == result.item() and not metrics["loss"].requires_grad


@pytest.mark.parametrize("ratio, advantage, loss, slope", [
    (1.5, 1.0, -1.2, 0.0),    # a good token that is already much likelier: clipped
    (0.5, 1.0, -0.5, -0.5),
    (1.5, -1.0, 1.5, 1.5),
    (0.5, -1.0, 0.9, 0.0),    # a bad token that is already much rarer: clipped
    (1.1, 1.0, -1.1, -1.1),
    (0.95, -1.0, 0.95, 0.95),
])
def test_clip(ratio, advantage, loss, slope):
    """The clip stops a token only in the direction in which its advantage pushes."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    value, _ = grpo_loss(logprobs, torch.zeros(1), None, torch.tensor([advantage]), torch.ones(1),
                         clip_low=0.1, clip_high=0.2)
    value.backward()
    assert (value.item(), logprobs.grad.item()) == pytest.approx((loss, slope), abs=1e-6)


def test_first_pass():
    """A27: with `old` = detached log-probs no token is clipped, and the gradient is not 0."""
    logprobs = -5 * torch.rand(20, generator=torch.Generator().manual_seed(0))
    logprobs.requires_grad_()
    advantages = torch.tensor([1.0, -1.0] * 10)
    loss, sums = grpo_loss(logprobs, logprobs.detach(), None, advantages, torch.full((20,), 0.05))
    loss.backward()
    assert loss.item() == 0.0  # minus the mean advantage: the ratios are exactly 1
    assert sums["clip_low_tokens"] == sums["clip_high_tokens"] == 0
    assert logprobs.grad.tolist() == pytest.approx((-0.05 * advantages).tolist())


def test_importance_is_exactly_1_where_log_probs_are_equal_or_missing():
    """Loss and gradient keep their bits there; and no gradient flows through the weight."""
    found = []
    for sampled, cap in ((None, 0.0), *itertools.product(("old", "missing"), (1.0, 3.0))):
        logprobs = -5 * torch.rand(40, generator=torch.Generator().manual_seed(1))
        advantages = torch.linspace(-1, 1, 40)
        logprobs.requires_grad_()
        at = {"old": logprobs.detach(), "missing": torch.full((40,), math.nan)}.get(sampled)
        # `old` is not detached: the weight must not hand a gradient on.
        loss, sums = grpo_loss(logprobs, logprobs, None, advantages, torch.full((40,), 0.1),
                               sampled=at, importance_cap=cap)
        loss.backward()
        assert not logprobs.grad.any() and sums.get("importance_capped_tokens", 0) == 0
        found.append(loss.item())
    assert len(set(found)) == 1


@pytest.mark.parametrize("apart, weight", [(0.5, math.exp(0.5)), (-0.5, math.exp(-0.5)), (0.8, 2.0),
                                           (math.inf, 2.0), (-math.inf, 0.0), (100.0, 2.0)])
def test_importance_multiplies_the_surrogate_alone(apart, weight):
    """Capped above, not below, finite however far; the KL and its gradient are not multiplied."""
    old, reference = torch.tensor([-1.0]), torch.tensor([-1.3])
    for beta in (0.0, 0.7):
        value = slope = 0.0
        for advantage, sampled in ((2.0, old - apart), (0.0, old)):  # with and without a surrogate
            logprobs = torch.tensor([-1.0], requires_grad=True)
            loss, _ = grpo_loss(logprobs, old, reference, torch.tensor([advantage]), torch.ones(1),
                                beta=beta, sampled=sampled, importance_cap=2.0)
            loss.backward()
            sign = 1 if advantage else -1
            value, slope = value + sign * loss.item(), slope + sign * logprobs.grad.item()
        assert (value, slope) == pytest.approx((-2 * weight, -2 * weight), abs=1e-5)


def test_k3():
    """The KL estimate: by hand for p = 1/2 and a reference of 1/4, and never negative."""
    half, quarter = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    loss, sums = grpo_loss(half, half, quarter, torch.zeros(1), torch.ones(1), beta=10.0)
    assert sums["kl_sum"].item() == pytest.approx(0.5 + math.log(2) - 1, abs=1e-6)
    assert loss.item() == pytest.approx(10 * (0.5 + math.log(2) - 1), abs=1e-5)
    for d in (-20.0, -1.0, -0.1, 0.0, 0.1, 1.0, 5.0):
        _, sums = grpo_loss(torch.zeros(1), torch.zeros(1), torch.tensor([d]), torch.zeros(1),
                            torch.ones(1), beta=1.0)
        assert (sums["kl_sum"] > 0) if d else (sums["kl_sum"] == 0)


@pytest.mark.parametrize("d, expected", [(1e-6, 5.0e-13), (-1e-6, 5.0e-13), (3e-4, 4.5e-8),
                                         (0.1, 0.0051709), (100.0, math.exp(20) - 21),
                                         (-100.0, 19.0)])
def test_k3_near_and_far(d, expected):
    """C09: in float32 exp(d) - d - 1 is negative or 0 where d is small, and inf where it is 100."""
    logprobs = torch.zeros(1, requires_grad=True)
    loss, sums = grpo_loss(logprobs, torch.zeros(1), torch.tensor([d]), torch.zeros(1),
                           torch.ones(1), beta=1.0)
    loss.backward()
    assert sums["kl_sum"].item() == pytest.approx(expected, rel=0.1)
    slope = 0.0 if abs(d) > 20 else -math.expm1(d)  # beyond the limit nothing pulls
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_far_log_ratios_are_finite(log_ratio, advantage, weight):
    """C09: a token whose log-prob moved by 100 in an inner step; a masked one is exactly 0."""
    logprobs = torch.zeros(2, requires_grad=True)
    far = torch.tensor([-log_ratio, 0.0])
    loss, sums = grpo_loss(logprobs, far, far, torch.tensor([advantage, 1.0]),
                           torch.tensor([weight, 1.0]), beta=0.1)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in sums.values())
    assert logprobs.grad[1].item() == -1.0  # the neighbour's, undisturbed
    if not weight:
        assert loss.item() == -1.0 and logprobs.grad[0].item() == 0.0


def period_gradient(kind, split, lengths, advantages, features):
    """The gradient (D,) of one period, trained in micro-batches of `split` responses each.

    The policy is log-probs = features (A, D) @ theta; theta's gradient collects all micro-batches.
    `dapo` is scaled at the end by the number of tokens, as the trainer does.
    """
    theta = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    first_response = first_token = 0
    for size in split:
        mine = torch.tensor(lengths[first_response:first_response + size])
        its_advantages = torch.tensor(advantages[first_response:first_response + size])
        weights = token_weights(mine, torch.ones(size), kind, len(lengths), MAX_LENGTH)
        tokens = int(mine.sum())
        logprobs = features[first_token:first_token + tokens] @ theta
        loss, _ = grpo_loss(logprobs, logprobs.detach(), None,
                            its_advantages.repeat_interleave(mine), weights.repeat_interleave(mine))
        loss.backward()
        first_response, first_token = first_response + size, first_token + tokens
    assert first_response == len(lengths) and first_token == len(features)
    return theta.grad / sum(lengths) if kind == "dapo" else theta.grad


@pytest.mark.parametrize("kind, masked, expected", [
    ("grpo", False, -(3.3 + 4.5 - 8) / 7 / 3),                             # +0.0095
    ("grpo", True, -(3.3 + 4.5) / 7 / 3),                                  # -0.3714
    ("dr_grpo", False, -(2 * 3.3 + 4 * 4.5 - 8 * 8) / MAX_LENGTH / 3),     # +1.6417
    ("dr_grpo", True, -(2 * 3.3 + 4 * 4.5) / MAX_LENGTH / 3),              # -1.0250
    ("dapo", False, -(2 * 3.3 + 4 * 4.5 - 8 * 8) / 7 / (2 + 4 + 8)),       # +0.4020
    ("dapo", True, -(2 * 3.3 + 4 * 4.5) / 7 / (2 + 4)),                    # -0.5857
])
def test_one_group_by_hand(kind, masked, expected):
    """A02: rewards 11, 13, 0 have mean 8 and sample deviation 7. Responses of 2, 4 and 8 tokens,
    the last one cut off, with ratios 1.1, 0.9 and 1: each of a response's tokens adds minus
    3.3 / 7, 4.5 / 7 and -8 / 7, in dr_grpo without the 7. The six values differ, even in sign."""
    lengths, ratios = torch.tensor([2, 4, 8]), torch.tensor([1.1, 0.9, 1.0])
    keep = torch.tensor([True, True, not masked])
    advantages = group_advantages([11, 13, 0], scale=kind != "dr_grpo", epsilon=0)
    weights = token_weights(lengths, keep, kind, 3, MAX_LENGTH)
    logprobs, advantages, weights = (x.repeat_interleave(lengths)
                                     for x in (ratios.log(), advantages, weights))
    logprobs.requires_grad_()
    loss, sums = grpo_loss(logprobs, torch.zeros(14), None, advantages, weights)
    loss.backward()
    tokens = int(sums["kept_tokens"])
    assert tokens == (6 if masked else 14)
    scale = 1 / tokens if kind == "dapo" else 1  # as the trainer does, to the finished gradient
    assert loss.item() * scale == pytest.approx(expected, abs=1e-6)
    # Without clipping the surrogate is its own derivative: the ratio's is the ratio.
    assert logprobs.grad.sum().item() * scale == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("split", [(2,), (1, 1)])
@pytest.mark.parametrize("kind, expected", [
    ("grpo", (2 / 2 - 3 / 6) / 2),                # each response by its own length: +0.25
    ("dr_grpo", (2 - 3) / MAX_LENGTH / 2),        # each by the constant length: -0.0625
    ("dapo", (2 - 3) / 8),                        # all tokens alike: -0.125
])
def test_three_losses_by_hand(kind, expected, split):
    """A02: 2 tokens that push by +1 and 6 that push by -0.5; the sign depends on the divisor."""
    gradient = period_gradient(kind, split, [2, 6], [-1.0, 0.5],
                               torch.ones(8, 1, dtype=torch.float64))
    assert gradient.item() == pytest.approx(expected, abs=1e-6)


LENGTHS = [1, 8, 2, 7, 3, 3, 6, 4]
ADVANTAGES = [1.0, -0.5, 0.3, 2.0, -1.0, 0.0, 0.7, -1.5]
FEATURES = torch.randn(34, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("split", [(1,) * 8, (3, 5), (5, 3), (2, 2, 2, 2), (7, 1)])
def test_split_does_not_change_the_gradient(kind, split):
    """A02: any cut of one period into micro-batches gives the same gradient."""
    whole = period_gradient(kind, (8,), LENGTHS, ADVANTAGES, FEATURES)
    parts = period_gradient(kind, split, LENGTHS, ADVANTAGES, FEATURES)
    assert whole.norm() > 0.01
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_accumulation_divides_once(kind):
    """A17: four micro-batches of the same data have the gradient norm of one, not a quarter."""
    once = period_gradient(kind, (8,), LENGTHS, ADVANTAGES, FEATURES)
    four = period_gradient(kind, (8,) * 4, LENGTHS * 4, ADVANTAGES * 4, FEATURES.repeat(4, 1))
    assert four.norm().item() == pytest.approx(once.norm().item(), rel=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_everything_masked(kind, beta):
    """A10: where all responses are masked the loss is 0 and the gradient finite."""
    lengths = torch.tensor([2, 3])
    weights = token_weights(lengths, torch.zeros(2), kind, 2, MAX_LENGTH).repeat_interleave(lengths)
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    reference = torch.full((5,), -2.0)
    old, advantages = logprobs.detach(), torch.ones(5)
    loss, sums = grpo_loss(logprobs, old, reference, advantages, weights, beta=beta)
    loss.backward()
    assert loss.item() == 0.0 and logprobs.grad.tolist() == [0.0] * 5
    assert {name: value.item() for name, value in sums.items()} == dict.fromkeys(sums, 0)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_advantage_zero(kind):
    """A10, A16: with beta 0, groups of equal rewards have a gradient of exactly 0."""
    gradient = period_gradient(kind, (3, 5), LENGTHS, [0.0] * 8, FEATURES)
    assert gradient.tolist() == [0.0] * 3


@pytest.mark.parametrize("kind, expected", [
    ("grpo", [1 / 2 / 8, 0.0, 1 / 6 / 8]),
    ("dr_grpo", [1 / MAX_LENGTH / 8, 0.0, 1 / MAX_LENGTH / 8]),
    ("dapo", [1.0, 0.0, 1.0]),
])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_weights(kind, expected, dtype):
    """A02: a micro-batch of 3 of 8 responses; the masked one weighs 0 and is one of the 8 still."""
    keep = torch.tensor([1, 0, 1], dtype=dtype)
    weights = token_weights(torch.tensor([2, 4, 6]), keep, kind, 8, MAX_LENGTH)
    assert weights.tolist() == pytest.approx(expected)


def test_unknown_loss():
    """A wrong name is an error that lists the right ones."""
    with pytest.raises(ValueError, match=r"ppo.*grpo, dr_grpo, dapo"):
        token_weights(torch.tensor([2]), torch.ones(1), "ppo", 1, MAX_LENGTH)
