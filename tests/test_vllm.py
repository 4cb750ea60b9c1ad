"""tests/vllm_rollouts.py against a stub that speaks vLLM's interface and samples from a real model:
plain runs, two servers, every fault, an update that is lost."""
import asyncio
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from periodic_async import Config, GapError, train
from vllm_rollouts import ServerError, Servers

ROOT = Path(__file__).parent.parent
P, K, TOKENS = 4, 4, 6


class Stub:
    """A server on a loopback port of its own, in a thread. From its request number `P + 2` on, in
    period 2, it has `fault`."""

    def __init__(self, folder, fault="", delay=0.0):
        self.fault, self.delay, self.killed_at = fault, delay, None
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():  # what it starts with is not the run's: that has to be sent
            self.model.get_input_embeddings().weight.mul_(2)
        self.requests, self.labels, self.transports, self.updates = [], [], set(), 0
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve():
            torch.set_num_threads(1)
            self.server = await asyncio.start_server(self.connection, "127.0.0.1", 0)
            self.address = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
            ready.set()
        self.loop.create_task(serve())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        ready.wait()

    async def connection(self, reader, writer):
        self.transports.add(writer.transport)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        status, answer = await self.answer(head.split()[1], json.loads(body or "null"))
        data = json.dumps(answer, indent=1).encode()
        head = f"HTTP/1.1 {status}\r\nserver: stub\r\nContent-Length: {len(data)}\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode() + (data[:len(data) // 2] if status == "200 half" else data))
            await writer.drain()
        writer.close()

    async def answer(self, path, body):
        if path == "/v1/models":
            return "200 OK", {"data": [{"max_model_len": 9 if self.fault == "short" else 2048}]}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.updates += 1
            if self.fault != "lost" or self.updates != 2:
                weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                assert "lm_head.weight" in weights  # also of a tied one
                self.model.load_state_dict(weights)
            return "200 OK", {"results": [None]}
        if path == "/update_weight_version":
            self.labels.append(body["new_version"])
            return "200 OK", {"success": True}
        assert path == "/inference/v1/generate" and body["cache_salt"] == self.labels[-1]
        self.requests.append(body)
        await asyncio.sleep(self.delay)
        fault = self.fault if len(self.requests) >= P + 2 else ""
        if fault == "killed":
            self.killed_at = self.killed_at or time.monotonic()
            self.server.close()
            for transport in self.transports:
                transport.abort()
        if fault == "error":
            return "500 Internal Server Error", {"error": "planted"}
        choices = self.choices(body["token_ids"], **body["sampling_params"])
        if fault == "fewer":
            choices.pop()
        elif fault == "version":
            spans = choices[1]["weight_versions"]
            spans[0]["end"] -= 1
            spans.append({"version": "old", "start": spans[0]["end"], "end": spans[0]["end"] + 1})
        elif fault == "silent about versions":
            choices[1]["weight_versions"] = None
        elif fault == "cut":  # as where the context is full
            for choice in choices:
                choice["finish_reason"] = "length" if len(choice["token_ids"]) < TOKENS else "stop"
        elif fault == "a log-prob is missing":
            choices[2]["logprobs"]["content"].pop()
        return "200 half" if fault == "half" else "200 OK", {"choices": choices}

    @torch.no_grad()
    def choices(self, prompt, n, seed, temperature, max_tokens, stop_token_ids, logprobs,
                ignore_eos, **neutral):
        assert neutral == {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert ignore_eos and logprobs == 0 and (temperature > 0 or n == 1)
        found = []
        for k in range(n):
            stream, ids, content = torch.Generator().manual_seed(seed + k), [], []
            while len(ids) < max_tokens and not (ids and ids[-1] in stop_token_ids):
                logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
                scores = (logits / (temperature or 1)).log_softmax(-1)
                ids.append(int(scores.exp().multinomial(1, generator=stream) if temperature
                               else scores.argmax()))
                content.append({"logprob": float(scores[ids[-1]])})
            reason = "stop" if ids[-1] in stop_token_ids else "length"
            found.append({"index": k, "token_ids": ids, "logprobs": {"content": content},
                          "finish_reason": reason, "weight_versions": [
                              {"version": self.labels[-1], "start": 0, "end": len(ids)}]})
        return found

    def close(self):
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.call_later, 0.1, self.loop.stop)


@pytest.fixture
def stub(warm_folder):
    made = []

    def start(*args, **settings):
        made.append(Stub(warm_folder, *args, **settings))
        return made[-1]
    yield start
    for one in made:
        one.close()


