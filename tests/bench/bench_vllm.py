"""Tokens a CPU-second of the inference copy and of a vLLM server, on the same core and work.

    taskset -c 0 env OMP_NUM_THREADS=1 vllm serve MODEL ...     # as in tests/vllm_rollouts.py
    taskset -c 0 python tests/bench/bench_vllm.py MODEL http://127.0.0.1:8000 PID

PID is the server's; the CPU time of its children counts. Uniform: every response has 64 tokens.
Mixed: 8 to 128, fixed in advance on both sides; the server gets one request a response, in a group
of the same prompt, which its prefix cache computes once. The two take turns, some prompts each. CPU
time, not the clock's: both share the core, and perhaps the machine.
"""
import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from bench_rollout import PROMPT, SAMPLES, FixedLengths
from model import frozen_copy, load
from vllm_rollouts import ask


def cpu_seconds(pid: int) -> float:
    """Of a process and all its descendants, user and system."""
    spent, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended in between
        spent[int(stat.parent.name)] = int(after_name[11]) + int(after_name[12])
        parents[int(stat.parent.name)] = int(after_name[1])
    family = [pid]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return sum(spent[one] for one in family) / os.sysconf("SC_CLK_TCK")


def ours(model, prompts, lengths, rows):
    """CPU seconds."""
    copy = FixedLengths(lengths, model, [], rows=rows, longest_prompt=PROMPT, max_new_tokens=128)
    rng = np.random.default_rng(0)
    for i, prompt in enumerate(prompts):
        copy.submit(i, prompt, rng.random((SAMPLES, 128), dtype=np.float32))
    start, tokens = time.process_time(), 0
    while not copy.idle:
        copy.launch()
        tokens += sum(len(ids) for _, _, ids, _, _ in copy.finish())
    assert tokens == np.sum(lengths)
    return time.process_time() - start


async def theirs(server, pid, prompts, lengths):
    """CPU seconds of the server."""
    async def request(prompt, n, tokens, seed):
        answer = await ask(server, "/inference/v1/generate", {
            "token_ids": prompt, "sampling_params": {
                "n": n, "seed": seed, "temperature": 1.0, "logprobs": 0, "max_tokens": tokens,
                "ignore_eos": True, "top_k": 0, "top_p": 1.0}})
        assert [len(choice["token_ids"]) for choice in answer["choices"]] == [tokens] * n

    start = cpu_seconds(pid)
    async with asyncio.TaskGroup() as requests:
        for i, (prompt, own) in enumerate(zip(prompts, lengths)):
            each = [(SAMPLES, own[0])] if len({*own}) == 1 else [(1, tokens) for tokens in own]
            for k, (n, tokens) in enumerate(each):
                requests.create_task(request(prompt, n, tokens, 1000 * i + k))
    return cpu_seconds(pid) - start


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("server")
    parser.add_argument("pid", type=int)
    parser.add_argument("--rows", type=int, default=16, help="the server's --max-num-seqs")
    parser.add_argument("--prompts", type=int, default=4, help=f"a turn, {SAMPLES} responses each")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, rng, result = frozen_copy(load(given.model)[0]), np.random.default_rng(0), {}
    vocabulary = len(model.get_input_embeddings().weight)
    print(f"{given.model}, float32, {given.rows} rows, {given.turns} turns of {given.prompts} "
          f"prompts of {PROMPT} tokens x {SAMPLES} samples\n{'':8}{'ours':>10}{'vLLM':>10}   "
          "tokens a CPU-second, prefill included")
    for name, low, high in (("uniform", 64, 65), ("mixed", 8, 129)):
        turns = []
        for turn in range(given.turns + 1):
            prompts = rng.integers(10, vocabulary, (given.prompts, PROMPT)).tolist()
            lengths = rng.integers(low, high, (given.prompts, SAMPLES)).tolist()
            seconds = (ours(model, prompts, lengths, given.rows),
                       asyncio.run(theirs(given.server, given.pid, prompts, lengths)))
            if turn:  # the first warms both up
                turns.append(np.sum(lengths) / np.array(seconds))
        left, right = np.median(turns, 0)
        result |= {f"{name}_tokens": left, f"{name}_vllm_tokens": right,
                   f"{name}_ratio": float(np.median([a / b for a, b in turns]))}
        print(f"{name:8}{left:10.1f}{right:10.1f}   {result[f'{name}_ratio']:.2f}x; of the turns "
              + ", ".join(f"{a:.0f}/{b:.0f}" for a, b in turns), flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
