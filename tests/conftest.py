"""What several test files share: small random models, the plain way to score a response, and
processes that start at once."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

import model
import periodic_async
from attention import attach
from periodic_async import flag

torch.set_num_threads(1)  # tiny products: a second thread only waits
logging.set_verbosity_error()
logging.disable_progress_bar()

VOCAB = 60
# Every bias an architecture has is switched on, and heads are grouped 6 to 2.
CONFIGS = {
    "llama": lambda **k: LlamaConfig(attention_bias=True, **k),
    "qwen2": lambda **k: Qwen2Config(**k),  # biases in q, k, v
    "qwen3": lambda **k: Qwen3Config(attention_bias=True, head_dim=16, **k),
    "mistral": lambda **k: MistralConfig(sliding_window=None, **k),
}
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def step(copy):
    """A step of an inference copy alone: what ended."""
    copy.launch()
    return copy.finish()


def small_config(architecture="llama", **settings):
    settings = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **settings}
    return CONFIGS[architecture](**settings)


def small_model(architecture="llama", *, seed=0, dtype=torch.float32, attention="sdpa", **settings):
    """Random in every parameter, biases and norms too, and far from uniform attention."""
    model = AutoModelForCausalLM.from_config(small_config(architecture, **settings),
                                             attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 0.25 if p.ndim == 2 else p + noise * 0.3)
    return model.to(dtype)


def ids(count, seed):
    return random.Random(seed).choices(range(VOCAB), k=count)


def batch(prompt_lengths, response_lengths, seed=0):
    """Random prompts, and for each prompt random responses, of the given lengths."""
    number = iter(range(1000 * seed, 1000 * seed + 1000))
    return ([ids(n, next(number)) for n in prompt_lengths],
            [[ids(n, next(number)) for n in lengths] for lengths in response_lengths])


def separate_logprobs(model, prompts, responses, temperature=1.0):
    """The oracle: a stock model on each prompt + response alone, the shift by one, log_softmax."""
    scored = []
    for prompt, samples in zip(prompts, responses):
        for sample in samples:
            logits = model(torch.tensor([[*prompt, *sample]]), use_cache=False).logits[0]
            logprobs = (logits[len(prompt) - 1:-1] / temperature).log_softmax(-1)
            scored.append(logprobs[range(len(sample)), sample])
    return torch.cat(scored)


def gradients(model, logprobs):
    """Gradients of a fixed random combination of the log-probs, and the model's own cleared."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(7),
                          dtype=torch.float64).to(logprobs.dtype)
    model.zero_grad(set_to_none=True)
    (weights * logprobs).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_gradients_agree(found, expected, tolerance):
    """Every parameter on its own: a small one's error must not hide behind a large one's norm."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        error = (found[name] - right).norm() / right.norm()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.fixture(autouse=True)
def one_thread():
    """An earlier test may have left more threads: bits of stock models depend on their number."""
    torch.set_num_threads(1)


def _tiny_folder(folder, steps):
    before, model.TINY_STEPS = model.TINY_STEPS, steps
    try:
        for part in model.load("tiny"):
            part.save_pretrained(folder)
    finally:
        model.TINY_STEPS = before
    return folder


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory):
    """The embedded model without its warm-up, as a folder: where what it says does not matter."""
    return _tiny_folder(tmp_path_factory.mktemp("random"), 0)


@pytest.fixture(scope="session")
def warm_folder(tmp_path_factory):
    """The embedded model after a part of its warm-up: some answers are right, so weights move."""
    return _tiny_folder(tmp_path_factory.mktemp("warm"), 80)


@pytest.fixture(scope="session")
def folders(random_folder, tmp_path_factory):
    """For runs on several devices, {is it tied: folder}: a random Qwen2 of four layers, six sums,
    and a reward that tells random responses apart, without which no weight would move."""
    paths = {}
    for tied in (False, True):
        paths[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        shutil.copytree(random_folder, paths[tied], dirs_exist_ok=True)
        small_model("qwen2", vocab_size=99, num_hidden_layers=4, tie_word_embeddings=tied,
                    eos_token_id=2).save_pretrained(paths[tied])
        sums = [{"question": f"{10 ** n}+{n}=", "answer": str(10 ** n + n)} for n in range(6)]
        (paths[tied] / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
        (paths[tied] / "reward.py").write_text(
            "def reward(response, problem):\n    return sum(map(ord, response)) % 5 / 4\n")
    return paths


@pytest.fixture
def random_policy():
    """A small random model, attached, in train mode."""
    return attach(small_model().train())


@pytest.fixture
def unclipped(monkeypatch):
    """The norm to which a gradient is clipped would hide a wrong divisor."""
    monkeypatch.setattr(periodic_async, "CLIP_NORM", float("inf"))


# Imports torch once, before any thread; every run is a fork of it, a process with an exit code.
SERVER = """
import asyncio, errno, json, os, resource, signal, sys, time
from pathlib import Path
import torch
import model, periodic_async as pa
from transformers.utils import logging
logging.disable_progress_bar()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
for line in sys.stdin:
    plant, flags, folder = json.loads(line)
    folder = Path(folder)
    if os.fork():
        continue  # several runs at once: a process waits for each
    child = os.fork()
    if not child:
        for number, name in ((0, os.devnull), (1, folder / "out"), (2, folder / "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        exec(plant)
        pa.main(flags)
        os._exit(0)
    (folder / "pid").write_text(str(child))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "code.new").write_text(str(code))
    (folder / "code.new").rename(folder / "code")
    os._exit(0)
"""


def until(true, seconds, what):
    """Polls: the first value of `true()` that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := true():
            return value
        time.sleep(0.01)
    pytest.fail(f"{what}: not within {seconds} s")


class Child:
    """A run of the command line with code planted before it."""

    def __init__(self, server, folder, plant, flags):
        folder.mkdir()
        self.folder, self.server = folder, server
        server.stdin.write(json.dumps([plant, flags, str(folder)]) + "\n")
        server.stdin.flush()

    def text(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def signal(self, number):
        os.kill(int(self.text("pid")), number)

    def prints(self, word, seconds=30):
        until(lambda: word in self.text("out") or self.text("code"), seconds, word)
        assert word in self.text("out"), self.text("err")

    def ended(self, seconds=30):
        """Exit code and lines of stderr."""
        try:
            code = int(until(lambda: self.text("code"), seconds, "the end of the run"))
        except BaseException:
            self.signal(signal.SIGKILL)
            raise
        return code, self.text("err").splitlines()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with open(tmp_path_factory.mktemp("server") / "err", "w") as err:
        process = subprocess.Popen([sys.executable, "-c", SERVER], text=True, stderr=err,
                                   stdin=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    yield process
    process.kill()
    process.wait()


def as_given(settings):
    """The flags of a Config."""
    given = {name: value for name, value in vars(settings).items() if value not in (None, "")}
    return [flag(name) if value is True else f"--no-{flag(name)[2:]}" if value is False
            else f"{flag(name)}={value}" for name, value in given.items()]


@pytest.fixture
def child(server, tmp_path):
    """child(plant, settings) starts a run."""
    count = iter(range(100))

    def start(plant, settings):
        return Child(server, tmp_path / f"child-{next(count)}", plant, as_given(settings))
    return start
