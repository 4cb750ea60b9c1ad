"""Several nodes, processes of this machine over gloo: sums, equality, ends, resume."""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import as_given, until
from test_checkpoints import metrics
from test_periodic_async import config, hashes

ROOT = Path(__file__).parent.parent

# What torchrun sets for its processes, and loopback addresses alone.
PLACED = """
os.environ.update(WORLD_SIZE="{count}", RANK="{rank}", LOCAL_RANK="{rank}", MASTER_PORT="{port}",
                  MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_RUN_ID="test",
                  TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
rank, count = {rank}, {count}
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Run:
    """A run of several nodes without a torchrun around them: what ends them is their own."""

    def __init__(self, child, plant, settings, count):
        # As torchrun's, which holds the nodes' store and outlives them.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        placed = PLACED if count > 1 else "rank, count = 0, 1\n"
        self.nodes = [child(placed.format(rank=rank, count=count, port=self.store.port) + plant,
                            settings) for rank in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes:
            until(lambda node=node: node.text("pid"), 10, "the start")
            if not node.text("code"):
                node.signal(signal.SIGKILL)

    def ended(self, seconds=100):
        """Exit codes, and the lines of stderr of every node."""
        codes, errors = zip(*[node.ended(seconds) for node in self.nodes])
        return list(codes), [[line for line in lines if "it/s]" not in line] for lines in errors]

    def result(self):
        codes, errors = self.ended()
        assert not any(codes), errors
        assert not any(node.text("out") for node in self.nodes[1:])  # one node speaks
        return json.loads(self.nodes[0].text("out").splitlines()[-1])


def finished(child, plant, settings, count):
    with Run(child, plant, settings, count) as run:
        return run.result()


# ---------------------------------------------------------------------------- equal to one process

# Saves the gradients that each step clips. Rewards by the place of a problem in its period: those
# of places 1 and 3 are equal, and with two nodes these are all that node 1 has.
GRADIENTS = """
found, draw, clip, places = [], pa.draw_problems, torch.nn.utils.clip_grad_norm_, {}
def drawn(*args):
    problems = draw(*args)
    places.update((problem.key, place) for place, problem in enumerate(problems))
    return problems
def clipped(parameters, most):
    found.append([p.grad.clone() for p in parameters])
    torch.save(found, folder / "gradients")
    return clip(parameters, most)
async def reward(response, problem):
    return 1.0 if places[problem.key] in (1, 3) else float(len(response) % 2)
pa.draw_problems, torch.nn.utils.clip_grad_norm_ = drawn, clipped
pa.reward_function = lambda name: reward
pa.BUCKET = 20000  # less than a matrix: it is cut, and small ones share a call
"""


def assert_equal_to_one(child, settings, tmp_path, count):
    found = []
    for number in (1, count):
        out = tmp_path / f"{number}-nodes"
        with Run(child, GRADIENTS, type(settings)(**vars(settings) | {"out": str(out)}),
                 number) as run:
            run.result()
            steps = [torch.load(node.folder / "gradients") for node in run.nodes]
        for other in steps[1:]:  # the same bits on every node
            assert all(torch.equal(a, b) for step, first in zip(other, steps[0])
                       for a, b in zip(step, first))
        found.append((out, [torch.cat([g.flatten() for g in step]) for step in steps[0]]))
    (one, right), (several, steps) = found
    assert len(right) == len(steps) == settings.inner_steps
    for tolerance, step, expected in zip((1e-6, 1e-4), steps, right):
        assert expected.norm() > 0
        error = float((step - expected).norm() / expected.norm())
        assert error <= tolerance, f"relative error {error:.1e}"
    assert (one / "rollouts.jsonl").read_text() == (several / "rollouts.jsonl").read_text()
    (first,), (same,) = metrics(one), metrics(several)
    assert first == pytest.approx(same, rel=1e-3, abs=1e-6)
    assert first["skipped_groups"] == same["skipped_groups"]
    return first


@pytest.mark.parametrize(("loss", "count"), [
    ("dapo", 2), *(pytest.param(loss, count, marks=pytest.mark.slow) for loss, count in (
        ("grpo", 2), ("dr_grpo", 2), ("grpo", 3), ("dr_grpo", 3), ("dapo", 3)))])
def test_gradients_are_those_of_one_process(child, warm_folder, tmp_path, loss, count):
    """Shares of 3 and 2 prompts, or of 2, 2 and 1; skipped groups, of which one node has no other.
    A divisor of the share instead of the period, or a sum that a node leaves out, would show; so
    would rollouts that depend on who samples them."""
    settings = config(warm_folder, "", loss=loss, prompts=5, beta=0.0, periods=1, inner_steps=2,
                      mask_truncated=True, micro_batch_groups=1)
    assert assert_equal_to_one(child, settings, tmp_path, count)["skipped_groups"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"loss": "dapo"}, {"attention": "repeat"},
                                     {"dtype": "bfloat16"}])
def test_with_a_reference_and_whole_shares(child, warm_folder, tmp_path, changes):
    """The KL's part of the gradient is a sum, too."""
    settings = config(warm_folder, "", periods=1, beta=0.1, micro_batch_groups=1, **changes)
    assert_equal_to_one(child, settings, tmp_path, 2)


