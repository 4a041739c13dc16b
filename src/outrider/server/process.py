"""The serving process: it listens at once, boots its backend meanwhile, and drains when it is told to end."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from outrider.errors import ConfigError
from outrider.server.readiness import Readiness

SWITCH_INTERVAL_S = 2e-4  # Python's own is 5 ms
_ANSWER_S = 5  # for the last events to reach clients after the backend has stopped

Boot = Callable[[Readiness], None]


class DrainingServer(uvicorn.Server):
    """Stops the backend while clients still listen, so that each hears the end of its answer or why there is none."""

    def __init__(self, config: uvicorn.Config, readiness: Readiness, drain_s: float) -> None:
        super().__init__(config)
        self._readiness, self._drain_s = readiness, drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close what is still open."""
        draining = asyncio.create_task(asyncio.to_thread(self._readiness.drain, self._drain_s))
        await super().shutdown(sockets)
        await draining


def run_server(
    app: FastAPI, boot: Boot, *, host: str, port: int, drain_s: float, on_listening: Callable[[str, int], None]
) -> None:
    """Serve until SIGTERM or SIGINT. `boot` makes the backend on a thread of its own and calls `Readiness.serve`.

    `on_listening` hears address and port, which the system chose for port 0.

    What boot raises ends the server and is raised here; ConfigError where the port cannot be had.
    """
    listener = _listen(host, port)
    readiness: Readiness = app.state.readiness
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(drain_s) + _ANSWER_S, ws="none")
    server = DrainingServer(config, readiness, drain_s)
    failures: list[Exception] = []

    def booted() -> None:
        try:
            boot(readiness)
            _spare_the_engine()
        except Exception as error:  # noqa: BLE001  # raised again by the thread that serves
            failures.append(error)
            readiness.fail(str(error))
            server.should_exit = True

    threading.Thread(target=booted, name="boot", daemon=True).start()
    on_listening(*listener.getsockname()[:2])
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down
        server.run([listener])
    if failures:
        raise failures[0]


def _spare_the_engine() -> None:
    """A device waits while the engine's thread does: for another thread's turn to end, or a collection of garbage.

    What booting has made stays for good, and to look through all of it takes 0.1 s.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port} cannot be listened on: {error}. Choose another.") from error
    return listener
