"""Rollouts by vLLM servers in place of the built-in generator. By hand; HTTP by asyncio alone.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --dtype float32 --enforce-eager --enable-scale-out \\
        --logprobs-mode processed_logprobs --generation-config vllm --max-num-seqs 64
    python tests/vllm_rollouts.py --rollout-servers http://127.0.0.1:8000 --model DIR ...

All other flags are the run's; --rows, the responses that each server works on at once. Servers,
parted by commas, must see --out: weights go there, and from there to them. On a CPU they also need
--no-enable-chunked-prefill --max-num-batched-tokens 16384, or a request with a seed kills the
engine. Written for vLLM 0.32. A fault is one sentence that names the server, and ends the run.

What stays: one version a period, which a server must state for every token, by a random label that
is new with each update; a gradient that does not depend on the order in which groups arrive; and
--gap-limit, which alone finds weights that a server says it took and did not.
What is lost: bits. A server's batches depend on what arrives when, and log-probs on the batch: so
`sync` and `async` sample other tokens, and a resumed run is not bitwise the uninterrupted one.
"""
import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import secrets
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import periodic_async
from grpo import Response
from model import stop_ids

SECONDS = 3600  # a server that is silent for so long is taken for dead


class ServerError(OSError):
    """A fault of a server: one sentence, exit code 1."""


async def ask(server: str, path: str, body: dict | None = None) -> dict:
    """POST `body`, or GET without one. Returns what the JSON of the answer holds."""
    where, data = urlsplit(server), json.dumps(body).encode() if body else b""
    request = (f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {where.netloc}\r\n"
               f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
               "Connection: close\r\n\r\n").encode() + data
    try:
        async with asyncio.timeout(SECONDS), contextlib.AsyncExitStack() as stack:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            stack.callback(writer.close)
            writer.write(request)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length, = (line.split(":")[1] for line in lines if line.startswith("content-length:"))
            answer = (await reader.readexactly(int(length))).decode()
        if status.split()[1] != "200":
            raise ValueError(f"answered {status}: {' '.join(answer.split())}")
        return json.loads(answer)
    except asyncio.IncompleteReadError as error:
        reason = f"broke off after {len(error.partial)} bytes"
    except TimeoutError:
        reason = f"was silent for {SECONDS} s"
    except (OSError, LookupError, ValueError) as error:
        reason = str(error)
    raise ServerError(f"{server}{path}: {reason}")


class Servers:
    """What `run_period` asks of a generator, answered by the first of `servers` with a seat."""

    def __init__(self, servers, config, policy, tokenizer, longest_prompt, worker):
        self.servers, self.config, self.worker = servers, config, worker
        self.stop, self.longest_prompt = stop_ids(policy, tokenizer), longest_prompt
        self.version, self.label, self.in_flight = -1, "", 0  # θ_0 has to be sent, too
        self.folder = Path(config.out).absolute() / "weights"

    async def __aenter__(self):
        needed, self.seats = self.longest_prompt + self.config.max_new_tokens, asyncio.Queue()
        for server in self.servers:
            context = (await ask(server, "/v1/models"))["data"][0]["max_model_len"]
            if context < needed:  # it would cut responses off, and not say so
                raise ServerError(f"{server}: a context of {context} tokens, {needed} are needed")
        # A group more than it works on, so that it never waits. A faster one takes more.
        for server in self.servers * (self.config.rows // self.config.samples + 1):
            self.seats.put_nowait(server)
        return self

    async def __aexit__(self, *error):
        shutil.rmtree(self.folder, ignore_errors=True)  # as large as the model

    async def generate(self, problem, samples, *, temperature=None):
        # Sample k gets the seed + k: the seeds of two prompts must be far apart.
        name = f"{self.config.seed} {self.version} {problem.key}"
        sampling = {
            "n": samples, "seed": int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]),
            "temperature": self.config.temperature if temperature is None else temperature,
            "max_tokens": self.config.max_new_tokens, "logprobs": 0, "ignore_eos": True,
            "stop_token_ids": self.stop, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "repetition_penalty": 1.0}
        server = await self.seats.get()
        with self.in_timeline():
            answer = await ask(server, "/inference/v1/generate", {
                "token_ids": problem.prompt_ids, "cache_salt": self.label,
                "sampling_params": sampling})
        self.seats.put_nowait(server)
        try:
            responses = [self.response(choice) for choice in answer["choices"]]
            if len(responses) != samples:
                raise ValueError(f"{len(responses)} of {samples} responses came")
        except (LookupError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, LookupError) else error
            raise ServerError(f"{server}, to problem {problem.key}: {reason}") from None
        return responses

    def response(self, choice: dict) -> Response:
        """Raises ValueError where a part is missing, or a token of other weights than sent last."""
        ids, finished, end = choice["token_ids"], choice["finish_reason"] == "stop", 0
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        for span in choice["weight_versions"]:
            if span["version"] != self.label or span["start"] != end:
                raise ValueError(f"token {end} is of version {span['version']}, not {self.label}")
            end = span["end"]
        whole = finished or len(ids) == self.config.max_new_tokens
        if not (whole and 0 < len(ids) == len(logprobs) == end):
            raise ValueError(f"a response of {len(ids)} tokens has {len(logprobs)} log-probs, "
                             f"{end} versions, and ended by {choice['finish_reason']}")
        return Response(tuple(ids), tuple(logprobs), finished)

    @contextlib.contextmanager
    def in_timeline(self):
        """Generation is the time in which any request is in flight."""
        if not self.in_flight:
            self.begun = time.perf_counter()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.worker.timeline.add("generate", "decode", self.begun, time.perf_counter())

    async def update(self, policy, version):
        if self.in_flight:
            raise RuntimeError("weights were sent while requests were in flight")
        label = secrets.token_hex(8)
        await self.worker.run("copy", write, policy, self.folder)
        async with asyncio.TaskGroup() as sending:
            for server in self.servers:
                sending.create_task(send(server, str(self.folder), label))
        self.version, self.label = version, label


def write(policy, folder: Path) -> None:
    """The weights as a server loads them. A head that is tied to the embedding is written under its
    own name, too: on a CPU a server would keep the old one."""
    half_written = folder.with_name(".weights")
    for old in half_written, folder:
        shutil.rmtree(old, ignore_errors=True)
    half_written.mkdir()
    save_file({name: p.detach().to("cpu", copy=True) for name, p in
               policy.named_parameters(remove_duplicate=False)}, half_written / "model.safetensors")
    half_written.rename(folder)


async def send(server: str, folder: str, label: str) -> None:
    await ask(server, "/collective_rpc", {"method": "reload_weights",
                                          "kwargs": {"weights_path": folder}})
    await ask(server, "/update_weight_version", {"new_version": label})


def main(arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--rollout-servers", required=True)
    own, rest = parser.parse_known_args(arguments)
    periodic_async.main(rest, functools.partial(Servers, own.rollout_servers.split(",")))


if __name__ == "__main__":
    main()