def test_async_is_sync_and_evaluates_as_one_process(child, warm_folder, tmp_path):
    """At two nodes both schedules end in the same bits; the first evaluation, shared out, is that
    of one process; each node has a trace, and node 0 the rest."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"question": "{a}+3=", "answer": "{a + 3}"}}\n' for a in range(7)))
    seen, files = set(), []
    for schedule, count in (("async", 2), ("sync", 2), ("async", 1)):
        out = tmp_path / f"{schedule}-{count}"
        result = finished(child, "", config(
            warm_folder, out, schedule=schedule, eval_data=str(data), prompt_template="{question}",
            eval_every=2, periods=2), count)
        files.append((out / "eval-000000.jsonl").read_text())
        if count == 2:
            seen.add((*hashes(result), (out / "rollouts.jsonl").read_text()))
            assert [path.name for path in (out / "node-001").iterdir()] == ["trace.json"]
            assert json.loads((out / "node-001/trace.json").read_text().rstrip(",\n") + "]")
    assert len(seen) == len(set(files)) == 1


@pytest.mark.slow
def test_resumed_with_another_number_of_nodes(child, warm_folder, tmp_path):
    """Two nodes, then one, then two: the prompts of an uninterrupted run, and as its rollouts those
    of the period after a checkpoint, which the same weights sample."""
    settings = config(warm_folder, tmp_path / "right", periods=3, save_every=1, keep=-1)
    finished(child, "", settings, 2)
    right = [json.loads(line) for line in open(tmp_path / "right/rollouts.jsonl")]
    out = tmp_path / "out"
    for periods, count in ((1, 2), (2, 1), (3, 2)):
        finished(child, "", config(warm_folder, out, periods=periods, save_every=1, keep=-1,
                                   resume=periods > 1), count)
    found = [json.loads(line) for line in open(out / "rollouts.jsonl")]
    assert [x["key"] for x in found] == [x["key"] for x in right]
    assert found[:32] == right[:32]  # of periods 0 and 1: until here the weights are the same
    assert len(metrics(out)) == 3
    # And the third from the checkpoint of the second, by one process, is the second resume's.
    shutil.rmtree(out / "period-000003")
    finished(child, "", config(warm_folder, out, periods=3, save_every=1, resume=True), 1)
    assert [json.loads(line) for line in open(out / "rollouts.jsonl")] == found


# --------------------------------------------------------------------------------------------- ends

RAISES = """
async def reward(response, problem):
    if rank == 1 and {when}:
        raise KeyError("of this reward")
    return float(len(response) % 2)
pa.reward_function = lambda name: reward
"""


def test_a_reward_that_raises_is_shown_once(child, random_folder, tmp_path):
    """Its own error, by its own node; the others end without a word, in time."""
    with Run(child, RAISES.format(when="True"), config(random_folder, tmp_path / "out"), 3) as run:
        codes, errors = run.ended(30)
    assert codes == [1, 1, 1]
    assert errors[0] == errors[2] == []
    assert "KeyError: 'of this reward'" in errors[1]
    assert sum("Error" in line for line in errors[1]) == 1


def test_more_nodes_than_prompts(child, random_folder, tmp_path):
    """A sentence, once."""
    with Run(child, "", config(random_folder, tmp_path / "out", prompts=2), 3) as run:
        codes, errors = run.ended()
    assert 2 in codes and all(codes)
    assert [*chain(*errors)] == ["error: --prompts 2 are fewer than the 3 nodes"]


def test_an_uneven_period_is_told_and_other_weights_are_found(child, random_folder, tmp_path):
    """A node whose weights went another way is named after the next checkpoint."""
    plant = """
