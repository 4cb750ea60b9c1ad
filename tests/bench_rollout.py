"""Tokens a second of the inference copy and of transformers' `generate`, on the same work.

    python tests/bench_rollout.py MODEL [--rows 32] [--threads 1]

Uniform: every response has 64 tokens. Mixed: responses end after 8 to 128 tokens, the lengths
fixed in advance on both sides; `generate` works on batches of `--rows` until each one's longest
response is complete.
Decode step: the whole step beside its matrix products alone, with the same shapes and cold weights.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
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

    def _ended(self, rows):
        self.stop = np.array([], dtype=np.int64)
        ended = []
        for row in rows:
            ticket, sample = self.request[row]
            if self.count[row] == self.lengths[ticket][sample]:
                ended.append((ticket, sample, self.ids[row, :self.count[row]].tolist(), [], True))
                self.request[row] = None
                self.open[self.slot[row]] -= 1
        return ended


def ours(model, prompts, lengths, rows):
    """Tokens, seconds, seconds of a full decode step, its ratio to its products (every tenth)."""
    copy = FixedLengths(lengths, model, [], rows=rows, longest_prompt=PROMPT, max_new_tokens=128)
    rng = np.random.default_rng(0)
    start, tokens, steps, ratios, aside = time.perf_counter(), 0, [], [], 0.0
    for i, prompt in enumerate(prompts):
        copy.submit(i, prompt, rng.random((SAMPLES, 128), dtype=np.float32))
    while not copy.idle:
        begun, full = time.perf_counter(), not copy.admits and None not in copy.request
        tokens += sum(len(ids) for _, _, ids, _, _ in copy.step())
        if full:
            steps.append(time.perf_counter() - begun)
            if len(steps) % 10 == 0:  # in the same minute: the machine's speed drifts
                begun = time.perf_counter()
                ratios.append(steps[-1] / products_alone(model, rows))
                aside += time.perf_counter() - begun
    return tokens, time.perf_counter() - start - aside, statistics.median(steps), ratios


def theirs(model, prompts, lengths, rows):
    start, tokens = time.perf_counter(), 0
    flat = [(p, n) for p, group in zip(prompts, lengths) for n in group]
    for i in range(0, len(flat), rows):
        batch = flat[i:i + rows]
        wanted = [n for _, n in batch]
        ids = torch.tensor([p for p, _ in batch])
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
                       max_new_tokens=max(wanted), eos_token_id=None, pad_token_id=0,
                       stopping_criteria=StoppingCriteriaList([AllDone(wanted)]))
        tokens += sum(wanted)
    return tokens, time.perf_counter() - start


def products_alone(model, rows):
    """Seconds of a decode step's matrix products: every `Linear` once, in layer order, so that each
    weight has left the cache when its turn comes again."""
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    start = time.perf_counter()
    for w in weights:
        torch.nn.functional.linear(inputs[w.shape[1]], w)
    return time.perf_counter() - start


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=12, help=f"{SAMPLES} responses each")
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
        tokens, seconds, step, ratios = ours(model, prompts, lengths, given.rows)
        result[f"{name}_decode_over_matmul"] = statistics.median(ratios)
        their_tokens, their_seconds = theirs(stock, prompts, lengths, given.rows)
        assert tokens == their_tokens
        result[f"{name}_speedup"] = their_seconds / seconds
        result |= {f"{name}_tokens_per_second": tokens / seconds}
        print(f"{name:8}{tokens / seconds:10.1f}{tokens / their_seconds:10.1f}   "
              f"{their_seconds / seconds:.2f}x; decode step {1000 * step:.0f} ms, "
              f"{statistics.median(ratios):.2f}x its matrix products")
    result["decode_over_matmul"] = result["uniform_decode_over_matmul"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
