"""The task and the mathematics of GRPO: problems, rewards, advantages, loss. Pure functions.

Where this departs from the textbook:
1. Advantages belong to a *group*, the K responses to one prompt, never to a batch.
2. Every divisor of the loss is known before the first response exists, or is applied to the
   finished gradient (`dapo`). So a micro-batch can be trained the moment it is complete, and
   neither the order in which groups arrive nor any split of a period changes the gradient.
3. Numbers are compared as exact fractions. Nothing in an answer is ever evaluated.

    file or arithmetic -> Problem -> (Generator) -> Response -> math_reward -> Group
    Group -> group_advantages -> grpo_loss -> (Trainer)

Dimension letters, here and in the other files: P prompts a period, K samples a prompt, N responses
in a micro-batch, T packed tokens, A response tokens, V vocabulary.
"""
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LOSSES = ("grpo", "dr_grpo", "dapo")
CLOSING = "Reason step by step, then write the final answer after ####."


@dataclass(frozen=True)
class Problem:
    """A prompt, its gold answer, and a key that no other prompt of a run has: it seeds sampling."""
    prompt_ids: tuple[int, ...]
    answer: str
    key: int


@dataclass(frozen=True)
class Response:
    """Sampled token ids, the stop token included, and the log-prob each was sampled with. One that
    was cut off at the length limit is not `finished`."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@dataclass(frozen=True)
class Group:
    """The K responses to a prompt, their rewards, and the version of the weights that sampled."""
    problem: Problem
    responses: tuple[Response, ...]
    rewards: tuple[float, ...]
    version: int


def arithmetic(seed: int, index: int) -> tuple[str, str]:
    """Question and answer number `index` of the endless arithmetic task: `3+8=` and `11`."""
    a, b = np.random.Generator(np.random.Philox(key=[seed, index])).integers(0, 10, 2)
    return f"{a}+{b}=", str(a + b)


def read_problems(path: str | Path) -> list[tuple[str, str]]:
    """Questions and gold answers of a JSONL file or of a JSON array of objects.
    The question stands in `question`, `problem` or `prompt`, the gold answer in `answer`, after
    the last `####` if there is one. Raises OSError, and ValueError that names file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a BOM would make the first line invalid
        array = text.lstrip().startswith("[")
        lines = [json.dumps(x) for x in json.loads(text)] if array else text.split("\n")
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"{path} is neither UTF-8 text nor a JSON array: {error}") from None
    rows = [_row(f"{path}, {'entry' if array else 'line'} {number}", line)
            for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows


def _row(where, line):
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    question = next((record[k] for k in ("question", "problem", "prompt") if k in record), None)
    answer = record.get("answer")
    if isinstance(answer, (str, int, float)) and not isinstance(answer, bool):
        answer = str(answer).rpartition("####")[2].strip()
    for name, value in (("question, problem or prompt", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: no text under {name}")
    return question, answer


def encode_prompt(tokenizer, question: str) -> tuple[int, ...]:
    """The token ids of a prompt: through the chat template where the tokenizer has one, with
    exactly one BOS where the tokenizer uses one. (A template may write the BOS itself, and the
    tokenizer would add a second; `apply_chat_template(tokenize=True)` returns no list of ids.)"""
    if tokenizer.chat_template:
        question = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(question, add_special_tokens=False).input_ids
    bos = tokenizer.bos_token_id
    if bos is not None and bos in tokenizer("").input_ids and ids[:1] != [bos]:
        ids = [bos, *ids]
    return tuple(ids)


def draw_problems(rows: Sequence[tuple[tuple[int, ...], str]], seed: int, start: int,
                  count: int) -> list[Problem]:
    """Problems start .. start + count - 1 of the endless stream: shuffled epochs of `rows` (prompt
    ids, gold answer), end to end. A pure function, so a resumed run needs no state."""
    size = len(rows)
    places = [divmod(index, size) for index in range(start, start + count)]
    order = {epoch: np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)
             for epoch in {epoch for epoch, _ in places}}
    # A key names its row, key % size, and is unique although epochs repeat the rows.
    keys = [epoch * size + int(order[epoch][place]) for epoch, place in places]
    return [Problem(*rows[key % size], key) for key in keys]


# 65 digits at most: no sane answer is longer, and int() refuses thousands of them.
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,15}(?!\d)|\d{1,50})(?:\.\d{1,50})?|\.\d{1,50}"
_NUMBER = re.compile(rf"""
    (?<![\d.^])                                  # not inside a longer number, no exponent
    ((?<![\w)\]}}])[-+])?                        # a sign; after a digit, a letter or a bracket a
                                                 # minus is an operator: 5-3 ends in 3
    (?:(\d{{1,50}})\s+(?=\d+\s*/\s*\d))?         # the whole part of a mixed number, 1 1/2
    ({_DIGITS})
    (?:\s*/\s*(-?(?:{_DIGITS})))?(?!\d)          # the divisor of a fraction
    """, re.VERBOSE)
