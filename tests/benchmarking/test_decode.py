"""Cells and records. Seen red: a ratio upside down, only the first pass of ours counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.benchmarking import decode
from outrider.benchmarking.decode import CellKey, CellPlan, DecodeTable, plan_cells, read_result, run_ours
from outrider.benchmarking.record import RecordFile
from outrider.errors import ConfigError, EngineFault


def test_all_combinations_with_their_acceptance() -> None:
    cells = plan_cells("0,7", "1,4", "5.23")
    assert [(cell.key, cell.acceptance_length) for cell in cells] == [
        ((0, 1, 512), 1.0),
        ((0, 4, 512), 1.0),
        ((7, 1, 512), 5.23),
        ((7, 4, 512), 5.23),
    ]
    long = plan_cells("0", "1,4", None, "512,8192")
    assert [cell.key for cell in long] == [(0, 1, 512), (0, 1, 8192), (0, 4, 512), (0, 4, 8192)]
    each = plan_cells("3,0,15", "1", "2.5,7")
    assert [cell.acceptance_length for cell in each] == [2.5, 1.0, 7.0]
    assert plan_cells("7", "2", None) == [
        CellPlan(num_speculative_tokens=7, batch=2, prompt_tokens=512, acceptance_length=None)
    ]


@pytest.mark.parametrize(
    ("lengths", "batches", "accepted", "named"),
    [
        ("a", "1", None, "--num-speculative-tokens 'a'"),
        ("0,,7", "1", None, "--num-speculative-tokens"),
        ("-1", "1", None, "at least 0"),
        ("7", "0", None, "--batch '0'"),
        ("7,7", "1", None, "different numbers"),
        ("7", "1", "8.5", "from 1 to 8"),
        ("7", "1", "nan", "from 1 to 8"),
        ("7", "1", "0.5", "--acceptance-length 0.5"),
        ("3,7", "1", "1,2,3", "3 numbers, but 2"),
        ("7", "1", "five", "--acceptance-length 'five'"),
    ],
)
def test_what_is_no_list_or_accepts_too_much_is_refused(
    lengths: str, batches: str, accepted: str | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_cells(lengths, batches, accepted)


def ours(
    tokens_per_s: float, *, floor_share: float | None = 0.8, acceptance_length: float | None = 5.23
) -> dict[str, Any]:
    cell = {
        "num_speculative_tokens": 7,
        "batch": 1,
        "prompt_tokens": 512,
        "prefill_s": 15 / tokens_per_s,
        "acceptance_length": acceptance_length,
        "measured_acceptance_length": 5.1,
        "tokens_per_s": tokens_per_s,
        "ms_per_cycle": 20.0,
        "floor_share": floor_share,
        "bit_exact": True,
        "rows": [{"run": "0"}],
    }
    return {
        "target": "31b",
        "kernels": "gpu",
        "row_invariant": True,
        "weights_s": 1.0,
        "read_tb_per_s": 4.4,
        "is_synthetic": True,
        "work": {"target": "31b", "max_tokens": 512},
        "cells": [cell],
        "failed": [],
        "environment": {"python": "3.12"},
    }


PEER = {
    (7, 1, 512): {
        "num_speculative_tokens": 7,
        "batch": 1,
        "prompt_tokens": 512,
        "prefill_s": 0.04,
        "tokens_per_s": 250.0,
        "ms_per_cycle": 21.0,
        "packages": {"vllm": "0.26.0"},
    }
}


def table(passes: list[dict[str, Any]], peer: dict[CellKey, dict[str, Any]] | None = None) -> DecodeTable:
    plan = [CellPlan(num_speculative_tokens=7, batch=1, prompt_tokens=512, acceptance_length=5.23)]
    return DecodeTable(plan, has_peer=bool(peer), ours=passes, peer=peer or {})


def test_a_summary_is_the_mean_of_ours_beside_the_peer() -> None:
    (row,) = table([ours(250.0, floor_share=0.8), ours(375.0, floor_share=0.9)], PEER).summary()
    assert row == {
        "target": "31b",
        "num_speculative_tokens": 7,
        "batch": 1,
        "prompt_tokens": 512,
        "acceptance_length": 5.23,
        "tokens_per_s": 312.5,
        "peer_tokens_per_s": 250.0,
        "ratio": 1.25,
        "floor_share": pytest.approx(0.85),
        "bit_exact": True,
        "ms_per_cycle": 20.0,
        "prefill_s": pytest.approx(0.05),
        "peer_prefill_s": 0.04,
        "prefill_ratio": pytest.approx(0.8),
    }
    (alone,) = table([ours(280.0, floor_share=None, acceptance_length=None)]).summary()
    assert alone["acceptance_length"] == 5.1
    assert (alone["peer_tokens_per_s"], alone["ratio"], alone["floor_share"]) == (None, None, None)
    assert (alone["peer_prefill_s"], alone["prefill_ratio"]) == (None, None)


def test_a_record_holds_both_passes_and_the_peer_between() -> None:
    record = table([ours(280.0), ours(320.0)], PEER).record()
    json.dumps(record)
    assert [arm["name"] for arm in record["arms"]] == ["outrider", "vllm", "outrider, again"]
    assert [(row["arm"], row["tokens_per_s"]) for row in record["rows"]] == [
        ("outrider", 280.0),
        ("outrider, again", 320.0),
        ("vllm", 250.0),
    ]
    assert record["environment"] == {"python": "3.12"}
    assert record["summary"][0]["ratio"] == 1.2
    assert record["workload"]["sha256"]


def test_what_is_missing_is_named_by_arm_and_cell_with_its_fault() -> None:
    found = DecodeTable(plan_cells("0,7", "1", "5.23"), has_peer=True)
    assert [(each["arm"], each["num_speculative_tokens"]) for each in found.missing()] == [
        ("outrider", 0),
        ("outrider", 7),
        ("vllm", 0),
        ("vllm", 7),
        ("outrider, again", 0),
        ("outrider, again", 7),
    ]
    plain = {"num_speculative_tokens": 0, "batch": 1, "prompt_tokens": 512}
    found.ours, found.peer = [{**ours(280.0), "failed": [{**plain, "fault": "no memory"}]}], PEER
    found.peer_faults = {(0, 1, 512): "the peer failed"}
    assert [(each["arm"], each["num_speculative_tokens"], each["fault"]) for each in found.missing()] == [
        ("outrider", 0, "no memory"),
        ("vllm", 0, "the peer failed"),
        ("outrider, again", 0, None),
        ("outrider, again", 7, None),
    ]
    assert [row["ratio"] for row in found.summary()] == [280.0 / 250.0]
    found.ours.append(ours(320.0))
    assert not any(each["num_speculative_tokens"] for each in found.missing())


def test_a_pass_is_read_back_from_its_record(tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    assert read_result(path) == {"cells": [], "failed": []}
    found = DecodeTable(plan_cells("0,7", "1", "5.23"), ours=[ours(280.0)])
    RecordFile(path).write(found.record(), missing=found.missing())
    assert read_result(path) == ours(280.0)
    (failed,) = read_result(path, unfinished="its process ended")["failed"]
    assert failed == {"num_speculative_tokens": 0, "batch": 1, "prompt_tokens": 512, "fault": "its process ended"}


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, EngineFault)])
def test_our_own_failure_keeps_its_exit_code(
    code: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.sys, "executable", script(tmp_path, f"raise SystemExit({code})"))
    with pytest.raises(error, match=f"exit code {code}" if code == 1 else "refused its settings"):
        run_ours(["--target", "31b"], tmp_path / "ours.json", lambda _found: None)


def test_a_pass_that_dies_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = DecodeTable(plan_cells("0,7", "1", "5.23"), ours=[ours(280.0)])
    RecordFile(tmp_path / "made").write(found.record(), missing=found.missing())
    dying = f"import shutil, sys; shutil.copy({str(tmp_path / 'made')!r}, sys.argv[-1]); raise SystemExit(9)"
    monkeypatch.setattr(decode.sys, "executable", script(tmp_path, dying))
    heard: list[dict[str, Any]] = []
    run_ours([], tmp_path / "ours.json", heard.append)
    assert [(len(each["cells"]), len(each["failed"])) for each in heard] == [(1, 0), (1, 1)]
    assert "exit code 9" in heard[-1]["failed"][0]["fault"]


def script(folder: Path, text: str) -> str:
    """A program in place of the interpreter that runs us."""
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)
