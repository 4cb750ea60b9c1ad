"""Tokens a second of whole periods: the program's own loop, on work another trainer can repeat.

    python tests/bench/bench_end_to_end.py MODEL DATA [--prompts 4] [--shots 0] [--bf16]

DATA is JSONL with `question` and `answer`. Its first --shots rows are worked examples in front of
every question, the rows after them the problems, in the order of the file, with no closing
sentence. Every response has exactly --new-tokens tokens, since no stop token ends one. The reward
is 1 where the text contains the gold answer. Loss grpo, learning rate 1e-6, schedule async, all
responses decoded at once, one group a micro-batch, all cores; float32, with --bf16 autocast.

A step is generation, rewards, training, optimizer step and weight copy. Tokens are those of every
prompt and response, the prompt once a response, although here it is computed once a group. Medians
over the steps after the first, which allocates the gradients and the optimizer's state.
"""
import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))
import periodic_async
from grpo import Problem, encode_prompt
from periodic_async import Config, run_periods, set_up


def read(path, shots, count):
    """`count` prompts and gold answers, behind the rows that are worked examples."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(shots + count)]
    examples = "".join(f"{row['question']}\n{row['answer']}\n\n" for row in rows[:shots])
    return [(examples + row["question"], row["answer"].split("####")[-1].strip())
            for row in rows[shots:]]


def measured(given, out):
    """The metrics of every period, its tokens among them, and the last one's timeline."""
    config = Config(model=given.model, data=given.data, periods=given.steps, prompts=given.prompts,
                    samples=given.samples, rows=given.prompts * given.samples, beta=given.beta,
                    max_new_tokens=given.new_tokens, learning_rate=1e-6, micro_batch_groups=1,
                    loss="grpo", schedule="async", max_prompt_tokens=2**20,
                    dtype="bfloat16" if given.bf16 else "float32").checked()
    questions = read(given.data, given.shots, given.steps * given.prompts)

    def in_order(_config, _flag, _read, tokenizer):
        return [Problem(encode_prompt(tokenizer, question), gold, key)
                for key, (question, gold) in enumerate(questions)]

    periodic_async.encoded = in_order  # the program's adds a sentence, and the draw shuffles
    periodic_async.draw_problems = lambda rows, _seed, start, count: rows[start:start + count]
    periodic_async.math_reward = lambda text, gold: float(gold in text)
    shared = periodic_async.thread("all cores")
    run = shared.submit(set_up, config, out, shared).result()
    run.generator.copies[0].stop = set()
    history = asyncio.run(run_periods(run))
    responses = given.prompts * given.samples
    for period in history:
        assert period["tokens"] == responses * given.new_tokens
        problems = run.problems[period["period"] * given.prompts:][:given.prompts]
        period["tokens"] += given.samples * sum(len(p.prompt_ids) for p in problems)
    return history, run.timeline.blocks()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="2 or more: the first is not counted")
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument("--shots", type=int, default=0, help="worked examples before a question")
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    if given.steps < 2:
        parser.error("--steps must be 2 or more")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as out:
        history, timeline = measured(given, Path(out))
    print(f"{given.model}, {'bfloat16 autocast' if given.bf16 else 'float32'}, "
          f"{periodic_async.CORES} core(s), beta {given.beta}; {given.prompts} prompts of "
          f"{given.shots} examples and a question, {given.samples} responses each of "
          f"{given.new_tokens} tokens\n"
          "step  seconds  generate   train    copy   tokens  tokens a second")
    for period in history:
        seconds, copied = period["seconds"], period["copy_seconds"]
        generated, trained = (period[f"{side}_busy"] * seconds for side in ("generate", "train"))
        print(f"{period['period']:4} {seconds:8.2f} {generated - copied:9.2f} {trained:7.2f} "
              f"{copied:7.2f} {period['tokens']:8} {period['tokens'] / seconds:16.1f}")
    print(f"The last step:\n{timeline}")
    counted = history[1:]
    print(json.dumps({
        "tokens_per_step": statistics.median(h["tokens"] for h in counted),
        "seconds_per_step": statistics.median(h["seconds"] for h in counted),
        "tokens_per_second": statistics.median(h["tokens"] / h["seconds"] for h in counted)}))


if __name__ == "__main__":
    main()