_CLEANING = [(re.compile(pattern), new) for pattern, new in (
    ("\u2212", "-"),                                              # the typographic minus
    (r"\{,\}", ","),                                              # 9{,}500: a separator in TeX
    (r"\\(?:left|right|displaystyle)\b", ""),
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[dt]frac", r"\\frac"),
    (r"(?<=\d)\\frac", r" \\frac"),                              # 1\frac{1}{2} is a mixed number
    (r"\\frac\s*\{(-?[\d.,]+)\}\s*\{([\d.,]+)\}", r"\1/\2"),
    (r"\\frac\s*(\d)\s*(\d)", r"\1/\2"),                         # \frac12
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", " "),               # degrees
    (r"\\[()\[\]]|\\?[$%]|[£€]|\*\*", ""),                        # currency, percent, bold, ..
    (r"\\[,!;: ]|~", ""),                                         # spaces in TeX
    (r"^\s*([-+])\s+", r"\1"))]                                   # - 5
# What may stand around the one number of an answer: words or a name (`x = 5`) before it ..
_BEFORE = re.compile(r"\(?|[A-Za-z][\w '+-]*[=:]\s*|"
                     r"(?:(?!(?:log|ln|sin|cos|tan|not)\b)[A-Za-z']{2,}\s+)+")
# .. and words or units behind it (`18 dollars`, `12 km/h`, `cm^2`), but no variable (5x).
_BEHIND = re.compile(r"\)?(?:(?!(?!a\s)[abnuvwxyz]{1,3}\b|[NXYZ]\b)[A-Za-z']+(?:\s*\^\d)?|"
                     r"[\s,.;:/\"-])*")


def extract_answer(text: str) -> tuple[str, bool] | None:
    """The answer in a response, and whether it was marked as one: what stands in the last
    `\\boxed{}`; else what follows the last `####`, up to the end of its line or sentence; else
    (unmarked) the whole text, of which the last number counts. None for a box never closed."""
    start = text.rfind("\\boxed")
    if start >= 0:
        rest = text[start + len("\\boxed"):].lstrip()
        if not rest.startswith("{"):  # `\boxed 5$`: TeX boxes one token, people the number
            return re.split(r"[\s$]", rest, maxsplit=1)[0], True
        depth = 0
        for i, c in enumerate(rest):
            depth += (c == "{") - (c == "}")
            if depth == 0:
                return rest[1:i], True
        return None
    if "####" in text:
        line = text.rpartition("####")[2].lstrip().partition("\n")[0]
        return re.split(r"\.\s", line, maxsplit=1)[0], True
    return text, False


def _normalised(text: str) -> str:
    for pattern, new in _CLEANING:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".")


