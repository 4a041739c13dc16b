"""What the rows of a comparison say: the speedup, its interval, whether texts are the same, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider import metrics
from outrider.benchmarking.answer_quality import setting_faults
from outrider.benchmarking.compare import Arm, Row, again_name, decode_pace_s, whole_rounds
from outrider.benchmarking.statistics import (
    CONFIDENCE,
    Method,
    PairedRatio,
    Verdict,
    judge,
    log_ratios,
    mcnemar_exact,
    minimum_detectable_effect,
    noise_floor,
    paired_log_ratio,
)
from outrider.errors import EngineFault

MIN_UNITS = 2  # prompts that an interval takes
PromptRows = dict[int, list[Row]]


@dataclass(frozen=True, kw_only=True)
class Judging:
    """How a comparison is judged."""

    claim: float = 0.03
    """The smallest difference that matters, as a share."""
    confidence: float = CONFIDENCE
    method: Method = "t"


def compare_arms(
    rows: Sequence[Row], arms: Sequence[Arm], *, is_greedy: bool, judging: Judging | None = None
) -> list[dict[str, Any]]:
    """One summary for each arm against the first. Where the first ran again, that gives the noise floor, and its own
    summary stays out unless there is no other.

    EngineFault where two arms have no two prompts in common that both answered.
    """
    judging = judging or Judging()
    first, *others = arms
    by_arm = {arm.name: _by_prompt(rows, arm.name) for arm in arms}
    again = next((arm for arm in others if arm.name == again_name(first.name)), None)
    floor = None
    if again is not None:
        floor = noise_floor(_pairing(by_arm, first.name, again.name).ratio(judging))
    return [
        _summary(_pairing(by_arm, first.name, arm.name), first, arm, floor=floor, is_greedy=is_greedy, judging=judging)
        for arm in others
        if arm is not again or len(others) == 1
    ]


def compare_whole_rounds(
    rows: Sequence[Row], arms: Sequence[Arm], *, num_prompts: int, is_greedy: bool, judging: Judging | None = None
) -> list[dict[str, Any]]:
    """The same of the rounds that a stopped run has finished; none where those are too few to compare."""
    whole = whole_rounds(rows, num_arms=len(arms), num_prompts=num_prompts)
    try:
        return compare_arms(whole, arms, is_greedy=is_greedy, judging=judging)
    except EngineFault:
        return []


def best_arm(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """The fastest of those whose verdict is 'faster', or None; an arm with faults is never it, however fast it is."""
    sound = [each for each in summaries if each["verdict"] == "faster"]
    return max(sound, key=lambda each: float(each["speedup"]))["arm"] if sound else None


def _by_prompt(rows: Sequence[Row], arm: str) -> PromptRows:
    """Rows of an arm by prompt, in the order of their rounds."""
    found: PromptRows = {}
    for row in rows:
        if row.arm == arm:
            found.setdefault(row.prompt_index, []).append(row)
    return found


@dataclass(frozen=True)
class _Pairing:
    """Two arms' rows, and which prompts can be compared."""

    baseline: PromptRows
    other: PromptRows
    used: tuple[int, ...]
    """Prompts with a decode time in every round of both, and no loop on one side alone."""
    only_baseline_bad: int
    only_other_bad: int

    def ratio(self, judging: Judging, prompts: Sequence[int] | None = None) -> PairedRatio:
        """The speedup over some prompts, or over all that can be compared."""
        chosen = self.used if prompts is None else prompts
        seconds = [[_paces(arm[i]) for i in chosen] for arm in (self.baseline, self.other)]
        return paired_log_ratio(*seconds, confidence=judging.confidence, method=judging.method)

    @property
    def prompt_ratios(self) -> list[float]:
        """The speedup of each prompt that can be compared: the geometric mean over its rounds."""
        seconds = [[_paces(arm[i]) for i in self.used] for arm in (self.baseline, self.other)]
        return [float(ratio) for ratio in np.exp(log_ratios(*seconds))]

    @property
    def not_looping(self) -> list[int]:
        """Prompts that no answer to which repeats itself."""
        return [i for i in self.used if not _is_bad(self.baseline[i]) and not _is_bad(self.other[i])]

    @property
    def different(self) -> list[int]:
        """Prompts that the two arms answered differently in some round."""
        return [i for i in self.used if len(_answers(self.baseline[i] + self.other[i])) > 1]

    @property
    def unsteady(self) -> list[int]:
        """Prompts that one arm alone answered differently from round to round."""
        return [i for i in self.used if max(len(_answers(arm[i])) for arm in (self.baseline, self.other)) > 1]


def _pairing(by_arm: Mapping[str, PromptRows], baseline: str, other: str) -> _Pairing:
    first, second = by_arm[baseline], by_arm[other]
    one_sided = [i for i in first if _is_bad(first[i]) != _is_bad(second[i])]
    used = [i for i in first if i not in one_sided and _is_timed(first[i]) and _is_timed(second[i])]
    if len(used) < MIN_UNITS:
        causes = {row.sample.error or row.flag or "no time after its first token" for row in _rows(first, second)}
        raise EngineFault(
            f"{baseline} and {other} have {len(used)} prompts in common that can be compared. Of the others: "
            f"{'; '.join(sorted(causes))}. Give more or other --prompts, or mend the arm."
        )
    only_baseline = sum(_is_bad(first[i]) for i in one_sided)
    return _Pairing(first, second, tuple(used), only_baseline, len(one_sided) - only_baseline)


