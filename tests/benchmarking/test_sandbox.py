from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.benchmarking.sandbox import Limits, run_code, without_network


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 + 1 == 2", "passed"),
        ("print('noise', end='')", "passed"),
        ("assert 1 + 1 == 3, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "exit code 0"),
        ("import os; os._exit(0)", "exit code 0"),
        ("x = bytearray(2**30)", "MemoryError"),
        ("open('big', 'wb').write(b'x' * 2**22)", ""),
    ],
)
def test_only_a_program_that_comes_to_its_end_passes(source: str, reason: str) -> None:
    ran = run_code(source)
    assert ran.passed == (reason == "passed")
    assert reason in ran.reason


def test_time_is_limited_and_children_end_too(tmp_path: Path) -> None:
    began = time.monotonic()
    late = tmp_path / "late"
    child = f"import time; time.sleep(1.0); open({str(late)!r}, 'w')"
    source = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert run_code(source, Limits(timeout_s=0.5)).reason == "timed out"
    assert run_code("while True: pass", Limits(cpu_s=1)).passed is False
    assert time.monotonic() - began < 8
    time.sleep(max(0.0, 1.6 - (time.monotonic() - began)))
    assert not late.exists()


def test_nothing_of_ours_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert run_code("import os; assert 'SECRET' not in os.environ; open('here', 'w').write('x')").passed
    assert not Path("here").exists()


@pytest.mark.skipif(not without_network(), reason="this system gives no network namespace to ordinary users")
def test_there_is_no_network() -> None:
    source = "import socket; socket.create_connection(('127.0.0.1', 1), timeout=1)"
    assert "unreachable" in run_code(source).reason.lower()
