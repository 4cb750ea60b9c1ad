"""The reward that asks math-verify, where it is installed: right, bounded, gone with its run."""
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo import Problem, math_reward
from periodic_async import reward_function

NAME = f"{Path(__file__).parent / 'reward_math_verify.py'}:reward"
needed = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None,
                            reason="pip install math-verify")
ENDLESS = r"\boxed{8^{8^{8^{8}}}}", Problem((), r"\sqrt{5}", 0)  # one call that holds the lock


@pytest.fixture(scope="module")
def reward():
    function = reward_function(NAME)
    yield function
    processes = function.__globals__["processes"]
    while not processes.empty():
        processes.get().end()


@needed
@pytest.mark.parametrize("response, gold, expected", [
    (r"\boxed{\frac{2\sqrt{3}}{3}}", r"2/\sqrt{3}", 1.0),
    (r"\boxed{(x+1)(x-1)}", "x^2-1", 1.0), (r"\boxed{x^2-1}", "(x-1)(x+1)", 1.0),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"2/\sqrt{3}", 0.0), (r"\boxed{x^2+1}", "(x-1)(x+1)", 0.0),
    (r"\boxed{\frac{", r"\sqrt{5}", 0.0), (r"\boxed{}", r"\sqrt{5}", 0.0),
    (r"\boxed{\sqrt{\sqrt{}}}}}{{", r"\sqrt{5}", 0.0),
    ("it is 2\\sqrt{3}/3", r"2/\sqrt{3}", 0.0)])  # not marked as the answer
def test_expressions(reward, response, gold, expected):
    """Equal expressions in another spelling, which `math_reward` alone does not pay."""
    assert math_reward(response, gold) == 0.0
    assert reward(response, Problem((), gold, 0)) == expected


@needed
def test_what_math_reward_decides_needs_no_process(reward):
    """A right answer, and any answer to a gold that is a number, such as one of two numbers."""
    processes, reward.__globals__["processes"] = reward.__globals__["processes"], None
    try:
        assert reward(r"\boxed{\sqrt5}", Problem((), r"\sqrt{5}", 0)) == 1.0
        assert reward(r"\boxed{42 or 43}", Problem((), "42", 0)) == 0.0
    finally:
        reward.__globals__["processes"] = processes


@needed
def test_an_endless_answer(reward):
    """C11: 0 within the limit, in as many threads as one likes, and the next answer is right."""
    limit = reward.__globals__["SECONDS"]
    reward(r"\boxed{\sqrt{7}}", ENDLESS[1])  # has started
    begun = time.perf_counter()
    assert reward(*ENDLESS) == 0.0
    assert limit * 0.9 < time.perf_counter() - begun < limit + 1
    right = r"\boxed{\frac{2\sqrt{3}}{3}}", Problem((), r"2/\sqrt{3}", 0)
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(reward, *call) for call in (ENDLESS, ENDLESS, right, right, right)]
        assert [call.result() for call in calls] == [0.0, 0.0, 1.0, 1.0, 1.0]


@needed
def test_a_process_that_was_killed(reward):
    """One that somebody else ended, as the system does when memory is short, costs one answer."""
    processes = reward.__globals__["processes"]
    for _ in range(processes.qsize()):
        process = processes.get()
        os.kill(process.process.pid, signal.SIGKILL)
        process.process.wait()
        processes.put(process)
        process.ready = True
    right = r"\boxed{\frac{2\sqrt{3}}{3}}", Problem((), r"2/\sqrt{3}", 0)
    found = [reward(*right) for _ in range(2 * processes.qsize())]
    assert found == [0.0] * processes.qsize() + [1.0] * processes.qsize()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


RUN = """
import os, sys, threading, time
from grpo import Problem
from periodic_async import reward_function
name, response, gold = sys.argv[1:]
reward = reward_function(name)
processes = reward.__globals__["processes"]
reward(r"\\boxed{\\sqrt{7}}", Problem((), gold, 0))  # has started
pids = [process.process.pid for process in processes.queue]
reward.__globals__["SECONDS"] = 60
threading.Thread(target=reward, args=(response, Problem((), gold, 0)), daemon=True).start()
time.sleep(0.5)
print(*pids, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    os._exit(130)
"""


@needed
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_run(how):
    """C11: a run that is killed, or ends as Ctrl-C ends it, while an answer is being computed."""
    words = [sys.executable, "-c", RUN, NAME, ENDLESS[0], ENDLESS[1].answer]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True,
                           cwd=Path(NAME).parent.parent)
    pids = run.stdout.readline().split()
    assert len(pids) == 2 and all(map(running, pids))
    run.send_signal(how)
    run.wait(5)
    end = time.perf_counter() + 2
    while any(map(running, pids)) and time.perf_counter() < end:
        time.sleep(0.01)
    assert not any(map(running, pids))


def test_without_math_verify(monkeypatch):
    """A18: one sentence that says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"--reward.*pip install math-verify"):
        reward_function(NAME)
    assert threading.active_count() == before
