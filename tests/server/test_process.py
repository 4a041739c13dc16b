from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.errors import ConfigError
from outrider.server.app import create_app
from outrider.server.process import SWITCH_INTERVAL_S, DrainingServer, run_server
from tests.serving import eventually

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from outrider.backends.scripted import Script, ScriptedBackend, Step
from outrider.errors import ConfigError
from outrider.server.app import ServerConfig, create_app
from outrider.server.chat import PLAIN
from outrider.server.process import run_server

port, drain_s, fails = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "fails"
slow = Script(tuple(Step((97,), delay_s=0.02) for _ in range(50)))

def boot(readiness):
    if fails:
        raise ConfigError("max_seats=9 does not fit")
    backend = ScriptedBackend({"": slow})
    backend.start()
    readiness.serve(backend, PLAIN)

try:
    app = create_app(None, ServerConfig(drain_s=drain_s), model="m")
    run_server(app, boot, host="127.0.0.1", port=port, drain_s=drain_s, on_listening=lambda *at: None)
except ConfigError as error:
    sys.exit(str(error))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def process(drain_s: float, *, fails: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    command = [sys.executable, "-c", PROGRAM, str(port), str(drain_s), "fails" if fails else "works"]
    with subprocess.Popen(command, cwd=ROOT / "src", stderr=subprocess.PIPE, text=True) as running:
        yield running, f"http://127.0.0.1:{port}"
        running.kill()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(("drain_s", "last"), [(10.0, "[DONE]"), (0.0, "shutting down")])
def test_sigterm_lets_answers_end_or_says_why_not(drain_s: float, last: str) -> None:
    with process(drain_s) as (running, url):
        eventually(lambda: is_ready(url), timeout_s=30)
        body = {"prompt": "x", "stream": True, "max_tokens": 50}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            assert last in list(lines)[-2]
        assert running.wait(timeout=20) in (0, -signal.SIGTERM)


def test_a_boot_that_fails_ends_the_server_with_its_reason() -> None:
    with process(0.0, fails=True) as (running, _):
        assert running.wait(timeout=30) == 1
        assert running.stderr is not None
        assert "max_seats=9 does not fit" in running.stderr.read()


def begin(port: int, heard: list[tuple[str, int]]) -> None:
    """Serve nothing on a port."""
    run_server(
        create_app(None, model="m"),
        lambda readiness: None,
        host="127.0.0.1",
        port=port,
        drain_s=0.0,
        on_listening=lambda address, port: heard.append((address, port)),
    )


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(ConfigError, match=f"--port {port}"):
            begin(port, heard := [])
        assert time.monotonic() - start < 5
        assert not heard


def test_the_port_that_the_system_chose_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("sys.setswitchinterval", calls.append)
    monkeypatch.setattr("gc.freeze", lambda: calls.append("freeze"))

    def run(server: DrainingServer, sockets: list[socket.socket]) -> None:
        for each in sockets:
            each.close()
        eventually(lambda: calls == [SWITCH_INTERVAL_S, "freeze"])  # once it has booted

    monkeypatch.setattr(DrainingServer, "run", run)
    begin(0, heard := [])
    ((address, port),) = heard
    assert address == "127.0.0.1"
    assert port > 0
