"""Seconds of a training pass with the prompt once a response, and once a group; memory of the head.

    python tests/bench/bench_trainer.py MODEL [--threads 2] [--repeats 3] [--shapes 64,8,64 ..]

Forward and backward pass of one group of P prompt tokens and K responses of R tokens (R~0.8: of R
on average, log-normal with that sigma; further K,R: further responses), random ids, float32: the
policy alone, without loss, reference and optimizer step. Three forms: repeat (a prompt a response),
dense (a T x T mask), shared. Medians, the forms interleaved, after a warm-up of each; the matmul
peak is a product of 512 rows with a matrix shaped as in the MLP, in between. FLOPs are the model's:
projections, head (forward twice), attention over the pairs that may attend. Beside the share of the
FLOP ratio that the speed-up reaches, and that of the peak, stand their ceilings: what the products
of the two passes reach alone, attention fused; last, the pairs that shared computes over those that
may attend.
Head: 2,048 tokens of hidden size 896, in a process of its own: the peak of resident memory in
forward and backward above weight, its gradient and hidden states, beside the size of all logits.
"""
import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from attention import attach, pack
from model import _chunks, _HeadLogprobs, load, token_logprobs
from periodic_async import CORES

SHAPES = ["64,8,64", "256,8,64", "512,8,64", "256,16,32", "128,8,128", "32,8,256",
          "200,32,300~0.8", "64,31,30,1,1024"]
FORMS = {"repeat": "shared", "dense": "dense", "shared": "shared"}  # and the attention it runs on
HEAD_TOKENS, HEAD_HIDDEN = 2048, 896


def model_flops(model, tokens, response_tokens, pairs):
    """Of a forward and a backward pass, which is two more, and the head's logits once more."""
    config = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    linear = sum(w.numel() for w in model.base_model.layers.parameters() if w.dim() == 2)
    head = 2 * model.get_output_embeddings().weight.numel() * response_tokens
    attention = 4 * heads * size * config.num_hidden_layers * pairs
    return 3 * (2 * linear * tokens + head + attention) + head


def matmul_rates(config, rows=512, repeats=10):
    """FLOPs a second of x @ W.T, several times."""
    x, w = (torch.randn(n, config.hidden_size) for n in (rows, config.intermediate_size))
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        x @ w.T
        rates.append(2 * x.numel() * len(w) / (time.perf_counter() - start))
    return rates


def products_seconds(model, packed):
    """Of the products of a pass alone, in its shapes: of every layer's matrices forward, backward
    for what goes in and for the matrix; of the head in its chunks, the logits twice; of all fused
    attention calls of a layer, forward and backward. Nothing is written that a next one reads."""
    config, layers = model.config, model.base_model.layers
    matrices = [w.detach() for w in layers.parameters() if w.dim() == 2]
    head, count = model.get_output_embeddings().weight.detach(), config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = {n: torch.randn(packed.input_ids.numel(), n) for w in matrices for n in w.shape}
    calls = [([torch.randn(call.pieces, heads, places, size, requires_grad=True)
               for heads, places in ((config.num_attention_heads, call.queries),
                                     (count, call.keys), (count, call.keys))],
              {"attn_mask": mask, "is_causal": mask is None})
             for call, mask in zip(packed.calls, packed.masks(torch.empty(0)))]
    hidden = torch.randn(len(packed.targets), config.hidden_size)
    start = time.perf_counter()
    for w in matrices:
        into, out = rows[w.shape[1]], rows[w.shape[0]]
        into @ w.T, out @ w, out.T @ into
    for chunk in _chunks(hidden, head):
        hidden[chunk] @ head.T
        logits = hidden[chunk] @ head.T
        logits @ head, logits.T @ hidden[chunk]
    for _ in layers:
        for given, how in calls:
            out = scaled_dot_product_attention(*given, enable_gqa=True, **how)
            torch.autograd.grad(out, given, given[0].detach())
    return time.perf_counter() - start


def lengths(shape):
    """Tokens of the prompt, and of each response, of `P,K,R,K,R..`."""
    prompt, *rest = shape.split(",")
    found = []
    for count, length in zip(rest[::2], rest[1::2], strict=True):
        mean, _, sigma = length.partition("~")
        spread = float(sigma or 0)
        drawn = np.random.default_rng(0).lognormal(-spread**2 / 2, spread, int(count))
        found += np.maximum(1, (float(mean) * drawn).round()).astype(int).tolist()
    return int(prompt), found


