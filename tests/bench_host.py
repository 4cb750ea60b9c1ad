"""Host milliseconds of a decode step and of a training micro-batch, alone and beside the other.

    python tests/bench_host.py

Models of 2, 12 and 28 layers in which a layer computes next to nothing, so what is measured is the
host's work: Python, dispatch, autograd. On an accelerator it hides behind the device's work, as
long as it is shorter; with both sides in one process it also waits for the interpreter lock. One
core a side. The device times beside it are arithmetic, for a 7B model of 28 layers in bfloat16 on
one device of 1.6 TB/s and 300 TFLOP/s of which 40 % are reached: a decode step reads all weights; a
micro-batch of 4,096 tokens costs 8 FLOPs a parameter and token (policy 6, reference 2).
"""
import json
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from attention import attach, pack
from model import InferenceCopy, TriModel, frozen_copy

LAYERS, REPEATS = (2, 12, 28), 40
WEIGHTS = 7.6e9
DECODE_DEVICE = 1e3 * WEIGHTS * 2 / 1.6e12
TRAIN_DEVICE = 1e3 * WEIGHTS * 8 * 4096 / (0.4 * 300e12)


def sides(layers):
    """Two functions: a decode step of 8 rows, and a micro-batch of 8 responses of 4 tokens."""
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2,
                         num_key_value_heads=1, num_hidden_layers=layers)
    policy = attach(LlamaForCausalLM(config).train())
    copy = InferenceCopy(frozen_copy(policy), [-1], rows=8, longest_prompt=8, max_new_tokens=64)
    models = TriModel(policy, copy.model, frozen_copy(policy))
    packed = pack([[1, 2, 3, 4]], [[[5, 6, 7, 8]] * 8], multiple=8)
    uniforms = np.random.default_rng(0).random((8, 64), dtype=np.float32)

    def decode():
        if copy.idle:
            copy.submit(0, [1, 2, 3], uniforms)
        while copy.admits:
            copy.launch()
            copy.finish()
        copy.launch()
        copy.finish()

    def train():
        logprobs, _, reference = models.logprobs(packed)
        (logprobs - reference).square().sum().backward()

    return decode, train


def milliseconds(function, repeats=REPEATS):
    torch.set_num_threads(1)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def beside(function, other):
    """Milliseconds of a function while another thread runs the other."""
    done = threading.Event()

    def run():
        torch.set_num_threads(1)
        while not done.is_set():
            other()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return milliseconds(function)
    finally:
        done.set()
        thread.join()


def main():
    rows = []
    for layers in LAYERS:
        decode, train = sides(layers)
        milliseconds(decode, 5), milliseconds(train, 5)
        rows.append({"layers": layers, "decode": milliseconds(decode),
                     "decode_beside_training": beside(decode, train),
                     "train": milliseconds(train), "train_beside_decoding": beside(train, decode)})
    print("host ms   a decode step      a training micro-batch\n"
          "layers    alone   beside     alone   beside")
    for row in rows:
        print("{layers:6} {decode:8.1f} {decode_beside_training:8.1f}  {train:8.1f} "
              "{train_beside_decoding:8.1f}".format(**row))
    print(f"device {DECODE_DEVICE:8.1f}           {TRAIN_DEVICE:8.0f}          (7B, by arithmetic)")
    print(json.dumps({"rows": rows, "decode_device": DECODE_DEVICE, "train_device": TRAIN_DEVICE}))


if __name__ == "__main__":
    main()
