"""Tables at 80 columns. Seen red: a column of nothing kept, a wide table not folded."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from outrider.cli.bench_tables import decode_tables, parts_table, show_decode


def result(*, peer: bool = False, batches: tuple[int, ...] = (1,)) -> dict[str, Any]:
    keys = [{"num_speculative_tokens": n, "batch": batch, "prompt_tokens": 512} for n in (0, 7) for batch in batches]
    figures = {
        "measured_acceptance_length": 5.23,
        "gap_p50_us": 412.0,
        "gap_p99_us": 1234.0,
        "host_p50_us": 321.0,
        "ready_s": 12.3,
        "parts": [],
    }
    row = {"tokens_per_s": 1234.5, "ms_per_cycle": 19.53, "floor_share": 0.83, "prefill_s": 0.123, "bit_exact": None}
    theirs = {"peer_tokens_per_s": 1111.1, "ratio": 1.11, "peer_prefill_s": 0.2, "prefill_ratio": 1.6}
    return {
        "target": "31b",
        "kernels": "gpu",
        "read_tb_per_s": 4.4,
        "cells": [{**key, **figures} for key in keys],
        "again": [],
        "summary": [
            {**key, **row, **{name: value if peer else None for name, value in theirs.items()}} for key in keys
        ],
    }


def texts(result: dict[str, Any], width: int) -> list[str]:
    found = []
    for table in decode_tables(result, width=width):
        out = io.StringIO()
        Console(file=out, width=width).print(table)
        found.append(out.getvalue())
    return found


def test_the_common_case_fits_80_columns_and_has_no_column_of_nothing() -> None:
    (text,) = texts(result(), 80)
    assert "…" not in text
    assert all(part in text for part in ("1234.5", "412, 1234", "321", "12.3", "batch 1", "prompt 512"))
    assert not any(head in text for head in ("peer", "ratio", "exact"))


@pytest.mark.parametrize(("width", "num_tables"), [(80, 2), (160, 1)])
def test_a_wide_one_folds_and_names_its_cells_again(width: int, num_tables: int) -> None:
    found = texts(result(peer=True, batches=(1, 4)), width)
    assert len(found) == num_tables
    assert not any("…" in text for text in found)
    assert all("batch" in text and "│ 7 │     4 │" in text for text in found)
    assert "1111.1" in found[-1]


def test_only_the_cells_of_the_summary_are_rows_and_none_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    found = result()
    del found["summary"][1]
    (table,) = decode_tables(found, width=80)
    assert table.row_count == 1
    show_decode({**found, "summary": []})
    assert "no combination" in capsys.readouterr().err


def test_parts_are_shown_where_there_are_any() -> None:
    part = {"half": "verify", "part": "products", "ms": 2.0, "floor_ms": 1.5, "tb_per_s": 3.0, "floor_share": 0.75}
    seen = {"half": "verify", "part": "other", "kernel": "odd", "grid": [1], "per_cycle": 2.0, "us": 5.0}
    cell = {"num_speculative_tokens": 7, "batch": 1, "prompt_tokens": 9, "parts": [part], "kernels_seen": [seen]}
    out = io.StringIO()
    Console(file=out, width=80).print(parts_table(cell))
    assert "75 %" in out.getvalue()
    assert "other: odd" in out.getvalue()
