"""The demo's bookkeeping, on a scripted backend with a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.benchmarking import demo
from outrider.core import Chunk, Prompt, SamplingParams


class FakeBackend:
    """Emits fixed chunks; every chunk takes `chunk_s` on the fake clock."""

    def __init__(self, clock: list[float], chunks: list[Chunk], chunk_s: float) -> None:
        self.clock, self.chunks, self.chunk_s = clock, chunks, chunk_s
        self.calls: list[SamplingParams | None] = []

    def encode(self, prompt: Prompt) -> list[int]:
        return [ord(letter) for letter in prompt if isinstance(letter, str)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        del prompt
        self.calls.append(params)
        for chunk in self.chunks:
            self.clock[0] += self.chunk_s
            yield chunk


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(demo.time, "perf_counter", lambda: now[0])
    return now


def config(**params: float) -> demo.DemoConfig:
    sampling = SamplingParams(max_tokens=5, **params)  # type: ignore[arg-type]
    return demo.DemoConfig(params=sampling, prompts=("abcdabcd", "xy"), num_speculative_tokens=3)


def plain_chunks() -> list[Chunk]:
    return [Chunk(0, str(i), (i,), 0) for i in (1, 2, 3, 4, 5)]


def drafted_chunks() -> list[Chunk]:
    return [
        Chunk(0, "1", (1,), 0),
        Chunk(0, "234", (2, 3, 4), 2, None, num_draft_tokens=3),
        Chunk(0, "5", (5,), 0, "length", num_draft_tokens=0),
    ]


def run(clock: list[float], settings: demo.DemoConfig) -> tuple[list[demo.Row], list[tuple[int, str]]]:
    arms = {
        demo.PLAIN: FakeBackend(clock, plain_chunks(), 1.0),
        demo.SPECULATIVE: FakeBackend(clock, drafted_chunks(), 1.0),
        demo.TORCH: FakeBackend(clock, plain_chunks(), 6.0),
    }
    order: list[tuple[int, str]] = []

    def show(arm: str, chunk: Chunk) -> None:
        del arm, chunk
        clock[0] += 100.0  # what showing a chunk takes is no decode time

    rows = demo.run_demo(
        arms,  # type: ignore[arg-type]
        settings,
        on_chunk=show,
        on_prompt=lambda index, arm, _prompt: order.append((index, arm)),
    )
    return rows, order


def test_arms_alternate_and_only_decode_time_counts(clock: list[float]) -> None:
    settings = config()
    rows, order = run(clock, settings)
    assert order == [
        (0, "plain"), (0, "speculative"), (0, "torch"), (1, "speculative"), (1, "plain"), (1, "torch"),
    ]  # fmt: skip
    summary = demo.summarize(rows, settings)
    assert summary["identical"] is True
    assert summary["speedup"] == pytest.approx(4.0 / 2.0)  # four cycles against two, after the first token
    assert summary["kernel_gain"] == pytest.approx(6.0)
    assert summary["plain_tokens_per_s"] == pytest.approx(1.0)
    assert summary["plain_prefill_s"] == pytest.approx(2.0)
    assert summary["mean_acceptance_length"] == pytest.approx(3.0)  # the last cycle drafted nothing: not counted
    assert summary["acceptance_by_position"] == (1.0, 1.0, 0.0)
    assert summary["prompts"] == 2


def test_a_cycle_inside_a_repeat_is_told_apart(clock: list[float]) -> None:
    """The anchor of the first cycle is token 1, which ends no 4-gram seen before; then "abcd" comes again."""
    row = demo.run_prompt(
        FakeBackend(clock, [Chunk(0, "", (97, 98, 99, 100), 0), Chunk(0, "", (7,), 0, None, 3)], 1.0),  # type: ignore[arg-type]
        "speculative",
        0,
        "abcdabcd",
        SamplingParams(max_tokens=5),
        lambda *_: None,
    )
    assert row.acceptance.num_cycles == 1
    assert row.outside_repeats.num_cycles == 0


def test_different_text_is_reported_and_sampled_text_is_not_compared(clock: list[float]) -> None:
    settings = config()
    rows, _ = run(clock, settings)
    rows[0].token_ids[-1] = 99
    assert demo.summarize(rows, settings)["identical"] is False
    assert demo.summarize(rows, config(temperature=1.0))["identical"] is None
