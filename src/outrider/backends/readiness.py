"""Before the first request: does the drafter earn its keep? No torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from outrider import metrics
from outrider.backends.base import ServingBackend
from outrider.core import AcceptanceStats, Chunk, SamplingParams
from outrider.errors import ConfigError, EngineFault

SELF_TEST_PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "The capital of France is",
    "def fibonacci(n):\n",
)
SELF_TEST_TOKENS = 64
MIN_ACCEPTANCE_LENGTH = 1.2
SELF_TEST_TIMEOUT_S = 600.0
LIKELY_CAUSES = (
    "the drafter was trained for another target, or for another revision or quantisation of this one",
    "the drafter's chat template or language is far from the self-test's plain English and code",
    "its config names other target layers, another mask token or another layout than it was trained with",
)


@dataclass(frozen=True)
class SelfTest:
    """What the self-test found."""

    state: str
    """"ready", "acceptance-low", or "plain": nothing was drafted, because there is nothing that drafts."""
    acceptance: AcceptanceStats
    causes: tuple[str, ...] = ()
    """Likely ones of a low acceptance."""


def self_test(backend: ServingBackend, *, strict: bool = False, allow_no_drafter: bool = False) -> SelfTest:
    """Run the built-in prompts through a backend that was started.

    EngineFault where an answer fails or stays out; ConfigError where nothing was drafted unless that is allowed, and
    under `strict` where the mean acceptance length is below MIN_ACCEPTANCE_LENGTH.
    """
    acceptance = metrics.pool(_answers(backend))
    mean = metrics.mean_acceptance_length(acceptance)
    if mean is None:
        if not allow_no_drafter:
            reason = backend.speculation().reason
            raise ConfigError(f"nothing was drafted in the self-test: {reason}. Give a drafter, or allow_no_drafter.")
        return SelfTest("plain", acceptance)
    if mean >= MIN_ACCEPTANCE_LENGTH:
        return SelfTest("ready", acceptance)
    if strict:
        causes = "; ".join(LIKELY_CAUSES)
        raise ConfigError(
            f"mean acceptance length {mean:.2f} in the self-test is below {MIN_ACCEPTANCE_LENGTH}. Likely: {causes}. "
            "Give another drafter, or leave out strict."
        )
    return SelfTest("acceptance-low", acceptance, LIKELY_CAUSES)


def _answers(backend: ServingBackend) -> list[AcceptanceStats]:
    """Acceptance of each built-in prompt, all answered at once."""
    params = SamplingParams(max_tokens=SELF_TEST_TOKENS, ignore_eos=True)
    last: list[Chunk] = []
    done = threading.Semaphore(0)

    def on_chunk(chunk: Chunk) -> None:
        if chunk.finish_reason is not None:
            last.append(chunk)
            done.release()

    for prompt in SELF_TEST_PROMPTS:
        backend.submit(backend.tokenizer.encode(prompt), params, on_chunk)
    for _ in SELF_TEST_PROMPTS:
        if not done.acquire(timeout=SELF_TEST_TIMEOUT_S):
            raise EngineFault(f"the self-test had no answer after {SELF_TEST_TIMEOUT_S:.0f} s. Use a faster machine.")
    summaries = [chunk.summary for chunk in last]
    errors = [summary.error for summary in summaries if summary is not None and summary.error]
    if errors or any(chunk.finish_reason != "length" for chunk in last):
        raise EngineFault(
            f"the self-test failed: {errors[0] if errors else 'an answer ended early'}. Check the weights."
        )
    return [summary.acceptance for summary in summaries if summary is not None]
