"""The mathematics of GRPO and its task: advantages, loss; problems, rewards. Pure functions.

Where this departs from the textbook:
1. Advantages belong to a *group*, the K responses to one prompt, never to a batch.
2. Every divisor of the loss is known before the first response exists, or is applied to the
   finished gradient (`dapo`). So a micro-batch can be trained the moment it is complete, and
   neither the order in which groups arrive nor any split of a period changes the gradient.
3. Numbers are compared as exact fractions. Nothing in an answer is ever evaluated.
4. A response whose reward is missing (NaN) leaves its group's mean and deviation.

    file -> read_problems -> Problem -> (Generator) -> Response -> math_reward -> Group
    Group -> group_advantages, token_weights -> grpo_loss -> (Trainer)
"""
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

try:
    import math_verify  # optional: decides about expressions that are equal, but spelt differently
except ImportError:
    math_verify = None

LOSSES = ("grpo", "dr_grpo", "dapo")


@dataclass(frozen=True)
class Problem:
    """A prompt, its gold answer, and a key that no other prompt of a run has: it seeds sampling.
    Rewards may look at the question, too."""
    prompt_ids: tuple[int, ...]
    answer: str
    key: int
    question: str = ""


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


def group_advantages(rewards: Sequence[float], *, scale: bool = True,
                     epsilon: float = 1e-4) -> Tensor:
    """Advantages (K,) of one group: (r - mean) / (std + epsilon), with the sample standard
    deviation (n - 1) and TRL's epsilon; verl's is 1e-6. `scale=False` does not divide (Dr. GRPO).
    Equal rewards give exact zeros, found by comparing them: eight rewards of 0.35 have a standard
    deviation of 3e-8 in float32, which a test for zero lets through. A NaN, a reward that is
    missing, stays one and is left out of mean and deviation."""
    r = torch.tensor(rewards, dtype=torch.float64)
    scored = r[~r.isnan()]
    if scored.unique().numel() < 2:
        return (r * 0).float()
    centred = r - scored.mean()
    return (centred / (scored.std() + epsilon) if scale else centred).float()


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
    if kind == "grpo":
        weights = 1.0 / (lengths * responses)
    elif kind == "dr_grpo":
        weights = torch.full_like(lengths, 1.0 / (responses * max_length), dtype=torch.float32)
    else:
        weights = torch.ones_like(lengths)
    return weights.float() * keep


def grpo_loss(logprobs: Tensor, old: Tensor, reference: Tensor | None,
              advantages: Tensor, weights: Tensor, *, clip_low: float = 0.2,
              clip_high: float = 0.2, beta: float = 0.0, sampled: Tensor | None = None,
              importance_cap: float = 0.0) -> tuple[Tensor, dict]:
    """The clipped surrogate of a micro-batch plus beta times the KL to the reference, and metrics.

    All arguments are (A,), one entry a response token; `weights` from `token_weights`. Per token

        -min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage) + beta * k3,
        ratio = exp(logprobs - old),  k3 = exp(d) - d - 1 with d = reference - logprobs,

    both logarithms limited to +-20, as in verl: exp(100) is inf, and inf * 0 of a masked token NaN.
    The loss is the weighted sum: the losses of a period's micro-batches add up to the period's.
    In the first pass `old` is `logprobs` itself, detached. The ratio is then exactly 1, but its
    gradient is that of `logprobs`: the surrogate's *value* is minus the mean advantage, about 0,
    whatever is learnt. Metrics are sums and counts (tensors): only those can be added up.

    `importance_cap` c > 0 multiplies the surrogate by min(exp(old - sampled), c), without gradient:
    the truncated importance weight for an engine whose log-probs, `sampled`, round in another way.
    1 where they are equal or missing (NaN). Not the KL: it has no expectation over that engine."""
    ratio = (logprobs - old).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages)
    kept = weights > 0
    with torch.no_grad():
        sums = {"clip_low_tokens": ((ratio < 1 - clip_low) & (advantages < 0) & kept).sum(),
                "clip_high_tokens": ((ratio > 1 + clip_high) & (advantages > 0) & kept).sum(),
                "kept_tokens": kept.sum()}
    if importance_cap:
        importance = (old - sampled).detach().nan_to_num(0.0).exp()
        sums["importance_capped_tokens"] = ((importance > importance_cap) & kept).sum()
        per_token = per_token * importance.clamp(max=importance_cap)
    if reference is not None:
        d = (reference - logprobs).clamp(-20, 20)
        # Never negative, and unbiased for tokens sampled from the policy. Not exp(d) - d - 1: in
        # float32 that is -6e-8 at d = 1e-6.
        k3 = d.expm1() - d
        per_token = per_token + beta * k3
        sums["kl_sum"] = (k3.detach() * kept).sum()
    loss = (per_token * weights).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def mean_scored(rewards: Sequence[float]) -> float:
    """The mean of the rewards that are not missing; NaN where all are."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return sum(scored) / len(scored) if scored else math.nan


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the groups of a period say about the policy that sampled them."""
    responses = [r for g in groups for r in g.responses]
    lengths = [len(r.ids) for r in responses]
    rewards = [x for g in groups for x in g.rewards]
    return {"reward": mean_scored(rewards), "unscored": sum(map(math.isnan, rewards)),
            "equal_reward_share": sum(not group_advantages(g.rewards).nan_to_num().any()
                                      for g in groups) / len(groups),
            "finished_share": sum(r.finished for r in responses) / len(responses),
            "tokens": sum(lengths), "response_tokens_mean": sum(lengths) / len(lengths),
            "response_tokens_min": min(lengths), "response_tokens_max": max(lengths)}


