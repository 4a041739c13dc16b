"""What rows count, and that the offline walk takes the very cycles that serving takes (T-073)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.benchmarking.request_sets import load_request_set
from outrider.core import AcceptanceStats, Generation, SamplingParams
from outrider.engine.proposer import DFlashProposer
from outrider.errors import ConfigError
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import BlockLayout, MarkovKind
from outrider.training.acceptance import HeldOutPrompt, MeasureOptions, OfflineWalk, drafter_of, measure_drafter
from tests.cases.common import toy_proposer
from tests.embedded import embedded_llm
from tests.scripted import make_test_engine
from tests.toy import toy_drafter, toy_dspark, toy_target

OPTIONS = MeasureOptions(temperatures=(0.0, 0.7), max_tokens=8, num_rounds=2, with_offline=False)
PROMPTS = [
    HeldOutPrompt(domain="code", index=0, text="ab", stop_strings=("###",), stop_token_ids=(7,)),
    HeldOutPrompt(domain="prose", index=0, text="abc"),
    HeldOutPrompt(domain="code", index=1, text="abcd", stop_strings=("###",), stop_token_ids=(7,)),
]


class Counting:
    """An LLM that answers every prompt with its length, and notes what it was asked."""

    def __init__(self, context_length: int = 64) -> None:
        self.engine = SimpleNamespace(config=SimpleNamespace(context_length=context_length), proposer=None)
        self.drafter_name = None
        self.asked: list[tuple[list[str], SamplingParams]] = []

    def encode(self, prompt: str) -> list[int]:
        return list(range(len(prompt)))

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Generation]:
        self.asked.append((prompts, params))
        return [
            Generation(
                text="",
                token_ids=(1, len(prompt)),
                finish_reason="length",
                num_prompt_tokens=len(prompt),
                acceptance=AcceptanceStats(num_cycles=1, num_draft_tokens=4, num_accepted_tokens=len(prompt)),
                prefill_s=0.0,
                decode_s=0.0,
            )
            for prompt in prompts
        ]


def test_rows_are_of_every_prompt_round_and_temperature() -> None:
    llm, said = Counting(), []
    rows = measure_drafter(llm, "new", PROMPTS, OPTIONS, progress=said.append)  # type: ignore[arg-type]
    keys = [(row["temperature"], row["round_index"], row["domain"], row["prompt_index"]) for row in rows]
    greedy = [(0.0, 0, "code", 0), (0.0, 0, "code", 1), (0.0, 0, "prose", 0)]
    assert keys == [*greedy, *((0.7, 0, *key[2:]) for key in greedy), *((0.7, 1, *key[2:]) for key in greedy)]
    assert [row["num_accepted_tokens"] for row in rows[:3]] == [2, 4, 3]
    assert {row["drafter"] for row in rows} == {"new"}
    assert rows[0]["output_sha256"] != rows[1]["output_sha256"]
    assert rows[0]["output_sha256"] == rows[3]["output_sha256"]
    assert said[0] == "new: code at temperature 0"
    assert rows[0]["offline_num_cycles"] is None
    params = llm.asked[0][1]
    assert (params.stop_strings, params.stop_token_ids, params.max_tokens) == (("###",), (7,), 8)
    assert [asked[1].seed for asked in llm.asked] == [None] * 6


def test_a_seed_is_one_more_every_round_and_none_where_nothing_is_drawn() -> None:
    llm = Counting()
    options = replace(OPTIONS, seed=10, num_speculative_tokens=3)
    measure_drafter(llm, "new", PROMPTS[:1], options, progress=str)  # type: ignore[arg-type]
    assert [asked[1].seed for asked in llm.asked] == [None, 10, 11]
    assert {asked[1].num_speculative_tokens for asked in llm.asked} == {3}


def test_prompts_that_do_not_fit_are_refused_before_anything_is_answered() -> None:
    llm = Counting(context_length=11)
    with pytest.raises(ConfigError, match=r"prompt 2 of code and its answer take 12 tokens, the context holds 11"):
        measure_drafter(llm, "new", PROMPTS, OPTIONS, progress=str)  # type: ignore[arg-type]
    assert not llm.asked


def test_who_has_no_block_drafter_cannot_be_walked() -> None:
    with pytest.raises(ConfigError, match="decoding without a drafter cannot be walked offline"):
        drafter_of(Counting())  # type: ignore[arg-type]


def served(drafter: DFlashDrafter, prompt: list[int], *, draft_length: int, num_tokens: int) -> tuple[list[int], Any]:
    """Greedy text of the engine, and (anchor position, accepted) of every cycle that had room for a whole block."""
    engine = make_test_engine(drafter.target, toy_proposer(drafter))
    request = engine.add(prompt, SamplingParams(max_tokens=num_tokens, num_speculative_tokens=draft_length))
    cycles, num_out = [], 0
    while engine.has_work:
        for chunk in engine.step():
            if chunk.num_draft_tokens:
                cycles.append((len(prompt) + num_out - 1, chunk.num_accepted_draft_tokens))
            num_out += len(chunk.token_ids)
    end = len(prompt) + len(request.output_token_ids)
    return list(request.output_token_ids), [each for each in cycles if each[0] + draft_length + 1 < end]


def friendly(drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Every other draft is the text's own token, so that a toy's cycles accept something."""
    propose = DFlashProposer.propose_on_device

    def helped(self: DFlashProposer, anchors: Any, draft_length: int, sampling: Any = None) -> Any:
        block = propose(self, anchors, draft_length, sampling)
        ids, place = block.token_ids.clone(), int(anchors.anchor_positions[0])
        for slot in range(ids.shape[1]):
            where = place + 1 + slot
            # What the drafter itself said decides, so that a walk with other features would take other cycles.
            if where < len(text) and (7 * int(ids[0, slot]) + where * where) % 5 > 1:
                ids[0, slot] = text[where]
        return block._replace(token_ids=ids)

    monkeypatch.setattr(DFlashProposer, "propose_on_device", helped)


