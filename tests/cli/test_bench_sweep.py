from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli import bench_sweep
from outrider.errors import OutriderError
from tests.cli.test_bench_run import PLAN, SMALL, run, url
from tests.serving import serve

__all__ = ["url"]  # the fixture


def test_sweep_prints_rows_and_writes_one_record(url: str, tmp_path: Path) -> None:
    record = tmp_path / "sweep.json"
    options = ["-n", "0,2", "-w", "chat", "--rounds", "1", "--json", "--record", str(record)]
    shown = run("sweep", url, *SMALL, *options)
    assert shown.exit_code in (0, 1), shown.output
    rows = json.loads(shown.stdout)["summary"]
    assert [row["num_speculative_tokens"] for row in rows] == [0, 2]
    assert json.loads(record.read_text())["summary"] == rows


def test_sweep_shows_a_table_and_a_verdict(url: str) -> None:
    shown = run("sweep", url, *SMALL, "-n", "0,2", "-w", "chat", "--rounds", "1", "--context-tokens", "900")
    assert "speed by draft length" in shown.stdout
    assert "is fastest" in shown.stdout


def test_sweep_goes_over_servers_that_were_started_with_a_length_each(url: str, tmp_path: Path) -> None:
    record = tmp_path / "servers.json"
    options = ["-w", "chat", "--rounds", "1", "--json", "--record", str(record)]
    with serve({"": replace(PLAN, acceptance_by_position=())}, context_length=8192) as plain:
        shown = run("sweep", f"0={plain.url}", f"2={url}", *SMALL, *options)
    assert shown.exit_code in (0, 1), shown.output
    written = json.loads(record.read_text())
    assert [arm["settings"]["url"] for arm in written["arms"]] == [plain.url, url]
    lengths = {row["num_speculative_tokens"]: row["mean_acceptance_length"] for row in written["summary"]}
    assert lengths == {0: None, 2: pytest.approx(2.2, abs=0.3)}


def test_losing_is_said_and_so_is_a_tie() -> None:
    row = {"workload": "chat", "concurrency": 1, "context_tokens": None, "temperature": 0.0, "faults": []}
    best = {**row, "num_speculative_tokens": 0, "is_best": True, "drafter_loses": True, "ratio_interval": None}
    other = {**best, "num_speculative_tokens": 3, "is_best": False, "ratio_interval": [0.97, 1.01]}
    assert bench_sweep._verdict(best, [best, other]).endswith("loses here, n = 0 is fastest; not told apart from n = 3")
    slower = {**other, "ratio_interval": [0.9, 0.95]}
    best |= {"num_speculative_tokens": 5, "drafter_loses": False}
    assert bench_sweep._verdict(best, [best, slower]).endswith("n = 5 is fastest")
    spoiled = {**slower, "faults": ["client_bound"]}
    assert "runs were spoiled" in bench_sweep._verdict(best, [best, spoiled])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sweep", "URL", "--temperature", "nan"], "below 0"),
        (["sweep", "URL", "-n", "3"], "two or more"),
        (["sweep", "URL", "-n", "a"], "--num-speculative-tokens"),
        (["sweep", "URL", "URL"], "0=URL 4=URL"),
        (["sweep", "0=URL", "x=URL"], "0=URL 4=URL"),
        (["sweep", "0=URL", "00=URL"], "two servers have one draft length"),
        (["sweep", "0=URL", "4=URL", "-n", "0,4"], "Leave it out"),
        (["sweep", "4=URL"], "two or more"),
        (["sweep", "URL", "--temperature", "x"], "--temperature"),
        (["sweep", "URL", "--temperature", "-1"], "below 0"),
        (["sweep", "URL", "-n", "0,2", "-w", "chat", "--context-tokens", "9"], "tokens as it is"),
        (
            ["sweep", "URL", "-n", "0,2", "-w", "long-context", "--context-tokens", "90"],
            "refused a prompt of long-context",
        ),
    ],
)
def test_bad_input_is_refused(url: str, arguments: list[str], named: str) -> None:
    shown = run(*[url if each == "URL" else each for each in arguments])
    assert isinstance(shown.exception, OutriderError), shown.output
    assert named in str(shown.exception)
