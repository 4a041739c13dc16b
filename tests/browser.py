"""Headless Chromium over its debugging pipe: open a page, evaluate in it, take its picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")


class Page:
    """One page of a browser that reads commands on a pipe and answers on another, JSON between NULs."""

    def __init__(self, commands: int, answers: int, url: str) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._num_sent, self._session = 0, None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            message += byte
        return bytes(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what is in sight."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Let go of both pipes."""
        self._commands.close()
        self._answers.close()


@contextmanager
def browse(url: str, profile: Path) -> Iterator[Page]:
    """A page in a browser of its own."""
    for_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    arguments = [
        "--headless",
        "--disable-gpu",
        "--no-first-run",
        "--window-size=1100,920",
        f"--user-data-dir={profile}",
    ]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    # the browser reads its fixed descriptor 3 and writes 4; the shell puts ours there
    shell = f'exec "$0" "$@" 3</dev/fd/{for_browser} 4>/dev/fd/{from_browser}'
    command = ["sh", "-c", shell, str(CHROMIUM), "--remote-debugging-pipe", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, pass_fds=(for_browser, from_browser), **quiet) as browser:
        os.close(for_browser)
        os.close(from_browser)
        page = Page(commands, answers, url)
        try:
            yield page
        finally:
            page.close()
            browser.terminate()
