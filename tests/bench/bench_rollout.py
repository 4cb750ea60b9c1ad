"""Tokens a second of the inference copy and of transformers' `generate`, on the same work.

    python tests/bench/bench_rollout.py MODEL [--rows 32] [--threads 1]

Uniform: every response has 64 tokens. Mixed: responses end after 8 to 128 tokens, the lengths
fixed in advance on both sides; `generate` works on batches of `--rows` until each one's longest
response is complete. The two take turns, a batch of `generate`'s and as large a part of ours: the
machine's speed drifts.
Decode step: the whole step beside its matrix products alone, with the same shapes and cold weights:
all of them, attention's too (`decode_over_matmul`), and those of its `Linear` modules alone
(`decode_over_linear`).
"""
import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from model import InferenceCopy, frozen_copy, load

PROMPT, SAMPLES = 100, 8  # tokens a prompt, responses a prompt


class AllDone(StoppingCriteria):
    """A row of `generate` is done after its own number of new tokens."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] - PROMPT >= self.lengths


class FixedLengths(InferenceCopy):
    """Responses end after a length fixed in advance, by (prompt, sample), and never before."""

    def __init__(self, lengths, *args, **settings):
        super().__init__(*args, **settings)
        self.lengths = lengths

    def _stopped(self, row):
        return len(row.ids) == self.lengths[row.ticket][row.sample]


def ours(model, prompts, lengths, rows, probes):
    """Tokens of the responses that ended and seconds, of every `rows` responses. Of every tenth
    full decode step `probes` gets the seconds in the same moment: the whole, its `Linear` products,
    its attention products."""
    copy = FixedLengths(lengths, model, [], rows=rows, longest_prompt=PROMPT, max_new_tokens=128)
    rng = np.random.default_rng(0)
    for i, prompt in enumerate(prompts):
        copy.submit(i, prompt, rng.random((SAMPLES, 128), dtype=np.float32))
    full_steps = ended = tokens = seconds = 0
    while not copy.idle:
        start, full = time.perf_counter(), not copy.admits and len(copy.rows) == rows
        copy.launch()
        responses = copy.finish()
        step = time.perf_counter() - start
        tokens, seconds = tokens + sum(len(ids) for _, _, ids, _, _ in responses), seconds + step
        ended, full_steps = ended + len(responses), full_steps + full
        if full and full_steps % 10 == 0:
            probes.append((step, linear_products(model, rows),
                           attention_products(model, copy.slots, rows)))
        if ended >= rows or copy.idle:
            yield tokens, seconds
            ended = tokens = seconds = 0


def theirs(model, prompts, lengths, rows):
    """Tokens of the responses and seconds, of every batch."""
    flat = [(p, n) for p, group in zip(prompts, lengths) for n in group]
    for i in range(0, len(flat), rows):
        batch = flat[i:i + rows]
        wanted = [n for _, n in batch]
        ids = torch.tensor([p for p, _ in batch])
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                       max_new_tokens=max(wanted), eos_token_id=None, pad_token_id=0,
                       stopping_criteria=StoppingCriteriaList([AllDone(wanted)]))
        yield sum(wanted), time.perf_counter() - start


def linear_products(model, rows):
    """Seconds of a decode step's matrix products with weights: every `Linear` once, in layer order,
    so that each weight has left the cache when its turn comes again."""
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    start = time.perf_counter()
    for w in weights:
        torch.nn.functional.linear(inputs[w.shape[1]], w)
    return time.perf_counter() - start


def attention_products(model, slots, rows):
    """Seconds of the products of the step just done with the keys and values in its slots."""
    prompt, own = slots.widths
    g = model.config.num_attention_heads // model.config.num_key_value_heads
    count, lanes = slots.lanes.shape
    def random(like, m, n):
        return torch.randn(*like.shape[:-2], m, n)
    start, made = time.perf_counter(), 0.0
    for layer in range(model.config.num_hidden_layers):
        keys, values = (x[layer, :rows].flatten(0, 1) for x in slots.responses)
        prompt_keys, prompt_values = (x[layer, :count] for x in slots.prompts)
        pairs = ((keys[:, :own].mT, g), (values[:, :own], g),
                 (prompt_keys[..., :prompt, :].mT, lanes * g),
                 (prompt_values[..., :prompt, :], lanes * g))
        begun = time.perf_counter()
        left = [random(right, m, right.shape[-2]) for right, m in pairs]
        made += time.perf_counter() - begun
        for x, (right, _) in zip(left, pairs):
            x @ right
    return time.perf_counter() - start - made


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=24, help=f"{SAMPLES} responses each")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = frozen_copy(load(given.model)[0])
    stock = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, len(model.get_input_embeddings().weight), (given.prompts, PROMPT))
    mixed = rng.integers(8, 129, (given.prompts, SAMPLES)).tolist()
    uniform = np.full((given.prompts, SAMPLES), 64).tolist()
    prompts, result = prompts.tolist(), {}
    print(f"{given.model}, float32, {given.threads} thread(s), {given.rows} rows, "
          f"{given.prompts} prompts of {PROMPT} tokens x {SAMPLES} samples\n"
          f"{'':8}{'ours':>10}{'generate':>10}   tokens a second, prefill included")
    for name, lengths in (("uniform", uniform), ("mixed", mixed)):
        probes = []
        turns = itertools.zip_longest(ours(model, prompts, lengths, given.rows, probes),
                                      theirs(stock, prompts, lengths, given.rows), fillvalue=(0, 0))
        (tokens, seconds), (their_tokens, their_seconds) = np.sum(list(turns), 0)
        probes = np.array(probes)
        step, linear, attention = np.median(probes, 0) * 1000
        over_linear = np.median(probes[:, 0] / probes[:, 1])
        over_all = np.median(probes[:, 0] / (probes[:, 1] + probes[:, 2]))
        assert tokens == their_tokens
        result |= {f"{name}_speedup": their_seconds / seconds,
                   f"{name}_tokens_per_second": tokens / seconds,
                   f"{name}_decode_over_linear": over_linear,
                   f"{name}_decode_over_matmul": over_all}
        print(f"{name:8}{tokens / seconds:10.1f}{tokens / their_seconds:10.1f}   "
              f"{their_seconds / seconds:.2f}x; decode step {step:.0f} ms, its Linear products "
              f"{linear:.0f} ({over_linear:.2f}x), attention's {attention:.0f} ({over_all:.2f}x)",
              flush=True)
    result |= {key: result[f"uniform_{key}"]
               for key in ("decode_over_matmul", "decode_over_linear")}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