@pytest.mark.parametrize(
    ("window", "kind"), [(None, None), (6, None), (None, MarkovKind.VANILLA), (None, MarkovKind.RNN)]
)
def test_the_walk_takes_the_cycles_of_the_engine(
    kind: MarkovKind | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toy_target()
    if kind is None:
        drafter = toy_drafter(target, window=window)
    else:
        drafter = toy_dspark(target, kind=kind, layout=BlockLayout.SAME_POSITION)
    prompt, draft_length = list(range(10, 19)), 4
    text, _ = served(drafter, prompt, draft_length=draft_length, num_tokens=32)
    friendly(drafter, monkeypatch, [*prompt, *text])
    again, cycles = served(drafter, prompt, draft_length=draft_length, num_tokens=32)
    assert again == text
    walker = OfflineWalk(drafter, context_length=128)
    assert all(cache.num_slots >= 128 for cache in walker.proposer.caches)  # no ring: anchors come after the whole text
    counts = walker.walk(prompt, text, draft_length=draft_length)
    accepted = [count for _, count in cycles]
    assert counts.num_cycles == len(cycles)
    assert counts.num_accepted_tokens == sum(accepted)
    assert counts.accepted_histogram == {count: accepted.count(count) for count in {*accepted}}
    assert len({*accepted}) > 2


@pytest.mark.slow
def test_offline_and_serving_agree_within_3_percent_on_real_text() -> None:
    """The embedded default: both count the same cycles, but for the last ones of an answer, which are cut."""
    prompts = [
        HeldOutPrompt(domain="demo", index=index, text=item.prompt or "")
        for index, item in enumerate(load_request_set("demo").items[::3])
    ]
    rows = measure_drafter(
        embedded_llm(), "shipped", prompts, MeasureOptions(temperatures=(0.0,), max_tokens=64), progress=str
    )
    serving, offline = (
        sum(row[f"{kind}num_accepted_tokens"] for row in rows) / sum(row[f"{kind}num_cycles"] for row in rows)
        for kind in ("", "offline_")
    )
    assert serving > 0.8
    assert abs((1 + offline) / (1 + serving) - 1) < 0.03
    assert all(0 <= row["num_cycles"] - row["offline_num_cycles"] <= 4 for row in rows)