def _fraction(match: re.Match) -> Fraction | None:
    sign, whole, number, divisor = match.groups()
    value = Fraction(number.replace(",", ""))
    if divisor is not None:
        divisor = Fraction(divisor.replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    value += int(whole or 0)
    return -value if sign == "-" else value


def _one_number(text: str) -> Fraction | None:
    """The value of an answer that is one number, as `_BEFORE` and `_BEHIND` allow. None for all
    else: `42 or 43`, `x=5 or x=6`, `\\sqrt{3}`, `x^2`, `f(5)`, `> 5`."""
    text = re.sub(r"^[-+*/×÷\d\s.,()]+=", "", text).strip()  # the working of `5*4=20`
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    start, stop = matches[0].span()
    if not (_BEFORE.fullmatch(text[:start]) and _BEHIND.fullmatch(text[stop:])):
        return None
    return _fraction(matches[0])


def math_reward(response: str, gold: str) -> float:
    """1.0 if the answer in `response` equals `gold`, else 0.0. Sees the response alone: a prompt
    that holds an example answer must not score. Numbers are compared as exact fractions (thousands
    separators, currency, percent and units dropped), everything else as normalised text."""
    found = extract_answer(response)
    if found is None:
        return 0.0
    answer, marked = _normalised(found[0]), found[1]
    gold = _normalised(gold)
    value = _one_number(gold)
    if not marked:
        numbers = list(_NUMBER.finditer(answer))
        return float(value is not None and numbers != [] and _fraction(numbers[-1]) == value)
    if value is not None:
        return float(_one_number(answer) == value)
    return float("".join(answer.split()) == "".join(gold.split()) != "")


def group_advantages(rewards: Sequence[float], *, scale: bool = True,
                     epsilon: float = 1e-4) -> Tensor:
    """Advantages (K,) of one group: (r - mean) / (std + epsilon), with the sample standard
    deviation (n - 1) and TRL's epsilon; verl's is 1e-6. `scale=False` does not divide (Dr. GRPO).
    Equal rewards give exact zeros, found by max == min: eight rewards of 0.35 have a standard
    deviation of 3e-8 in float32, which a test for zero lets through."""
    r = torch.tensor(rewards, dtype=torch.float64)
    if r.max() == r.min():
        return torch.zeros(len(rewards))
    centred = r - r.mean()
    return (centred / (r.std() + epsilon) if scale else centred).float()


def token_weights(lengths: Tensor, keep: Tensor, kind: str, responses: int,
                  max_length: int) -> Tensor:
    """The weight (N,) in the loss of a period that every token of a response of `lengths` has.
    `grpo` (arXiv 2402.03300): mean over a response's tokens, then over the P*K = `responses`.
    `dr_grpo` (arXiv 2503.20783): the divisor of every response is `max_length`, so that long wrong
    answers are not punished less a token. `dapo` (arXiv 2503.14476): mean over all tokens of the
    period; their number is unknown until the last group is in, so the weight is 1 and the gradient
    is scaled before the step. Responses that `keep` (N,) masks weigh 0 and still count in P*K."""
    if kind not in LOSSES:  # bnpo's divisor, the tokens of a micro-batch, depends on the split
        raise ValueError(f"no loss named {kind!r}; there are {', '.join(LOSSES)}")
    weights = {"grpo": 1.0 / (lengths * responses), "dapo": torch.ones_like(lengths),
               "dr_grpo": torch.full_like(lengths, 1.0 / (responses * max_length), dtype=float)}
    return weights[kind].float() * keep


def grpo_loss(logprobs: Tensor, old: Tensor, reference: Tensor | None,
              advantages: Tensor, weights: Tensor, *, clip_low: float = 0.2,
              clip_high: float = 0.2, beta: float = 0.0) -> tuple[Tensor, dict]:
    """The clipped surrogate of a micro-batch plus beta times the KL to the reference, and metrics.

    All arguments are (A,), one entry a response token; `weights` from `token_weights`. Per token

        -min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage) + beta * k3,
        ratio = exp(logprobs - old),  k3 = exp(d) - d - 1 with d = reference - logprobs,

    and the loss is the weighted sum: the losses of a period's micro-batches add up to the period's.
    In the first pass `old` is `logprobs` itself, detached. The ratio is then exactly 1, but its
    gradient is that of `logprobs`: the surrogate's *value* is minus the mean advantage, about 0,
    whatever is learnt. Metrics are sums and counts (tensors): only those can be added up."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    kept = weights > 0
    with torch.no_grad():
        sums = {"clip_low_tokens": ((ratio < 1 - clip_low) & (advantages < 0) & kept).sum(),
                "clip_high_tokens": ((ratio > 1 + clip_high) & (advantages > 0) & kept).sum(),
                "kept_tokens": kept.sum()}
    if reference is not None:
        d = reference - logprobs
        k3 = d.exp() - d - 1  # never negative, and unbiased for tokens sampled from the policy
        per_token = per_token + beta * k3
        sums["kl_sum"] = (k3.detach() * kept).sum()
    loss = (per_token * weights).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the groups of a period say about the policy that sampled them."""
    responses = [r for g in groups for r in g.responses]
    tokens = sum(len(r.ids) for r in responses)
    return {"reward": float(np.mean([g.rewards for g in groups])),
            "finished_share": float(np.mean([r.finished for r in responses])),
            "equal_reward_groups": sum(max(g.rewards) == min(g.rewards) for g in groups),
            "response_tokens_mean": tokens / len(responses), "tokens": tokens}