# ---- The method ends here. Below: problems, and how an answer is compared with the gold one. ----

CLOSING = "Reason step by step, then write the final answer after ####."


def read_problems(source: str | Path) -> list[tuple[str, str]]:
    """Questions and gold answers of a JSONL file or of a JSON array of objects: GSM8K, DeepScaleR,
    AIME, MATH-500 and the like; a path, or hub:OWNER/NAME/FILE. The question stands in `question`,
    `problem` or `prompt`, the gold answer in `answer`, after the last `####` if there is one;
    capital letters do not matter. Raises OSError, and ValueError that names file and line."""
    path = fetch(str(source))
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a BOM would make the first line invalid
        array = text.lstrip().startswith("[")
        lines = [json.dumps(x) for x in json.loads(text)] if array else text.split("\n")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError, too
        raise ValueError(f"{path} is neither UTF-8 text nor a JSON array: {error}") from None
    rows = [_row(f"{path}, {'entry' if array else 'line'} {number}", line)
            for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows


def fetch(path: str) -> str:
    """The path itself, or that of hub:OWNER/NAME/FILE, a file of a data set, which is downloaded
    once and kept. Raises ValueError that says what to do without a network."""
    if not path.startswith("hub:"):
        return path
    try:
        owner, name, file = path.removeprefix("hub:").split("/", 2)
        return hf_hub_download(f"{owner}/{name}", file, repo_type="dataset")
    except (OSError, ValueError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot fetch {path}, to be hub:OWNER/NAME/FILE: without a network, "
                         f"download it and give its path ({cause})") from None


def _row(where, line):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    record = {name.lower(): value for name, value in record.items()}
    question = next((record[k] for k in ("question", "problem", "prompt") if record.get(k)), None)
    answer = record.get("answer")
    if isinstance(answer, float) and math.isfinite(answer):  # JSON as Python reads it has Infinity
        answer = np.format_float_positional(answer, trim="-")  # 0.00005, not 5e-05
    if isinstance(answer, (str, int)) and not isinstance(answer, bool):
        answer = str(answer).rpartition("####")[2].strip()
    for name, value in (("question, problem or prompt", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: no text under {name}")
        if re.search("[\ud800-\udfff]", value):  # half a pair, which no tokenizer takes
            raise ValueError(f"{where}: {name} holds a lone surrogate, which is no character")
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


def draw_problems(rows: Sequence[Problem], seed: int, start: int, count: int) -> list[Problem]:
    """Problems start .. start + count - 1 of the endless stream: shuffled epochs of `rows`, end to
    end, each with a key of its own. A pure function, so a resumed run needs no state.

    The run's streams of random numbers never meet: word 1 of the counter is 0 where tokens are
    sampled, 1 here, 2 in `arithmetic`, 3 where the built-in model is made. (Not word 0, which a
    stream counts up: two that start at different places of it are one stream.)"""
    size = len(rows)
    streams = [(epoch, np.random.Philox(key=[seed, epoch], counter=[0, 1, 0, 0]))
               for epoch in range(start // size, (start + count) // size + 1)]
    # A key names its row, key % size, and is unique although epochs repeat the rows.
    keys = np.concatenate([epoch * size + np.random.Generator(stream).permutation(size)
                           for epoch, stream in streams])
    return [replace(rows[key % size], key=key) for key in keys[start % size:][:count].tolist()]


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
# Words that change the number beside them, unlike a unit.
_CHANGING = (r"(?!(?:(?i:log|ln|sin|cos|tan|arc\w+|sqrt|root|not|negative|minus|twice|half|halves|"
             r"double|squared|cubed|factorial|(?:dozen|hundred|thousand|million|billion|trillion)"
             r"s?)|[ap]m|[KMB])\b)")
_CLEANING = [(re.compile(pattern), new) for pattern, new in (
    ("\u2212", "-"),                                              # the typographic minus
    (r"\{,\}", ","),                                              # 9{,}500: a separator in TeX
    ("²", "^2"), ("³", "^3"), (r"\^\s*\{(\d)\}", r"^\1"),
    (r"(?<![A-Za-z])[aA]\.?[mM]\b\.?", "am"), (r"(?<![A-Za-z])[pP]\.?[mM]\b\.?", "pm"),
    (r"\\(?:left|right|displaystyle)\b", ""),
    (r"(?<=[^\s\\])(?:\\?\s|\\[,!;])*\\(?:text|mathrm|mbox)\s*"   # a unit
     r"\{\s*" + _CHANGING + r"[A-Za-z][A-Za-z. /]*\}\s*(?:\^\s*\d)?\s*$", ""),
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[dt](frac|binom)", r"\\\1"),
    (r"(?<=\d)\\frac", r" \\frac"),                              # 1\frac{1}{2} is a mixed number
    (r"\\frac\s*(\d)", r"\\frac{\1}"), (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),  # \frac12
    (r"\\frac\s*\{(-?[\d.,]+)\}\s*\{([\d.,]+)\}", r"\1/\2"),
    (r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)(?:\s*[CF]\b)?", " "),  # degrees
    (r"(?<!\\)\\[()\[\],!;: ]|\\?[$%]|[£€~]|\*\*", ""),  # TeX's brackets and spaces, currency, bold
    (r"^\s*[A-Za-z](?:\([A-Za-z]\))?\s*(?:=|\\in\b)\s*", ""),  # x = 5, f(x) = x^2, x \in [0, 1)
    (r"^\s*([-+])\s+", r"\1"))]                                  # - 5
# One spelling of an answer that is no number, in this order, again until nothing changes.
_SPELLING = [(re.compile(pattern), new) for pattern, new in (
    (r"√|\\?sqrt(?=[({ ])", r"\\sqrt"), ("π", r"\\pi"), (r"\+?(?:∞|\\infty)", "inf"),
    ("∪", r"\\cup"), (r"≥|\\geq\b", r"\\ge"), (r"≤|\\leq\b", r"\\le"), ("bmatrix", "pmatrix"),
    (r"([\^_])\s*(\d+|[A-Za-z])", r"\1(\2)"),                    # x^10
    (r"(\\frac|\\sqrt(?:\[\d+\])?)\s*([0-9A-Za-z])", r"\1{\2}"),  # \sqrt3
    (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
    (r"\s+", ""), (r"(?<![\d.])\.(?=\d|\\o)", "0."),
    (r"\\frac\{-([^{}+-]*)\}", r"-\\frac{\1}"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"(\\sqrt(?:\[\d+\])?|[\^_])\{([^{}]*)\}", r"\1(\2)"),
    (r"\\cdot|\\times", "*"),
    # Brackets that change nothing: (x), (3\sqrt(5)) but not as a divisor, the outermost
    (r"(?<![\w^\]])\((\d+|[A-Za-z]|\\pi|\\sqrt\(\w+\))\)(?![\^_!])", r"\1"),
    (r"(?<![\w^/\]])\(((?:[\w.\\*]|\\sqrt\(\w+\))+)\)(?![\^_!])", r"\1"),
    (r"^\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)$", r"\1"))]
# What may stand around the one number of an answer: words or a name (`x = 5`) before it ..
_BEFORE = re.compile(rf"\(?|[A-Za-z][\w '+-]*[=:]\s*|(?:{_CHANGING}[A-Za-z']{{2,}}\s+)+")
# .. and words or units behind it (`18 dollars`, `12 km/h`, `cm^2`), but no variable (5x, 3i).
_BEHIND = re.compile(r"(?!\s*(?:ten|hundred|thousand|million)ths\b)"  # 5 hundredths
                     rf"(?:{_CHANGING}(?!(?!a\s)(?:[c-fi-kort]|pi|[abnpquvwxyz]{{1,3}})\b|"
                     r"[NXYZC]\b)[A-Za-z']++(?:\s*\^\d)?|[\s,.;:/\"()-])*")  # a word as a whole


def extract_answer(text: str) -> tuple[str, bool]:
    """The answer in a response, and whether it was marked as one: what stands in the last
    `\\boxed{}`; else what follows the last `####`, up to the end of its line or sentence; else
    (unmarked) the whole text, of which the last number counts. A box never closed holds nothing."""
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
        return "", True
    if "####" in text:
        line = text.rpartition("####")[2].lstrip().partition("\n")[0]
        return re.split(r"\.\s", line, maxsplit=1)[0], True
    return text, False


def _normalised(text: str) -> str:
    for pattern, new in _CLEANING:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".")


def _fraction(match: re.Match) -> Fraction | None:
    sign, whole, number, divisor = (part and part.replace(",", "") for part in match.groups())
    try:
        value = Fraction(number) / Fraction(divisor or 1) + int(whole or 0)
    except ZeroDivisionError:
        return None
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


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _value(text: str):
    """What an answer says, to be compared: a fraction for one number, a frozenset for a set or a
    bare list of solutions, brackets and values for an interval or a tuple; else one spelling."""
    text = _normalised(text)
    if len(text) > 500:  # no sane answer is longer
        return _one_number(text)
    parts = _split(re.sub(r",?\s+(?:and|or)\s+", ",", text))
    # One bracket around it all: (1,2),(3,4) is a list.
    whole = len(parts) == 1 and re.fullmatch(r"(\\\{|[(\[])(.*?)(\\\}|[)\]])", text, re.DOTALL)
    inner = _split(whole[2]) if whole else []
    if len(inner) > 1 or (whole and whole[1] == "\\{"):
        values = tuple(map(_value, inner))
        return (frozenset(Counter(set(values)).items()) if whole[1] == "\\{"
                else (whole[1], values, whole[3]))
    number = _one_number(text)
    if number is not None:
        return number
    if len(parts) > 1:
        return frozenset(Counter(map(_value, parts)).items())
    before = None
    while text != before:
        before = text
        for pattern, new in _SPELLING:
            text = pattern.sub(new, text)
    word = text.isalpha() and (len(text) > 2 or text.lower() == "no")  # but AB may be a segment
    return text.lower() if word else text


def math_reward(response: str, gold: str) -> float:
    """1.0 if the answer in `response` equals `gold`, else 0.0. Sees the response alone: a prompt
    that holds an example answer must not score. Numbers are compared as exact fractions (thousands
    separators, currency, percent and units dropped), sets without their order, all else in one
    spelling; where that differs, and it is no number, `math-verify` decides if it is installed."""
    answer, marked = extract_answer(response)
    right = _value(gold)
    if not marked:
        numbers = list(_NUMBER.finditer(_normalised(answer)))
        return float(isinstance(right, Fraction) and numbers != []
                     and _fraction(numbers[-1]) == right)
    given = _value(answer)
    if given == right or isinstance(right, Fraction) or math_verify is None or len(answer) > 500:
        return float(given == right and given not in ("", None))
    # Without time limits of its own, which work in a main thread only.
    parsed = (math_verify.parse(f"${x}$", parsing_timeout=None) for x in (gold, answer))
    return float(math_verify.verify(*parsed, timeout_seconds=None))
