"""A reward for expressions that are equal but spelt differently, as 2/\\sqrt{3} and 2\\sqrt{3}/3.

    pip install math-verify
    python periodic_async.py --model DIR --data FILE --reward tests/reward_math_verify.py:reward

`grpo.math_reward` decides first. Where it says 0, the answer is marked and the gold one is no plain
number, math-verify decides. It has no bound of its own: `8^{8^{8^{8}}}` is one call that holds the
interpreter's lock for ever. So it runs in processes of its own, which live from call to call; one
that takes longer than SECONDS is killed and started again, and the answer counts 0.
"""
import contextlib
import fcntl
import importlib.util
import json
import os
import queue
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import wait

SECONDS = 2.0      # for one answer; keep it well below --reward-seconds
START = 60.0       # for a process to import math-verify
PROCESSES = 2
MEMORY = 4 * 2**30
LONGEST = 500      # characters of an answer that is worth it


def serve(life: int) -> None:
    """In the process: a line of JSON in, `1` or `0` out."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches it, too, in whatever call
    # Nobody writes to this pipe. When the run is gone, however it ended, the kernel closes its
    # other end and sends SIGIO, which kills, in whatever call. Linux and macOS.
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import math_verify
    print("ready", flush=True)
    for line in sys.stdin:
        try:  # without time limits of its own, which would take the signals
            gold, answer = (math_verify.parse(f"${x}$", parsing_timeout=None)
                            for x in json.loads(line))
            equal = math_verify.verify(gold, answer, timeout_seconds=None)
        except Exception:  # what cannot be read is not equal
            equal = False
        print(int(equal), flush=True)


class Process:
    """One process that answers. Nobody waits for it to start before its first answer."""

    def __init__(self):
        theirs, self.life = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs)], pass_fds=[theirs], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        os.close(theirs)
        self.ready = False

    def line(self, seconds: float) -> str:
        """Its next line; an empty one if it ended, or if `seconds` went by."""
        return self.process.stdout.readline() if wait([self.process.stdout], seconds) else ""

    def equal(self, gold: str, answer: str) -> bool | None:
        """None: no answer in time. Raises RuntimeError if it does not start."""
        self.ready = self.ready or self.line(START) != ""
        if not self.ready:
            raise RuntimeError("the process of math-verify does not start")
        try:
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
        except OSError:  # it was killed since
            return None
        found = self.line(SECONDS).strip()
        return bool(int(found)) if found else None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # a question that it will not read
            self.process.stdin.close()
        self.process.stdout.close()
        os.close(self.life)


def reward(response: str, problem) -> float:
    """1.0 if the answer in `response` equals the gold one, else 0.0."""
    answer, marked = extract_answer(response)
    if math_reward(response, problem.answer):
        return 1.0
    if not marked or len(answer) > LONGEST or is_number(problem.answer):
        return 0.0
    process = processes.get()
    equal = None
    try:
        equal = process.equal(problem.answer, answer)
    finally:
        if equal is None:
            process.end()
            process = Process()
        processes.put(process)
    return float(equal is True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
else:
    from grpo import extract_answer, is_number, math_reward
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("pip install math-verify")
    processes: queue.Queue = queue.Queue()
    for _ in range(PROCESSES):
        processes.put(Process())
