"""The mathematics of GRPO and its task: advantages, loss; problems, rewards. Pure functions.

What the code relies on:
1. Advantages belong to a *group*, the K responses to one prompt, never to a batch.
2. Every divisor of the loss is known before the first response exists, or is applied to the
   finished gradient (`dapo`). So a micro-batch can be trained the moment it is complete, and
   neither the order in which groups arrive nor any split of a period changes the gradient.
3. Numbers are compared as exact fractions. Nothing in an answer is evaluated, but for powers and
   factorials of numbers, up to 60 digits.
4. A response whose reward is missing (NaN) leaves its group's mean and deviation.

    file -> read_problems -> Problem -> (Generator) -> Response -> math_reward -> Group
    Group -> group_advantages, token_weights -> grpo_loss -> (Trainer)
"""
import itertools
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


# ---- Answers: when one equals the gold one. Wrong ones are never paid, rare spellings may not be.

LONGEST = 600  # characters of an answer: no sane one has more, and no pattern ever sees more
_CHARACTERS = str.maketrans({
    "\u2212": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "∪": r"\cup ", "≥": r"\ge ", "≤": r"\le ", "±": r"\pm ", "≈": r"\approx ", "°": r"^\circ ",
    "²": "^2", "³": "^3", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", **dict.fromkeys("£€¥¢~`\"", ""),
    **dict(zip("，。：（）＝０１２３４５６７８９", ",.:()=0123456789"))})
# 60 digits before the point and 50 behind it: int() refuses thousands of them.
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,15}(?!\d)|\d{1,60})(?:\.\d{1,50})?|\.\d{1,50}"
_NUMBER = re.compile(
    r"(?<![\d.^])"                            # not inside a longer number, no exponent
    r"(?:((?<![\w)\]}])[-+])(?:(?<=^.) )?)?"  # a sign: no operator, behind a letter or a bracket
    r"(?:(\d{1,50})\s+(?=\d+\s*/\s*\d))?"     # the whole part of a mixed number
    rf"({_DIGITS})(?:\s*/\s*(-?(?:{_DIGITS})))?(?!\d)")
_PLAIN = r"\d{1,60}(?:\.\d{1,50})?"
_START = r"(?<![\w.^_)}\]!])(?<!\d )(?!(?<=\d,)\d{3}(?!\d))"  # no part of another number or a name
# Words that change the number beside them, unlike a unit.
_CHANGING = (r"(?!(?:(?i:log|ln|sin|cos|tan|arc\w+|sqrt|root|not|\w+n't|negative|minus|than|twice|"
             r"half|halves|double|squared|cubed|factorial|between|base|mod|(?:square|cube|inverse) "
             r"of|(?:dozen|hundred|thousand|million|billion|trillion)s?)|[ap]m|[KMB])\b)")
_POWER = r"(?:\s*\^\s*\{?[23]\}?(?!\d))?"    # of a unit
_LETTER = "[mgshlLNJWVA]"                    # is a unit where it stands apart, all others variables
# (pattern, what it becomes, an example), in this order. First, for every answer:
_CLEANING = [
    (r"(?<![\w.^_)}\]])(?<![A-Za-z] )(?<!\d,)([1-3]?\d|4[0-7])!(?![!=\w(])",  # but: it is 6!
     lambda m: str(math.factorial(int(m[1]))), "6!"),
    (r"\s+", " ", "5  km"), (r"√ ?(\d+)", r"\\sqrt{\1}", "√13"), (r"√", r"\\sqrt", "√(x+1)"),
    (r",(?:\\[!,]\s?)(?=\d{3})|\{,\}", ",", r"7,\! 250"),      # separators of thousands
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])", "", r"\left("),
    (r"(?<!\\)\\[()\[\],!;: ]|\\?[$%]|\*\*|__", "", r"\(5\)"),  # TeX's brackets and spaces, bold
    (r"(?<![A-Za-z])([aApP])\.?[mM]\b\.?", lambda m: m[1].lower() + "m", "10 P.M."),
    # A unit at the end, also of an expression
    (rf"(?<=[^\s\\_^]) ?(?:\\(?:text|mathrm|mbox|textrm) ?\{{ ?{_CHANGING}(?:{_LETTER}|[A-Za-z]"
     r"[A-Za-z. /]*[A-Za-z.]) ?\}|(?<=[\w})] )(?:(?:square|cubic|sq) )?(?:[kcm]m|ft|in|inches|feet|"
     rf"units?)){_POWER}[ .]*$", "", r"5\text{ cm}^2"),
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mathbb|mbox) ?\{([^{}]*)\}", r" \1 ", r"\text{odd}"),
    (r" ?\\(?:cdot|times)(?![A-Za-z]) ?", "*", r"2\cdot3"), (r"\^ ?\{(\d)\}", r"^\1", "cm^{2}"),
    (r"\\[dt](frac|binom)", r"\\\1", r"\dfrac"), (r"(?<=\d)\\frac", r" \\frac", r"1\frac{1}{2}"),
    (r"\\(frac|sqrt(?:\[\d+\])?) ?([0-9A-Za-z])", r"\\\1{\2}", r"\frac12"),
    (r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z])", r"\1{\2}", r"\frac{1}2"),
    (r"\^ ?(?:\\circ|\{ ?\\circ ?\})(?: ?[CF]\b)?", " ", r"30^\circ"),
    (r"^ ?(?:=|:|\\approx|\\Rightarrow) ?", "", r"\approx 5"),
    (rf"^ ?(?:{_CHANGING}[A-Za-z']+ )*(?:is|are|equals):? ", "", "The answer is 5"),
    (r"^ ?\(?([A-J])\)[.:]? +(?=[^ .:=<>+*/^_-])(?!.*(?:\([A-J]\)|\b(?:or|and)\b|,)).+$", r"\1",
     "(B) 21")]  # but not (A) or (B)
# Then three times, for 2^{3^2}: the one thing that is evaluated, powers of numbers.
_EVALUATED = [
    (r"\\frac ?\{ ?(-?[\d.,]+) ?\} ?\{ ?(-?[\d.,]+) ?\}(?! ?[\^!])", r"\1/\2", r"\frac{7}{-4}"),
    (rf"{_START}({_PLAIN})(?: ?[*x] ?10 ?\^ ?(?:\{{ ?(-?\d\d?) ?\}}|(-?\d\d?))|[eE]([-+]?\d\d?))"
     r"(?![\w.^!])", lambda m: _raised(m[0], 10, m[2] or m[3] or m[4], m[1]), "5e3"),
    (rf"{_START}(?:\((-?{_PLAIN})(?:/([1-9]\d{{,50}}))?\)|({_PLAIN})) ?\^ ?(?:\{{ ?(-?\d{{1,3}}) ?"
     r"\}|(-?\d{1,3}))(?! ?\.?\d| ?[\^!])",
     lambda m: _raised(m[0], Fraction(m[1] or m[3]) / int(m[2] or 1), m[4] or m[5]), "2^5"),
    (rf"{_START}({_PLAIN}) ?(?i:(dozen)|(hundred)|(thousand)|(million)|(billion)|trillion)s?\b",
     lambda m: str(Fraction(m[1]) * (10**12, 12, 100, 10**3, 10**6, 10**9)[m.lastindex - 1]),
     "5 dozen")]
# Last one spelling of what is no number, six times.
_SPELLING = [
    (r"\\?sqrt(?=[({ ])", r"\\sqrt", "sqrt(2)"), (r"\+?\\infty", "inf", r"\infty"),
    (r"\\([gl]e)q(?:slant)?\b", r"\\\1", r"\geq"), (r"\\varnothing", r"\\emptyset", r"\varnothing"),
    ("bmatrix", "pmatrix", "bmatrix"), (r"([\^_]) ?(\d+|[A-Za-z])", r"\1(\2)", "x^10"),
    (r"\s+", "", "x + 1"), (r"(?<![\d.])\.(?=\d|\\o)", "0.", ".5"), (r"^\+", "", "+x"),
    (r"(\\frac\{[^{}]*\})([0-9A-Za-z])", r"\1{\2}", r"\frac{\sqrt2}2"),
    (r"\\frac\{-([^{}+-]*)\}", r"-\\frac{\1}", r"\frac{-x}{2}"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", r"\frac{x}{2}"),
    (r"(\\sqrt(?:\[\d+\])?|[\^_])\{([^{}]*)\}", r"\1(\2)", r"\sqrt{x}"),
    (r"(?<![\w.])(\d+)/(\d+)(\\pi|\\sqrt\(\w+\))(?![\w(^!])", r"\1\3/\2", r"2/5\pi"),
    (r"(?<![\w.])1(?=\\pi|\\sqrt)", "", r"1\pi"), (r"(?<=[\w)])\*(?=[A-Za-z\\(])", "", "2*x"),
    # Brackets that change nothing: (x), (3\sqrt(5)) but not as a divisor, (x/2), the outermost
    (r"(?<![\w^\]])\((\d+|[A-Za-z]|\\pi|\\sqrt\(\w+\))\)(?![\^!])", r"\1", "(x)"),
    (r"(?<![\w^/\]])\(((?:\\sqrt\(\w+\)|[\w.\\*])++)\)(?![\^_!])", r"\1", r"(3\pi)"),
    (r"(?<![\w^/\])])\(((?:\\sqrt\(\w+\)|[\w\\.])++/\w+)\)(?![\w\^_!/(\\])", r"\1", "-(x/2)"),
    (r"^\(((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+)\)$", r"\1", "(x+1)")]
_CLEANING, _EVALUATED, _SPELLING = ([(re.compile(pattern), *rest) for pattern, *rest in table]
                                    for table in (_CLEANING, _EVALUATED, _SPELLING))
# A name before an answer is dropped (x = 5, f(x) = x^2, x \in [0, 1)), but not from A = D.
_NAME = re.compile(
    r"((?:\\(?:angle|triangle|overline) ?)?(?:\\?[A-Za-z]+|\{[A-Za-z]+\})'?(?:_(?:\w|\{\w+\}))?"
    r"(?:\^\{-1\})?(?:\(\w\))?) ?(?:=|\\in\b) ?+(?![A-Za-z]+$)(?=.)")
# Before the one number of an answer: a name and its working, as in Total cost: 5*4 = ..
_WORKING = re.compile(rf"(?:{_CHANGING}[A-Za-z][A-Za-z '+-]*[=:] ?)?(?:(?:[-+*/\d\s.,()]|"
                      r"(?<=\d )x(?= \d))++=)?")
_ONE_NUMBER = re.compile(  # .. and words. Behind it: words and units, but no variable (5x, 3 i)
    rf"\s*(?:[(\[]?|(?:{_CHANGING}[A-Za-z']{{2,}}\s+)+){_NUMBER.pattern}"
    rf"(?!\s*(?:ten|hundred|thousand|million)ths\b)(?:{_CHANGING}(?:[kcm]m|[mk]g|m[lL]|[mk]ph|ft|"
    rf"lbs?|oz|days|st|nd|rd|th|[A-Za-z]{{5,}})(?![A-Za-z]){_POWER})?"
    rf"(?:(?:[\s,.;:()\]-]|(?<=[a-z])!)(?:{_CHANGING}(?:(?!(?:pi|(?!an\b)[abnpquvwxyz]{{2,3}}|"
    rf"[A-Z]{{2}})\b)[A-Za-z']{{2,}}+|{_LETTER}\b|a\b(?=\s)){_POWER}(?:/[A-Za-z]+{_POWER})?)?|"
    r"/[A-Za-z]{2,}+)*")
# Dropped, but wrong where answer and gold have it and it differs: x = 5, y = 5; 5 cm^2, 5 cm^3.
_CONFLICTS = [re.compile(r"^[\s$\\(]*([A-Za-z]|[A-Z]{2}) ?=[^=]*$"),
              re.compile(r"\d[^\d^]*[A-Za-z] ?\}? ?\^ ?\{?([23])\}?[\s$).\\]*$")]


def extract_answer(text: str) -> tuple[str, bool]:
    """The answer in a response, and whether it was marked as one: the last `\\boxed{}`, if closed
    within LONGEST characters; else what follows the last `####`, up to the end of its line or
    sentence, or stands before it on its line; else (unmarked) the text, for its last number."""
    start = text.rfind("\\boxed")
    if start >= 0:
        rest = text[start + len("\\boxed"):].lstrip()
        if not rest.startswith("{"):  # `\boxed 5$`: TeX boxes one token, people the number
            return re.split(r"[\s$]", rest, maxsplit=1)[0], True
        depth = 0
        for i, c in enumerate(rest[:LONGEST]):
            depth += (c == "{") - (c == "}")
            if depth == 0:
                return rest[1:i], True
        return "", True
    before, marker, after = text.rpartition("####")
    if not marker:
        return text, False
    line = after.lstrip().partition("\n")[0]
    if not line:
        return before.rpartition("\n")[2].rpartition("####")[2].strip(), True
    return re.split(r"(?<![a-z])\.\s|\.\s+(?=[A-Z])", line, maxsplit=1)[0], True


def _raised(text: str, base: Fraction | int, exponent: str, factor: str = "1") -> str:
    """factor * base ** exponent, written out; `text` as it is if the power has over 60 digits."""
    base, exponent = Fraction(base), int(exponent)
    digits = abs(exponent) * math.log10(max(abs(base.numerator), base.denominator))
    return text if digits >= 60 or base == 0 > exponent else str(Fraction(factor) * base**exponent)


def _normalised(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for pattern, new, _ in _CLEANING + 3 * _EVALUATED:
        text = pattern.sub(new, text)
    return text.strip(" *").rstrip(".")


def _fraction(match: re.Match) -> Fraction | None:
    sign, whole, number, divisor = (part and part.replace(",", "") for part in match.groups())
    if divisor and not Fraction(divisor):
        return None
    value = Fraction(number) / Fraction(divisor or 1) + int(whole or 0)
    return -value if sign == "-" else value


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    depths = itertools.accumulate((c in "([{") - (c in ")]}") for c in text)
    cuts = [i for i, (c, depth) in enumerate(zip(text, depths)) if c == "," and depth == 0]
    return [text[i + 1:j] for i, j in zip([-1, *cuts], [*cuts, len(text)])]


def _value(text: str, depth: int = 0):
    """What an answer says, to be compared: a fraction for one number, a frozenset for a set or a
    bare list of solutions, brackets and values for an interval or a tuple; else one spelling."""
    if depth == 0:
        text = _normalised(text) if len(text) <= LONGEST else ""
    text = text.strip()
    if len(text) > LONGEST or depth > 4 or text.count(",") > 99:  # no sane answer
        return text
    if text.count("\\pm") == 1:
        return frozenset(Counter(_value(text.replace("\\pm", c), depth + 1) for c in "+-").items())
    parts = _split(re.sub(r",? (?:and|or) ", ",", text))
    names = {name[1] for part in parts if (name := _NAME.match(part.strip()))}
    if len(parts) == 1 and names:
        text = text[_NAME.match(text).end():]
    # One bracket around it all: (1,2),(3,4) is a list.
    whole = len(parts) == 1 and re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", text)
    if whole and (len(inner := _split(whole[2])) > 1 or whole[1] == "\\{"):
        values = tuple(_value(part, depth + 1) for part in inner)
        return (frozenset(Counter(set(values)).items()) if whole[1] == "\\{"
                else (whole[1], values, whole[3]))
    if number := _ONE_NUMBER.fullmatch(text[_WORKING.match(text).end():].strip()):
        return _fraction(number)
    if len(parts) > 1:  # x = 1, x = 3 are two values; x = 2, y = 7 are two statements
        values = [_value(part, depth + 1) for part in parts]
        if len(names) > 1:
            values = zip((part.partition("=")[0].strip() for part in parts), values)
        return frozenset(Counter(values).items())
    for pattern, new, _ in 6 * _SPELLING:
        text = pattern.sub(new, text)
    word = text.isalpha() and (len(text) > 2 or text.lower() == "no")  # but AB may be a segment
    return text.lower() if word else text


def is_number(gold: str) -> bool:
    """Whether a gold answer is one number; all others are compared by their spelling."""
    return isinstance(_value(gold), Fraction)


def math_reward(response: str, gold: str) -> float:
    """1.0 if the answer in `response` equals `gold`, else 0.0. Sees the response alone: a prompt
    that holds an example answer must not score. Numbers are compared as exact fractions, without
    separators, currency, percent and units; sets without their order; all else in one spelling:
    2/\\sqrt{3} is not 2\\sqrt{3}/3, for which there is tests/reward_math_verify.py."""
    answer, marked = extract_answer(response)
    right = _value(gold)
    if not marked:
        last = max(map(answer.rfind, "0123456789"))
        numbers = list(_NUMBER.finditer(_normalised(answer[max(0, last - 400):last + 100])))
        return float(isinstance(right, Fraction) and numbers != []
                     and _fraction(numbers[-1]) == right)
    given = _value(answer)
    if given != right or given in ("", None):
        return 0.0
    found = [[pattern.search(text.translate(_CHARACTERS)) for text in (answer, gold)]
             for pattern in _CONFLICTS]
    return float(not any(mine and its and mine[1] != its[1] for mine, its in found))
