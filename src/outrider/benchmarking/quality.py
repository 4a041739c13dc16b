"""Accuracy with and without speculation: the same problems, asked greedily both ways, in turn.

What comes first is whether the answers are the same text, for that is what lossless means; accuracy only confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.counters import settled_metrics
from outrider.benchmarking.problems import Problem
from outrider.benchmarking.statistics import CONFIDENCE, mcnemar_exact
from outrider.errors import ConfigError

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One problem on one arm: a row of the record."""

    problem: str
    kind: str
    arm: str
    is_right: bool
    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str | None
    num_output_tokens: int | None
    num_draft_tokens: int | None
    """None where the server does not say."""
    error: str | None

    def same_as(self, other: Answer) -> bool:
        """Whether both wrote the same; ids of calls are the server's and do not count."""
        return self._written() == other._written()

    def _written(self) -> tuple[Any, ...]:
        calls = [(call.get("name"), call.get("arguments")) for call in self.tool_calls]
        return self.text, self.reasoning, calls, self.finish_reason


def run_quality(
    client: ServerClient,
    problems: Sequence[Problem],
    *,
    plain_client: ServerClient | None = None,
    max_tokens: int = 1024,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[tuple[Answer, Answer]], object] = lambda _: None,
) -> list[tuple[Answer, Answer]]:
    """Ask every problem plainly and speculatively; the arm that goes first takes turns. Pairs of (plain, speculative).

    `keep` gets each pair at once, for a run that may be stopped. Plain is the request field `speculative.enabled`, or a
    server of its own. ConfigError where drafts were made although they were switched off, which is seen at the first
    problem.
    """
    arms = {PLAIN: plain_client or client, SPECULATIVE: client}
    pairs = []
    for number, problem in enumerate(problems):
        found = dict[str, Answer]()
        for arm in (PLAIN, SPECULATIVE) if number % 2 == 0 else (SPECULATIVE, PLAIN):
            progress(f"{problem.name}, {arm}")
            found[arm] = _ask(arms[arm], problem, arm, max_tokens)
        if found[PLAIN].num_draft_tokens:
            raise ConfigError(
                f"{found[PLAIN].num_draft_tokens} tokens were drafted although drafting was switched off: the server "
                "ignores `speculative.enabled`, or others use it. Name one without a drafter with --plain-url."
            )
        pair = found[PLAIN], found[SPECULATIVE]
        pairs.append(pair)
        keep(pair)
    return pairs


def summarize_quality(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    """Same text first, then accuracy in each arm, and McNemar's exact test with the bound that n allows."""
    sound = [pair for pair in pairs if not (pair[0].error or pair[1].error)]
    different = [plain.problem for plain, speculative in sound if not plain.same_as(speculative)]
    only_plain = sum(plain.is_right and not speculative.is_right for plain, speculative in sound)
    only_speculative = sum(speculative.is_right and not plain.is_right for plain, speculative in sound)
    test = mcnemar_exact(only_plain, only_speculative, num_pairs=len(sound)) if sound else None
    num_drafted = [speculative.num_draft_tokens for _, speculative in pairs if speculative.num_draft_tokens is not None]
    faults = []
    if different:
        faults.append("different_text")
    if len(sound) < len(pairs):
        faults.append("errors")
    if num_drafted and not any(num_drafted):
        faults.append("nothing_drafted")
    if only_plain > only_speculative and test is not None and test.p_value < 1 - CONFIDENCE:
        faults.append("accuracy")
    return {
        "num_problems": len(pairs),
        "num_errors": len(pairs) - len(sound),
        "num_same_text": len(sound) - len(different),
        "different_text": different,
        "accuracy": {PLAIN: _share(sound, 0), SPECULATIVE: _share(sound, 1)},
        "only_plain_right": only_plain,
        "only_speculative_right": only_speculative,
        "mcnemar_p": test.p_value if test else None,
        "max_discordance": test.max_discordance if test else None,
        "by_kind": {kind: _by_kind(sound, kind) for kind in sorted({plain.kind for plain, _ in sound})},
        "drafting_confirmed": bool(num_drafted) and any(num_drafted),
        "faults": faults,
        "verdict": "fail" if faults else "pass",
    }


def _ask(client: ServerClient, problem: Problem, arm: str, max_tokens: int) -> Answer:
    extra = {
        "speculative": {"enabled": arm == SPECULATIVE},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    kind = client.server_kind()
    _, before = settled_metrics(client, kind)
    sample = client.complete(problem.request(max_tokens=max_tokens, extra=extra))
    _, after = settled_metrics(client, kind)
    return Answer(
        problem=problem.name,
        kind=problem.kind,
        arm=arm,
        is_right=sample.error is None and problem.is_right(sample),
        text=sample.text,
        reasoning=sample.reasoning,
        tool_calls=sample.tool_calls,
        finish_reason=sample.finish_reason,
        num_output_tokens=sample.num_output_tokens,
        num_draft_tokens=_num_draft_tokens(sample, (after - before).num_draft_tokens),
        error=sample.error,
    )


def _num_draft_tokens(sample: Sample, counted: int | None) -> int | None:
    """The answer's own figure where it has one: counters may have other clients' drafts."""
    own = (sample.acceptance or {}).get("num_draft_tokens")
    return counted if own is None else int(own)


def _share(pairs: Sequence[tuple[Answer, Answer]], side: int) -> float | None:
    return sum(pair[side].is_right for pair in pairs) / len(pairs) if pairs else None


def _by_kind(pairs: Sequence[tuple[Answer, Answer]], kind: str) -> dict[str, Any]:
    alike = [pair for pair in pairs if pair[0].kind == kind]
    num_same = sum(plain.same_as(speculative) for plain, speculative in alike)
    return {
        "num_problems": len(alike),
        "num_same_text": num_same,
        PLAIN: _share(alike, 0),
        SPECULATIVE: _share(alike, 1),
    }