real = pa.Trainer._end_period
def other(self):
    metrics = real(self)
    if rank == 1:
        self.parameters[0].data[0] += 1e-3
    return metrics
pa.Trainer._end_period = other
"""
    settings = config(random_folder, tmp_path / "out", prompts=3, save_every=1)
    with Run(child, plant, settings, 2) as run:
        codes, errors = run.ended()
        said = run.nodes[0].text("out")
    assert codes == [1, 1]
    assert sum("ValueError: the weights of node 1 are not those of node 0" in line
               for line in [*chain(*errors)]) == 1
    assert "2 nodes share 3 prompts: the largest share, 2, decides" in said
    assert "period    1" not in said


def test_flags_that_differ_are_refused(child, random_folder, tmp_path):
    """Nodes with other flags would sample another period."""
    plant = """
if rank == 1:
    flags = [x for x in flags if not x.startswith("--seed")] + ["--seed=7"]
"""
    with Run(child, plant, config(random_folder, tmp_path / "out"), 2) as run:
        codes, errors = run.ended()
    assert 2 in codes and all(codes)
    assert [*chain(*errors)] == [
        "error: flags, problems or weights of node 1 are not those of node 0"]


def test_a_slow_node_is_waited_for(child, random_folder, tmp_path):
    """Longer than the silence that counts as an end: its heartbeat goes on while it works."""
    plant = """
pa.SILENCE = 2.5
def reward(response, problem):
    time.sleep(6 * (rank == 1 and not done))
    done.append(1)
    return 1.0
done = []
pa.reward_function = lambda name: reward
"""
    settings = config(random_folder, tmp_path / "out", periods=1)
    assert finished(child, plant, settings, 2)["seconds"] > 5


# ------------------------------------------------------------------------------ torchrun, and kills

# Node 0 computes: it waits for no sum. Each writes its process where it begins period 1.
WAITS = """
import asyncio, os, periodic_async as pa, sys
from transformers.utils import logging
logging.disable_progress_bar()
rank = int(os.environ["RANK"])
async def reward(response, problem):
    if trainer.version == 1 and rank in {slow}:
        open(sys.argv[1] + f"/pid-{{rank}}", "w").write(str(os.getpid()))
        await asyncio.sleep(300)
    return float(len(response) % 2)
real = pa.Trainer.__init__
def init(self, *args):
    global trainer
    trainer = self
    real(self, *args)
pa.Trainer.__init__ = init
pa.reward_function = lambda name: reward
pa.main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("slow", ["(0, 1)", "(1,)"])
def test_a_killed_node_ends_all(random_folder, tmp_path, agents, slow):
    """kill -9 of node 1 while node 0 computes, and while it waits in a sum: all have ended within
    ten seconds, and the checkpoint is whole. In torchruns of two machines nobody else tells."""
    script, out = tmp_path / "run.py", tmp_path / "out"
    script.write_text(WAITS.format(slow=slow))
    settings = config(random_folder, out, save_every=1, reward_seconds=600.0)
    port, processes = free_port(), []
    try:
        for agent in range(agents):
            with open(tmp_path / f"err-{agent}", "w") as err:
                processes.append(subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", f"--nnodes={agents}",
                     f"--nproc-per-node={2 // agents}", f"--node-rank={agent}",
                     "--master-addr=127.0.0.1", f"--master-port={port}", script, tmp_path,
                     *as_given(settings)],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
                    stdout=err, stderr=err, start_new_session=True))
        pids = [int(until(lambda path=tmp_path / f"pid-{rank}": path.exists() and path.read_text(),
                          120, f"period 1 of node {rank}")) for rank in eval(slow)]
        (out / "period-000001").rename(tmp_path / "kept")
        (tmp_path / "kept").rename(out / "period-000001")
        begun = time.monotonic()
        os.kill(pids[-1], signal.SIGKILL)
        until(lambda: not alive(pids[0]) and not alive(pids[-1]), 10, "the end of both nodes")
        for process in processes:
            assert process.wait(20)  # the agents themselves look every few seconds
        assert time.monotonic() - begun < 25
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "".join((tmp_path / f"err-{agent}").read_text() for agent in range(agents))
    assert len(re.findall("period-000001 is saved", said)) == 1, said
    state = json.loads((out / "period-000001/state.json").read_text())
    assert state["files"] and (out / "period-000001/model.safetensors").exists()


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
