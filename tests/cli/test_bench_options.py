from __future__ import annotations

import pytest

from outrider.cli import bench_options
from tests.cli.test_bench_run import run


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_missing_packages_are_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_options, "find_spec", lambda name: None if name == "httpx" else object())
    shown = run(command, "http://127.0.0.1:9")
    assert "httpx not installed. Run: pip install 'outrider[bench]'" in str(shown.exception)


def test_fields_of_the_body() -> None:
    given = ['speculative={"enabled": false}', "top_p=0.9"]
    assert bench_options.body_fields(given, ignore_eos=True) == {
        "ignore_eos": True,
        "speculative": {"enabled": False},
        "top_p": 0.9,
    }
