"""Cells and records. Seen red: a ratio upside down, only the first pass of ours counted."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from outrider.benchmarking import decode
from outrider.benchmarking.decode import CellPlan, decode_record, plan_cells, run_ours, summarize
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


def test_a_summary_is_the_mean_of_ours_beside_the_peer() -> None:
    (row,) = summarize([ours(250.0, floor_share=0.8), ours(375.0, floor_share=0.9)], PEER)
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
    (alone,) = summarize([ours(280.0, floor_share=None, acceptance_length=None)])
    assert alone["acceptance_length"] == 5.1
    assert (alone["peer_tokens_per_s"], alone["ratio"], alone["floor_share"]) == (None, None, None)
    assert (alone["peer_prefill_s"], alone["prefill_ratio"]) == (None, None)


def test_a_record_holds_both_passes_and_the_peer_between() -> None:
    record = decode_record([ours(280.0), ours(320.0)], PEER)
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


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, EngineFault)])
def test_our_own_failure_keeps_its_exit_code(
    code: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, stdout="")
    monkeypatch.setattr(decode.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(error, match=f"exit code {code}"):
        run_ours(["--target", "31b"])
