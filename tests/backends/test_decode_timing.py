"""Decoding timed on the tiny pair. Seen red: the first token counted as decoded, prompts the same in every run."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.backends import decode_timing
from outrider.backends.decode_timing import (
    Cell,
    DecodeWork,
    begin_batch,
    engine_config,
    num_steps,
    pooled_figures,
    random_prompt,
    time_decoding,
)
from outrider.backends.dummy import build_dummy
from outrider.backends.floor import CycleBytes
from outrider.backends.local import make_engine
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError, EngineFault
from outrider.kernels.reference import TorchKernels

CPU = torch.device("cpu")

WORK = DecodeWork(
    target="tiny",
    prompt_tokens=20,
    max_tokens=9,
    prefill_rows=8,  # a batch takes several steps to prefill
    num_runs=2,
    device="cpu",
    is_exactness_checked=True,
)


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_timing, "read_bandwidth", lambda device: 1e9)


def timed(*cells: Cell, work: DecodeWork = WORK) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    return time_decoding(work, cells, progress=messages.append), messages


def test_plain_and_drafted_cells_end_to_end() -> None:
    cells = [Cell(num_speculative_tokens=0, batch=2), Cell(num_speculative_tokens=3, batch=2, prompt_tokens=37)]
    found, messages = timed(*cells)
    json.dumps(found)
    assert len(messages) == num_steps(WORK, cells)
    plain, drafted = found["cells"]
    for row in plain["rows"]:
        assert (row["num_decoded_tokens"], row["num_cycles"]) == (2 * 8, 8)
        assert row["acceptance_length"] is None
    assert all(row["num_decoded_tokens"] == 2 * 8 for row in drafted["rows"])
    assert 1.0 <= drafted["measured_acceptance_length"] <= 4.0
    for cell in found["cells"]:
        rates = [16 / row["decode_s"] for row in cell["rows"]]
        assert cell["tokens_per_s"] == pytest.approx(sum(rates) / 2)
        assert cell["floor_share"] == pytest.approx(cell["bytes_per_cycle"] / 1e6 / cell["ms_per_cycle"])
        assert (cell["parts"], cell["gap_p99_us"], cell["host_p99_us"]) == ([], None, None)
    assert (plain["prompt_tokens"], drafted["prompt_tokens"]) == (20, 37)
    assert drafted["bytes_per_cycle"] > plain["bytes_per_cycle"]
    assert not found["is_synthetic"]
    assert found["environment"]["python"]
    if found["row_invariant"]:
        assert [cell["bit_exact"] for cell in found["cells"]] == [True, True]


@pytest.mark.skipif(
    "synthetic_acceptance_length" not in EngineConfig.__dataclass_fields__, reason="acceptance cannot be imposed yet"
)
def test_acceptance_is_imposed() -> None:
    work = DecodeWork(target="tiny", prompt_tokens=8, max_tokens=200, num_runs=1, device="cpu")
    found, _ = timed(Cell(num_speculative_tokens=3, batch=1, acceptance_length=3.0), work=work)
    assert found["cells"][0]["measured_acceptance_length"] == pytest.approx(3.0, abs=0.5)


def test_a_batch_begins_together() -> None:
    """Nobody decodes while others are prefilled, so that all that is timed is whole cycles of the whole batch."""
    kernels, cell = TorchKernels(torch.float32), Cell(num_speculative_tokens=0, batch=3)
    models = build_dummy("tiny", kernels=kernels, dtype=torch.float32, device=CPU, context_length=30)
    engine = make_engine(models.target, None, None, engine_config(WORK, cell, models, CPU))
    requests = begin_batch(engine, WORK, cell, run="0")
    assert [len(request.output_token_ids) for request in requests] == [1, 1, 1]


def test_prompts_differ_by_run_and_request_and_in_nothing_else() -> None:
    prompt = random_prompt(WORK, run="0", index=0, vocab_size=512)
    assert prompt == random_prompt(WORK, run="0", index=0, vocab_size=512)
    assert prompt != random_prompt(WORK, run="1", index=0, vocab_size=512)
    assert prompt != random_prompt(WORK, run="0", index=1, vocab_size=512)
    assert (len(prompt), prompt[0]) == (20, 2)
    assert max(prompt) < 512


def test_figures_are_medians_of_runs_and_percentiles_of_all_gaps() -> None:
    host = {"host_us": [8.0, 60.0], "launch_us": [5.0, 30.0]}
    run = {"num_cycles": 50, "num_decoded_tokens": 100, "acceptance_length": None}
    rows = [
        {**run, "decode_s": 1.0, "prefill_s": 0.2, "gaps_us": [1.0, 2.0], "host_us": [7.0], "launch_us": [4.0]},
        {**run, "decode_s": 2.0, "prefill_s": 0.3, "gaps_us": [3.0, 90.0], "acceptance_length": 2.0, **host},
        {**run, "decode_s": 9.0, "prefill_s": 0.9, "gaps_us": [], "host_us": [], "launch_us": []},
    ]
    found = pooled_figures(rows, CycleBytes({"head": 1}, {"products": 19_999_999}), bandwidth=1e9)
    assert found["tokens_per_s"] == 50.0
    assert (found["ms_per_cycle"], found["floor_ms"], found["floor_share"]) == (40.0, 20.0, 0.5)
    assert (found["gap_p50_us"], found["gap_p99_us"]) == (2.0, 90.0)
    assert (found["host_p50_us"], found["host_p99_us"], found["launch_p50_us"]) == (8.0, 60.0, 5.0)
    assert (found["prefill_s"], found["measured_acceptance_length"]) == (0.3, 2.0)


@pytest.mark.parametrize(
    ("cell", "named"),
    [
        (Cell(num_speculative_tokens=8, batch=1), "num_speculative_tokens=8.*at most 7"),
        (Cell(num_speculative_tokens=0, batch=0), "max_seats=0"),
    ],
)
def test_what_drafter_or_engine_cannot_do_is_refused(cell: Cell, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        timed(cell)


@pytest.mark.parametrize(
    "sizes", [{"max_tokens": 1}, {"prompt_tokens": 0}, {"num_runs": 0}, {"context_length": 528, "max_tokens": 512}]
)
def test_sizes_that_leave_nothing_to_time_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DecodeWork(**{"target": "tiny", "prompt_tokens": 20, **sizes})  # type: ignore[arg-type]


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="70b"):
        timed(Cell(num_speculative_tokens=0, batch=1), work=DecodeWork(target="70b", device="cpu"))


def test_a_prompt_that_fails_is_not_waited_for() -> None:
    failed = SimpleNamespace(output_token_ids=[], finish_reason="error")
    engine = SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=99)))
    engine.add, engine.prefill = lambda *_: failed, lambda: None
    with pytest.raises(EngineFault, match="before its first token"):
        decode_timing.begin_batch(engine, WORK, Cell(num_speculative_tokens=0, batch=2), run="0")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 3])
def test_parts_of_a_cycle_on_a_gpu(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = DecodeWork(target="tiny", prompt_tokens=40, max_tokens=24, num_runs=1, device="cuda")
    found, _ = timed(Cell(num_speculative_tokens=length, batch=1), work=work)
    (cell,) = found["cells"]
    assert cell["traced_cycles"] == 8
    assert {row["part"] for row in cell["parts"]} >= {"products"}
    assert {row["half"] for row in cell["parts"]} <= ({"draft", "verify"} if length else {"verify"}) | {"cycle"}
    in_parts = sum(row["ms"] for row in cell["parts"])
    listed = sum(row["us"] * row["per_cycle"] for row in cell["kernels_seen"]) / 1e3
    assert in_parts == pytest.approx(listed)
    assert torch.cuda.is_available()


@pytest.mark.gpu
def test_prompts_of_several_lengths_on_a_gpu() -> None:
    work = DecodeWork(target="tiny", prompt_tokens=600, max_tokens=24, num_runs=2, device="cuda")
    cells = [Cell(num_speculative_tokens=3, batch=2, prompt_tokens=tokens) for tokens in (40, 600)]
    found, _ = timed(*cells, work=work)
    assert [cell["prompt_tokens"] for cell in found["cells"]] == [40, 600]
    for cell in found["cells"]:
        assert cell["prefill_s"] > 0
        assert all(row["num_decoded_tokens"] == 2 * 23 for row in cell["rows"])
    assert found["cells"][1]["bytes_per_cycle"] > found["cells"][0]["bytes_per_cycle"]
