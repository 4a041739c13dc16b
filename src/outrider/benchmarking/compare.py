"""`bench compare`: the same prompts on two arms or more, one request at a time, in mirrored orders.

Within a round every arm answers a prompt before the next prompt comes. In each two rounds a prompt is answered in an
order drawn for it and then in the reverse (A B … B A), so that a steady drift takes as much from one arm as from the
other, and load that comes and goes in step with the requests meets no arm more often. What is compared is decode time:
seconds a token after the first, so that caches of prompts, warm for all after the first round, decide nothing. What the
rows say is `comparison.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Protocol

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.answer_quality import quality_flag
from outrider.benchmarking.request_sets import Item

AGAIN = "again"
"""What follows the first arm's name where it runs a second time, against itself."""


class Arm(Protocol):
    """One way of answering prompts."""

    name: str

    @property
    def asked(self) -> Mapping[str, Any]:
        """Settings that an echo can be held against, such as {"drafting": True}; what was left open is not there."""
        ...

    def echo(self, samples: Sequence[Sample]) -> Mapping[str, Any]:
        """The same settings as the answers show them to have been; what they do not show is not there."""
        ...

    def count_prompt_tokens(self, item: Item) -> int:
        """Tokens of a prompt as it is read there, template included."""
        ...

    def measure(self, item: Item) -> Sample:
        """One answer, timed; a failure is in the sample, not raised."""
        ...

    def describe(self) -> dict[str, Any]:
        """Backend, target, drafter and settings, for a record."""
        ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of the plan."""

    round_index: int
    prompt_index: int
    arm_index: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured answer."""

    arm: str
    round_index: int
    prompt_index: int
    sample: Sample
    flag: str | None
    """What is wrong with the answer: 'failed', 'empty', 'loop' or None."""

    def as_dict(self) -> dict[str, Any]:
        """For a record: times in seconds, counts and text."""
        sample = asdict(self.sample)
        del sample["chunk_gaps_s"]
        return {
            "arm": self.arm,
            "round_index": self.round_index,
            "prompt_index": self.prompt_index,
            "decode_pace_s": decode_pace_s(self.sample),
            "flag": self.flag,
            **sample,
        }


def plan_turns(*, num_arms: int, num_prompts: int, num_rounds: int, seed: int = 0) -> list[Turn]:
    """All requests in order. An even number of rounds gives every arm the same mean place with every prompt."""
    random = Random(seed)
    orders: list[list[int]] = []
    turns = []
    for round_index in range(num_rounds):
        if round_index % 2 == 0:
            orders = [random.sample(range(num_arms), num_arms) for _ in range(num_prompts)]
        else:
            orders = [order[::-1] for order in orders]
        turns += [
            Turn(round_index=round_index, prompt_index=prompt_index, arm_index=arm_index)
            for prompt_index, order in enumerate(orders)
            for arm_index in order
        ]
    return turns


def run_arms(
    arms: Sequence[Arm],
    items: Sequence[Item],
    *,
    num_rounds: int,
    num_warmup_rounds: int = 1,
    seed: int = 0,
    on_turn: Callable[[str], None] | None = None,
    keep: Callable[[Row], object] = lambda _: None,
) -> list[Row]:
    """Rows of all rounds; those of `num_warmup_rounds` more before them are discarded.

    `on_turn` hears each begin, and `keep` gets each row at once, for a run that may be stopped.
    """
    report = on_turn or (lambda _message: None)
    sizes = {"num_arms": len(arms), "num_prompts": len(items)}
    for turn in plan_turns(**sizes, num_rounds=num_warmup_rounds, seed=seed):
        report(f"warm-up ({arms[turn.arm_index].name})")
        arms[turn.arm_index].measure(items[turn.prompt_index])
    rows = []
    for turn in plan_turns(**sizes, num_rounds=num_rounds, seed=seed):
        arm = arms[turn.arm_index]
        report(f"round {turn.round_index + 1} ({arm.name})")
        sample = arm.measure(items[turn.prompt_index])
        row = Row(
            arm=arm.name,
            round_index=turn.round_index,
            prompt_index=turn.prompt_index,
            sample=sample,
            flag="failed" if sample.error else quality_flag(sample.text + sample.reasoning, sample.tool_calls),
        )
        rows.append(row)
        keep(row)
    return rows


def whole_rounds(rows: Sequence[Row], *, num_arms: int, num_prompts: int) -> list[Row]:
    """Rows of the rounds that were finished: a prompt that one arm alone answered once more pairs with nothing."""
    num_rounds = len(rows) // (num_arms * num_prompts)
    return [row for row in rows if row.round_index < num_rounds]


def missing_rows(rows: Sequence[Row], arms: Sequence[Arm], *, num_each: int) -> list[dict[str, Any]]:
    """What a stopped run lacks, arm by arm, as a record has it."""
    lacking = {arm.name: num_each - sum(row.arm == arm.name for row in rows) for arm in arms}
    return [{"arm": name, "num_rows": num_rows} for name, num_rows in lacking.items() if num_rows]


def num_turns(*, num_arms: int, num_prompts: int, num_rounds: int, num_warmup_rounds: int) -> int:
    """Requests of a whole run, warm-up included."""
    return num_arms * num_prompts * (num_rounds + num_warmup_rounds)


def again_name(name: str) -> str:
    """The name of an arm's second run."""
    return f"{name} {AGAIN}"


def decode_pace_s(sample: Sample) -> float | None:
    """Seconds a token after the first chunk, or after the first token where a server does not count the first chunk."""
    return 1 / sample.tokens_per_s if sample.tokens_per_s else sample.tpot_s
