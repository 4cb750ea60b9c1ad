"""Writes sums of two-digit numbers as problems: FOLDER/train.jsonl and, of other pairs, test.jsonl.

    python tests/bench/make_sums.py FOLDER
"""
import json
import random
import sys
from pathlib import Path

HELD_OUT = 200


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    for name, part in (("test", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for a, b in part:
                print(json.dumps({"question": f"What is {a} plus {b}?", "answer": str(a + b)}),
                      file=file)


if __name__ == "__main__":
    main()