def run(folder, out, servers, **changes):
    reward = folder / "reward.py"  # mixed ones: else the first gradient may be 0
    reward.write_text("def even(text, problem):\n    return len(text) % 2\n")
    settings = {"model": str(folder), "out": str(out), "periods": 3, "prompts": P, "samples": K,
                "max_new_tokens": TOKENS, "learning_rate": 1e-3, "rows": 8, "micro_batch_groups": 2,
                "save_every": 0, "reward": f"{reward}:even"}
    make = functools.partial(Servers, [getattr(s, "address", s) for s in servers])
    return train(Config(**settings | changes), make_generator=make)


@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_vllm_plain_run(warm_folder, tmp_path, stub, schedule):
    """Log-probs agree in every period, so each has the weights sent last, from the first on; no two
    requests share a sample's seed; a held-out problem is answered greedily."""
    server, held_out = stub(), tmp_path / "held-out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n' * 2)
    result = run(warm_folder, tmp_path / "out", [server], schedule=schedule, temperature=0.8,
                 eval_data=str(held_out), eval_every=3)
    assert result["periods"] == 3 and result["logp_gap_max"] < 1e-4
    assert 0 < result["generate_busy"] <= 1
    assert len({*server.labels}) == server.updates == 4
    sampling = [request["sampling_params"] for request in server.requests]
    seeds = sorted(s["seed"] for s in sampling)
    assert len(seeds) == 3 * P + 4 and min(b - a for a, b in itertools.pairwise(seeds)) >= K
    assert sorted((s["n"], s["temperature"]) for s in sampling) == [(1, 0)] * 4 + [(K, 0.8)] * 3 * P
    metrics = [json.loads(line) for line in open(tmp_path / "out/metrics.jsonl")]
    assert all(m["logp_gap_max"] > 0 and m["gradient_norm"] > 0 for m in metrics)


def test_vllm_two_servers_of_which_one_is_slow(warm_folder, tmp_path, stub):
    """The faster takes more, the other some; who answers decides no token."""
    changes = {"periods": 1, "prompts": 16, "rows": 4, "micro_batch_groups": 1}
    fast, slow = stub(), stub(delay=0.5)
    result = run(warm_folder, tmp_path / "two", [fast, slow], **changes)
    assert 0 < len(slow.requests) < 8 < len(fast.requests) and result["logp_gap_max"] < 1e-4
    assert fast.labels == slow.labels
    alone = run(warm_folder, tmp_path / "one", [stub()], **changes)
    assert alone["rollouts_sha256"] == result["rollouts_sha256"]


@pytest.mark.parametrize("fault, says", [
    ("killed", "broke off|reset|[Cc]onnect"),
    ("error", "answered http/1.1 500 internal server error: { .error.: .planted. }"),
    ("half", "broke off after"), ("fewer", "3 of 4 responses"), ("version", "is of version old"),
    ("silent about versions", "NoneType"), ("cut", "ended by length"),
    ("a log-prob is missing", r"of \d tokens has \d log-probs"), ("short", "context of 9")])
def test_vllm_faults_end_the_run(warm_folder, tmp_path, stub, fault, says):
    """One sentence with server and reason; within a second where a server is killed in the middle
    of a period."""
    server = stub(fault, delay=0.05)
    with pytest.raises(ServerError, match=says) as caught:
        run(warm_folder, tmp_path, [server])
    if fault == "killed":
        assert time.monotonic() - server.killed_at < 1
    assert str(caught.value).startswith(server.address) and "\n" not in str(caught.value)
    periods = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(periods) == (fault != "short")


def test_vllm_none_there(warm_folder, tmp_path, stub):
    with pytest.raises(ServerError, match=r"http://127.0.0.1:1/v1/models: .*[Cc]onnect"):
        run(warm_folder, tmp_path, [stub(), "http://127.0.0.1:1"])


def test_vllm_update_that_is_lost(warm_folder, tmp_path, stub):
    """A server that answers well and keeps its weights: the version is right, the guard ends it."""
    with pytest.raises(GapError):
        run(warm_folder, tmp_path, [stub("lost")])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("fault", ["", "killed"])
def test_vllm_from_the_command_line(warm_folder, tmp_path, stub, fault):
    """Exit code and last line are those of a run; a fault is the only line on stderr, code 1."""
    server = stub(fault)
    done = subprocess.run(
        [sys.executable, ROOT / "tests/vllm_rollouts.py", "--rollout-servers", server.address,
         "--model", warm_folder, "--out", tmp_path / "out", "--periods", "2", "--prompts", str(P),
         "--samples", str(K), "--max-new-tokens", str(TOKENS), "--save-every", "0"],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == bool(fault), done.stderr
    if fault:
        assert done.stderr.splitlines()[-1].startswith(f"error: {server.address}")
        assert "Traceback" not in done.stderr
    else:
        assert json.loads(done.stdout.splitlines()[-1])["logp_gap_max"] < 1e-4
