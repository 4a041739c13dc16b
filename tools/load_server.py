"""A server process on loopback, and a client that answers the load test's jobs over HTTP.

Everything is judged from outside: streams, refusals, /metrics, and the resident memory of the process.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

CONTEXT_LENGTH = 256
BOOT_TIMEOUT_S = 180.0
QUIET_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Job:
    """One request to be made."""

    index: int
    kind: str  # "good", "cancelled" or "bad"
    prompt: str
    num_tokens: int
    cancel_after_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of it: "length", "stop", "cancelled", "refused", "error" or "lost"."""

    end: str
    tokens: tuple[str, ...] = ()
    text: str = ""
    num_ends: int = 1


Client = Callable[[Job], Outcome]


@dataclass(frozen=True)
class ServerProcess:
    """`outrider serve`, ready."""

    url: str
    process: psutil.Process

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name without prefix; a counter of ends also as `request_success_total/<reason>`."""
        return read_metrics(httpx.get(f"{self.url}/metrics", timeout=ANSWER_TIMEOUT_S).text)

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(self.process.memory_info().rss)

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def quiet_metrics(self) -> dict[str, float]:
        """Metrics once nothing runs or waits any more, or as they are after QUIET_TIMEOUT_S."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        while True:
            found = self.metrics()
            is_quiet = found["num_requests_running"] + found["num_requests_waiting"] == 0
            if is_quiet or time.monotonic() > deadline:
                return found
            time.sleep(0.1)


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> value by name, series of one name added up."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.partition(":")[2]
            reason = sample.labels.get("finished_reason")
            for key in (name, *([f"{name}/{reason}"] if reason else [])):
                values[key] = values.get(key, 0.0) + sample.value
    return values


@contextmanager
def running_server(*, num_seats: int) -> Iterator[ServerProcess]:
    """The embedded default on a free port until the block ends; RuntimeError where it does not get ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), "--device", "cpu", "--drain-s", "5"]
    command += ["--max-seats", str(num_seats), "--context-length", str(CONTEXT_LENGTH)]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            server = ServerProcess(f"http://127.0.0.1:{port}", psutil.Process(child.pid))
            if not _gets_ready(child, server.url):
                log.seek(0)
                raise RuntimeError(f"the server did not get ready. Its log ends:\n{log.read()[-2000:]}")
            yield server
        finally:
            child.terminate()
            child.wait(timeout=QUIET_TIMEOUT_S)


def _gets_ready(child: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.2)
    return False


def http_client(url: str, *, transport: httpx.BaseTransport | None = None) -> Client:
    """Answer jobs by the server at `url`. Threads may share it."""
    client = httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, transport=transport)

    def answer(job: Job) -> Outcome:
        try:
            return _refusal(client, job) if job.kind == "bad" else _stream(client, job)
        except httpx.HTTPError:
            return Outcome("lost")

    return answer


def _stream(client: httpx.Client, job: Job) -> Outcome:
    """Read a stream to its end, or close it where the job says so."""
    body = {
        "prompt": job.prompt,
        "max_tokens": job.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_draft_marks": True},
    }
    tokens, ends, text, is_done = list[str](), list[str](), "", False
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            return Outcome("error")
        for line in response.iter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return Outcome("error", tuple(tokens), text)
            (choice,) = event["choices"]
            tokens += event["outrider"]["tokens"]
            text += choice["text"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if job.kind == "cancelled" and len(tokens) > job.cancel_after_tokens and not ends:
                return Outcome("cancelled", tuple(tokens), text)
    return Outcome(ends[0] if ends and is_done else "lost", tuple(tokens), text, max(1, len(ends)))


def _refusal(client: httpx.Client, job: Job) -> Outcome:
    """Send what must be refused: "refused" where it was, in OpenAI's shape."""
    path, body = _bad_request(job)
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    if not 400 <= response.status_code < 500:
        return Outcome("error")
    error = response.json().get("error")
    is_openai = isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys()
    return Outcome("refused" if is_openai else "error")


def _bad_request(job: Job) -> tuple[str, str]:
    """Path and body, by turns: no JSON, a wrong type, a prompt that is too long, an image."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", None),
        ("/v1/completions", {"prompt": job.prompt, "max_tokens": "ten"}),
        ("/v1/completions", {"prompt": "word " * (2 * CONTEXT_LENGTH), "max_tokens": job.num_tokens}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
    ]
    path, body = bodies[job.index % len(bodies)]
    return path, '{"prompt": ' if body is None else json.dumps(body)