def _rows(*arms: PromptRows) -> Iterator[Row]:
    return (row for arm in arms for rows in arm.values() for row in rows if row.flag or not decode_pace_s(row.sample))


def _is_bad(rows: Sequence[Row]) -> bool:
    return any(row.flag for row in rows)


def _is_timed(rows: Sequence[Row]) -> bool:
    return all(row.sample.error is None and decode_pace_s(row.sample) for row in rows)


def _paces(rows: Sequence[Row]) -> list[float]:
    return [decode_pace_s(row.sample) or 0.0 for row in rows]


def _answers(rows: Sequence[Row]) -> set[str]:
    return {repr((row.sample.reasoning, row.sample.text, row.sample.tool_calls)) for row in rows}


def _summary(
    pairing: _Pairing, baseline: Arm, arm: Arm, *, floor: float | None, is_greedy: bool, judging: Judging
) -> dict[str, Any]:
    found = pairing.ratio(judging)
    verdict = judge(found, claim=judging.claim, floor=floor)
    sound = pairing.not_looping
    outside = pairing.ratio(judging, sound) if len(sound) >= MIN_UNITS else None
    rows = [row for i in pairing.used for row in pairing.other[i]]
    baseline_rows = [row for i in pairing.used for row in pairing.baseline[i]]
    faults = [*_broken(pairing), *_lengths(pairing), *_settings(baseline, baseline_rows), *_settings(arm, rows)]
    if faults:
        verdict = Verdict(kind="invalid", text="; ".join(faults), num_prompts=None)
    return {
        "arm": arm.name,
        "baseline": baseline.name,
        "speedup": found.ratio,
        "speedup_interval": list(found.interval),
        "confidence": found.confidence,
        "method": found.method,
        "p_value": found.p_value,
        "log_sd": found.log_sd,
        "noise_floor": floor,
        "minimum_detectable_effect": minimum_detectable_effect(
            log_sd=found.log_sd, num_prompts=found.num_prompts, confidence=found.confidence
        ),
        "claim": judging.claim,
        "recommended_num_prompts": verdict.num_prompts,
        "verdict": verdict.kind,
        "verdict_text": verdict.text,
        "faults": faults,
        "identical": not pairing.different if is_greedy else None,
        "num_different_prompts": len(pairing.different) if is_greedy else None,
        "num_unsteady_prompts": len(pairing.unsteady) if is_greedy else None,
        "tokens_per_s": _tokens_per_s(rows),
        "baseline_tokens_per_s": _tokens_per_s(baseline_rows),
        "mean_acceptance_length": _acceptance_length(rows),
        "num_prompts": found.num_prompts,
        "num_left_out_prompts": len(pairing.baseline) - found.num_prompts,
        "num_looping_prompts": found.num_prompts - len(sound),
        "speedup_outside_loops": outside.ratio if outside else None,
        "speedup_outside_loops_interval": list(outside.interval) if outside else None,
        "num_rounds": len(pairing.baseline[pairing.used[0]]),
        "prompt_indices": list(pairing.used),
        "prompt_ratios": pairing.prompt_ratios,
    }


def _broken(pairing: _Pairing) -> list[str]:
    """A fault where one side fails, says nothing or loops on more prompts than the other, chance aside (McNemar)."""
    here, there, num_pairs = pairing.only_other_bad, pairing.only_baseline_bad, len(pairing.baseline)
    if mcnemar_exact(here, there, num_pairs=num_pairs).p_value > 1 - CONFIDENCE:
        return []
    where = "here and not in the baseline" if here > there else "in the baseline and not here"
    return [f"{max(here, there)} of {num_pairs} prompts fail, loop or get no answer {where}"]


def _lengths(pairing: _Pairing) -> list[str]:
    """A fault where the arms read a prompt as different numbers of tokens: then a token is not the same work."""
    lengths = [
        {row.sample.num_prompt_tokens for row in [*pairing.baseline[i], *pairing.other[i]]} - {None}
        for i in pairing.used
    ]
    num_different = sum(len(each) > 1 for each in lengths)
    return [f"{num_different} prompts have another number of tokens here than there"] if num_different else []


def _settings(arm: Arm, rows: Sequence[Row]) -> list[str]:
    return [f"{arm.name}: {fault}" for fault in setting_faults(arm.asked, arm.echo([row.sample for row in rows]))]


def _tokens_per_s(rows: Sequence[Row]) -> float | None:
    """Decode speed, pooled: tokens after the first ÷ the time they took."""
    num_tokens = sum((row.sample.num_output_tokens or 1) - 1 for row in rows)
    seconds = sum(row.sample.e2e_s - (row.sample.ttft_s or 0.0) for row in rows)
    return metrics.tokens_per_s(num_tokens=num_tokens, seconds=seconds)


def _acceptance_length(rows: Sequence[Row]) -> float | None:
    """Pooled over all answers that say what drafting brought; None where none does."""
    told = [row.sample.acceptance for row in rows if row.sample.acceptance]
    num_cycles = sum(each["num_spec_steps"] for each in told)
    return 1 + sum(each["num_accepted_draft_tokens"] for each in told) / num_cycles if num_cycles else None
