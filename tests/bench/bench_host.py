"""Host milliseconds of a decode step and of a training micro-batch, alone and beside the other.

    python tests/bench/bench_host.py            # models that compute next to nothing
    python tests/bench/bench_host.py MODEL      # a real one: which of it is the interpreter's lock?

Models of 2, 12 and 28 layers in which a layer computes next to nothing, so what is measured is the
host's work: Python, dispatch, autograd. On an accelerator it hides behind the device's work, as
long as it is shorter; with both sides in one process it also waits for the interpreter lock. One
core a side. The device times beside it are arithmetic, for a 7B model of 28 layers in bfloat16 on
one device of 1.6 TB/s and 300 TFLOP/s of which 40 % are reached: a decode step reads all weights; a
micro-batch of 4,096 tokens costs 8 FLOPs a parameter and token (policy 6, reference 2).

With MODEL both sides compute: 8 rows; a prompt of 115 tokens and 4 responses of 37. Each is timed
alone, beside the other side in a thread, and beside it in a process: that shares the memory and the
caches, but not the lock.
"""
import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
from attention import attach, pack
from model import InferenceCopy, TriModel, frozen_copy, load

LAYERS = (2, 12, 28)
WEIGHTS = 7.6e9
DECODE_DEVICE = 1e3 * WEIGHTS * 2 / 1.6e12
TRAIN_DEVICE = 1e3 * WEIGHTS * 8 * 4096 / (0.4 * 300e12)


def of_layers(layers):
    """A model that computes next to nothing."""
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2,
                         num_key_value_heads=1, num_hidden_layers=layers)
    return attach(LlamaForCausalLM(config).train())


def sides(policy, prompt=4, responses=8, tokens=4):
    """Two functions: a decode step of 8 rows, and a micro-batch of one prompt's responses."""
    copy = InferenceCopy(frozen_copy(policy), [-1], rows=8, longest_prompt=prompt,
                         max_new_tokens=64)
    models = TriModel(policy, copy.model, frozen_copy(policy))
    packed = pack([[1] * prompt], [[[5] * tokens] * responses], multiple=8)
    uniforms = np.random.default_rng(0).random((8, 64), dtype=np.float32)

    def decode():
        if copy.idle:
            copy.submit(0, [1] * prompt, uniforms)
        while copy.admits:
            copy.launch()
            copy.finish()
        copy.launch()
        copy.finish()

    def train():
        logprobs, _, reference = models.logprobs(packed)
        (logprobs - reference).square().sum().backward()

    return {"decode": decode, "train": train}


def milliseconds(function, repeats):
    torch.set_num_threads(1)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


@contextlib.contextmanager
def in_thread(other):
    """A function runs over and over in another thread."""
    done = threading.Event()

    def run():
        torch.set_num_threads(1)
        while not done.is_set():
            other()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def in_process(model, side):
    """A side of MODEL runs over and over in another process: it shares the memory's bandwidth and
    the caches, but no lock of the interpreter."""
    with subprocess.Popen([sys.executable, __file__, model, "--only", side],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        other.stdout.readline()  # it has begun
        try:
            yield
        finally:
            other.kill()


def real(model, repeats):
    """Medians of each side of a real model: alone, beside the other in a thread, in a process."""
    functions, taken = sides(load(model)[0], prompt=115, responses=4, tokens=37), {}
    for _ in range(repeats):  # interleaved: the machine's speed drifts
        for side, other in (("decode", "train"), ("train", "decode")):
            count = 20 if side == "decode" else 3
            for case, beside in (("alone", contextlib.nullcontext()),
                                 ("thread", in_thread(functions[other])),
                                 ("process", in_process(model, other))):
                with beside:
                    milliseconds(functions[side], 1)
                    taken.setdefault((side, case), []).append(
                        milliseconds(functions[side], count))
    return {side: {case: statistics.median(taken[side, case])
                   for case in ("alone", "thread", "process")} for side in functions}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a real one: beside a thread, beside a process")
    parser.add_argument("--repeats", type=int, help="40 calls; with MODEL, 3 rounds of several")
    parser.add_argument("--only", choices=("decode", "train"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if given.only:
        torch.set_num_threads(1)
        function = sides(load(given.model)[0], prompt=115, responses=4, tokens=37)[given.only]
        function()
        print("begun", flush=True)
        while True:
            function()
    if given.model:
        found = real(given.model, repeats := given.repeats or 3)
        print(f"{given.model}, float32, a thread a side, ms; median of {repeats}\n"
              "             alone   beside a thread   beside a process of the other side")
        for side, ms in found.items():
            print("{0:8} {alone:9.1f} {thread:9.1f} {1:.3f} {process:11.1f} {2:.3f}".format(
                side, ms["thread"] / ms["alone"], ms["process"] / ms["alone"], **ms))
        return print(json.dumps(found))
    rows, repeats = [], given.repeats or 40
    for layers in LAYERS:
        decode, train = sides(of_layers(layers)).values()
        milliseconds(decode, 5), milliseconds(train, 5)
        row = {"layers": layers, "decode": milliseconds(decode, repeats),
               "train": milliseconds(train, repeats)}
        with in_thread(train):
            row["decode_beside_training"] = milliseconds(decode, repeats)
        with in_thread(decode):
            row["train_beside_decoding"] = milliseconds(train, repeats)
        rows.append(row)
    print("host ms   a decode step      a training micro-batch\n"
          "layers    alone   beside     alone   beside")
    for row in rows:
        print("{layers:6} {decode:8.1f} {decode_beside_training:8.1f}  {train:8.1f} "
              "{train_beside_decoding:8.1f}".format(**row))
    print(f"device {DECODE_DEVICE:8.1f}           {TRAIN_DEVICE:8.0f}          (7B, by arithmetic)")
    print(json.dumps({"rows": rows, "decode_device": DECODE_DEVICE, "train_device": TRAIN_DEVICE}))


if __name__ == "__main__":
    main()