def measure(model, shape, repeats):
    """What is reported of one shape."""
    (p, r), rng = lengths(shape), np.random.default_rng(0)
    prompt, *responses = (rng.integers(10, model.vocab_size, n).tolist() for n in (p, *r))
    group = [prompt], [responses]
    seconds, products = ({form: [] for form in FORMS} for _ in range(2))
    logprobs, rates = {}, []
    for repeat in range(-1, repeats):  # -1: warm-up
        for form, kind in FORMS.items():  # interleaved: the machine's speed drifts
            attach(model, kind)
            packed = pack(*group, share=form != "repeat", multiple=8)  # new: it caches its masks
            start = time.perf_counter()
            result = token_logprobs(model, packed)
            result.sum().backward()
            if repeat >= 0:
                seconds[form].append(time.perf_counter() - start)
                if form != "dense":
                    products[form].append(products_seconds(model, packed))
                rates += matmul_rates(model.config)
            logprobs[form] = result.detach()
            model.zero_grad(set_to_none=False)  # as the trainer does
    for form in FORMS:
        torch.testing.assert_close(logprobs[form], logprobs["repeat"], atol=1e-2, rtol=0)
    seconds = {form: statistics.median(values) for form, values in seconds.items()}
    products = {form: statistics.median(products[form]) for form in ("repeat", "shared")}
    cost = packed.cost()  # of shared, the last form
    most = statistics.median(rates)
    flops = {form: model_flops(model, cost[f"tokens_{form}"], sum(r), cost[f"pairs_{form}"])
             for form in ("repeated", "shared")}
    flop_ratio = flops["repeated"] / flops["shared"]
    return {"shape": shape, "pairs_computed": cost["pairs_computed"] / cost["pairs_shared"],
            "token_ratio": cost["tokens_repeated"] / cost["tokens_shared"],
            "flop_ratio": flop_ratio,
            **{f"{form}_speedup": seconds["repeat"] / seconds[form] for form in list(FORMS)[1:]},
            "flop_share": seconds["repeat"] / seconds["shared"] / flop_ratio,
            "flop_share_ceiling": products["repeat"] / products["shared"] / flop_ratio,
            "matmul_share": flops["shared"] / seconds["shared"] / most,
            "matmul_share_ceiling": flops["shared"] / products["shared"] / most,
            **{f"{form}_seconds": taken for form, taken in seconds.items()}}


def resident(name):
    """Bytes: VmRSS, resident now; VmHWM, its peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def head_peak(vocabulary):
    """GiB that the head's forward and backward pass add. Call it in a new process: a peak stays."""
    hidden = torch.randn(HEAD_TOKENS, HEAD_HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HEAD_HIDDEN).mul_(0.02).requires_grad_()
    weight.grad = torch.zeros_like(weight).fill_(0.0)  # every page is touched
    targets = torch.randint(vocabulary, (HEAD_TOKENS,))
    with contextlib.suppress(OSError):  # where it is not permitted, the peak is that since start
        Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    logprobs, _ = _HeadLogprobs.apply(hidden, weight, targets, 1.0)
    logprobs.sum().backward()
    return (resident("VmHWM") - before) / 2**30


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="P,K,R")
    parser.add_argument("--vocabularies", nargs="*", type=int, default=[49152, 151936])
    parser.add_argument("--head-peak", type=int, help=argparse.SUPPRESS)  # the process of its own
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.head_peak:
        return print(head_peak(given.head_peak))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = load(given.model)[0]
    model.get_input_embeddings().sparse = True  # all three lines as the trainer on a CPU
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    print(f"{given.model}, float32, {given.threads} thread(s), median of {given.repeats}\n"
          "                         seconds             speed-up         fewer"
          "         share (ceiling) of    pairs\n"
          "  P,K,R            repeat   dense  shared   dense  shared  tokens   FLOPs"
          "    FLOP ratio   matmul peak   computed")
    shapes, peaks = [], {}
    for shape in given.shapes:
        shapes.append(row := measure(model, shape, given.repeats))
        print("{shape:16} {repeat_seconds:9.2f} {dense_seconds:7.2f} {shared_seconds:7.2f}"
              "{dense_speedup:7.2f}x{shared_speedup:7.2f}x{token_ratio:7.2f}x{flop_ratio:7.2f}x"
              "{flop_share:8.0%} ({flop_share_ceiling:.0%}) {matmul_share:6.0%} "
              "({matmul_share_ceiling:.0%}) {pairs_computed:8.2f}x".format(**row), flush=True)
    for v in given.vocabularies:
        command = [given.model, f"--threads={given.threads}", f"--head-peak={v}"]
        peaks[v] = float(subprocess.check_output([sys.executable, __file__, *command]))
        print(f"head of {v:,} tokens: {peaks[v]:.2f} GiB at the peak; all logits would be "
              f"{4 * HEAD_TOKENS * v / 2**30:.2f} GiB")
    print(json.dumps({"shapes": shapes, "head_peak_gib": peaks}))


if __name__ == "__main__":
    main()
