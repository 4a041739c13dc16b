"""Runs of a comparison as a machine with noise, drift and hard prompts would give them, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.compare import plan_turns

TEXT = "Bees live in colonies, and each colony has one queen who lays every egg that the workers then raise in spring."

Floats = NDArray[np.float64]


def places(*, num_prompts: int, num_rounds: int) -> NDArray[np.int64]:
    """When each request of two arms comes, [arms, prompts, rounds], in the order of `bench compare`."""
    found = np.zeros((2, num_prompts, num_rounds), dtype=np.int64)
    for place, turn in enumerate(plan_turns(num_arms=2, num_prompts=num_prompts, num_rounds=num_rounds)):
        found[turn.arm_index, turn.prompt_index, turn.round_index] = place
    return found


def blocks(*, num_prompts: int, num_rounds: int) -> NDArray[np.int64]:
    """The same for the order that many use: all of one arm, then all of the other."""
    return np.arange(2 * num_prompts * num_rounds).reshape(2, num_rounds, num_prompts).transpose(0, 2, 1)


def seconds(
    random: np.random.Generator, order: NDArray[np.int64], *, num_runs: int, speedup: float = 1.0
) -> tuple[Floats, Floats]:
    """Seconds a token [runs, prompts, rounds] of a baseline and of an arm `speedup` times as fast.

    Prompts differ by 30 % and in what the arm makes of them by 3 %. Noise only slows, and its tail is long (gamma,
    skewness 1.6). The machine gets up to 30 % slower from first to last, wanders, and starts cold.
    """
    _, num_prompts, _ = order.shape
    progress = np.arange(order.size) / order.size
    drift = random.uniform(0.0, 0.3, (num_runs, 1)) * progress + 0.1 * np.exp(-20 * progress)
    drift = drift + np.cumsum(random.normal(0, 0.002, (num_runs, order.size)), axis=1)
    hardness = random.normal(0, 0.3, (num_runs, num_prompts, 1))
    own = random.normal(0, 0.03, (num_runs, num_prompts, 1)) - np.log(speedup)
    baseline, other = (drift[:, order[arm]] + random.gamma(1.5, 0.03, (num_runs, *order[arm].shape)) for arm in (0, 1))
    return np.exp(hardness + baseline), np.exp(hardness + own + other)


def sample(**fields: Any) -> Sample:
    """A sound answer of 11 tokens in 10 chunks of 0.1 s after the first, unless fields say otherwise."""
    defaults = {
        "started_s": 0.0, "ttft_s": 0.5, "chunk_gaps_s": (0.1,) * 10, "e2e_s": 1.5, "num_prompt_tokens": 7,
        "num_output_tokens": 11, "num_chunks": 11, "text": TEXT, "reasoning": "", "tool_calls": (),
        "finish_reason": "length", "error": None, "acceptance": None,
    }  # fmt: skip
    return Sample(**{**defaults, **fields})


@dataclass
class PlantedArm:
    """An arm of planted pace: `pace_s` says seconds a token of the n-th request to whichever arm shares `clock`."""

    name: str
    pace_s: Callable[[int], float]
    clock: list[int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)

    def echo(self, samples: Sequence[Sample]) -> Mapping[str, Any]:
        """Drafting, where an answer has acceptance."""
        return {"drafting": any(each.acceptance for each in samples)}

    def count_prompt_tokens(self, prompt: str) -> int:
        """A character is a token."""
        return len(prompt)

    def measure(self, prompt: str) -> Sample:
        """Fields of the sample may be functions of the prompt."""
        self.prompts.append(prompt)
        self.clock[0] += 1
        pace_s = self.pace_s(self.clock[0])
        given = {name: value(prompt) if callable(value) else value for name, value in self.fields.items()}
        return sample(**{"ttft_s": 0.5, "e2e_s": 0.5 + 10 * pace_s, "text": f"{prompt}: {TEXT}", **given})

    def describe(self) -> dict[str, Any]:
        """For a record."""
        return {"name": self.name, "backend": "planted", "target": "none", "drafter": None, "settings": {}}
