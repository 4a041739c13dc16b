"""The self-test tells a drafter that works from one that does not, and no drafter from both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.backends.base import Speculation
from outrider.backends.readiness import MIN_ACCEPTANCE_LENGTH, SELF_TEST_PROMPTS, SELF_TEST_TOKENS, self_test
from outrider.core import AcceptanceStats, Chunk, RequestSummary, SamplingParams
from outrider.errors import ConfigError, EngineFault


class AnsweringBackend:
    """Answers each prompt at once from another thread, with the same outcome."""

    def __init__(self, *, num_accepted: int = 0, num_cycles: int = 0, finish_reason: str = "length") -> None:
        self.stats = AcceptanceStats(num_cycles, 3 * num_cycles, num_accepted)
        self.finish_reason, self.asked = finish_reason, []
        self.tokenizer: Any = self

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams, on_chunk: Callable[[Chunk], None]) -> int:
        self.asked.append((list(prompt_token_ids), params))
        error = "broken" if self.finish_reason == "error" else None
        summary = RequestSummary(1, 0, SELF_TEST_TOKENS, self.stats, error)
        chunks = [Chunk(0, "a", (1,), 0), Chunk(0, "", (), 0, self.finish_reason, summary=summary)]
        threading.Thread(target=lambda: [on_chunk(chunk) for chunk in chunks]).start()
        return len(self.asked)

    def speculation(self) -> Speculation:
        return Speculation(is_active=False, drafter=None, num_speculative_tokens=0, reason="no drafter is loaded")


def check(backend: AnsweringBackend, **options: bool) -> Any:
    return self_test(backend, **options)  # type: ignore[arg-type]


def test_a_drafter_that_works_is_ready() -> None:
    backend = AnsweringBackend(num_accepted=6, num_cycles=30)  # 1.2 exactly
    result = check(backend, strict=True)
    assert (result.state, result.causes, result.acceptance.num_cycles) == ("ready", (), 90)
    assert [params.max_tokens for _, params in backend.asked] == [SELF_TEST_TOKENS] * len(SELF_TEST_PROMPTS) == [64] * 3
    assert all(params.is_greedy for _, params in backend.asked)


def test_low_acceptance_is_a_state_with_causes_and_an_error_if_strict() -> None:
    backend = AnsweringBackend(num_accepted=5, num_cycles=30)
    result = check(backend)
    assert result.state == "acceptance-low"
    assert len(result.causes) >= 2
    with pytest.raises(ConfigError, match=rf"1\.17.*below {MIN_ACCEPTANCE_LENGTH}.*another target"):
        check(backend, strict=True)


def test_no_drafts_stop_the_boot_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"no drafter is loaded.*allow_no_drafter"):
        check(AnsweringBackend())
    assert check(AnsweringBackend(), allow_no_drafter=True).state == "plain"


@pytest.mark.parametrize(("finish_reason", "match"), [("error", "broken"), ("abort", "ended early")])
def test_answers_that_fail_stop_the_boot(finish_reason: str, match: str) -> None:
    with pytest.raises(EngineFault, match=match):
        check(AnsweringBackend(num_accepted=9, num_cycles=9, finish_reason=finish_reason))


def test_an_engine_that_hangs_stops_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.backends.readiness.SELF_TEST_TIMEOUT_S", 0.01)
    backend = AnsweringBackend()
    backend.submit = lambda *args: 0  # type: ignore[assignment,method-assign]
    with pytest.raises(EngineFault, match="no answer"):
        check(backend)
