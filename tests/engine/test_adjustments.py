"""Adjustments: each rule by hand, all of them against a plain reference, and the same text with and without drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.adjustments import Adjustments, adjusted_rows, bad_sequences, ends_with, make_adjustments
from outrider.errors import RequestError
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget
from tests.adjusting import ALL_RULES, BAD_SEQUENCES, CharTokenizer, reference_row, reference_text
from tests.cases.common import toy_proposer
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine, run_requests
from tests.statistics import assert_chi_square
from tests.toy import CPU, dense_logits, toy_drafter, toy_target

PROMPT = [5, 17, 80, 5]
END = 9
LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0], dtype=torch.float64)


def make(prompt: Sequence[int] = (4,), *, end_token_ids: Sequence[int] = (), **fields: Any) -> Adjustments:
    made = make_adjustments(
        SamplingParams(**fields),
        prompt,
        end_token_ids=end_token_ids,
        vocab_size=5,
        tokenizer=CharTokenizer(),  # type: ignore[arg-type]
        device=CPU,
    )
    assert made is not None
    return made


def test_a_request_that_asks_for_nothing_has_none() -> None:
    params = SamplingParams(temperature=1.0, top_k=3, stop_token_ids=(2,), logprobs=3)
    assert make_adjustments(params, [0], end_token_ids=(1,), vocab_size=5, tokenizer=None, device=CPU) is None


@pytest.mark.parametrize(
    ("fields", "output", "expected"),
    [
        ({"presence_penalty": 0.5}, [0, 0, 2], [1.5, -1.0, 0.0, 3.0, 0.0]),
        ({"frequency_penalty": 0.5}, [0, 0, 2], [1.0, -1.0, 0.0, 3.0, 0.0]),
        ({"frequency_penalty": 0.5, "presence_penalty": 1.0}, [0, 0, 2], [0.0, -1.0, -1.0, 3.0, 0.0]),
        ({"presence_penalty": -0.5}, [1], [2.0, -0.5, 0.5, 3.0, 0.0]),
        ({"presence_penalty": 0.5}, [], [2.0, -1.0, 0.5, 3.0, 0.0]),
        ({"repetition_penalty": 2.0}, [1, 1, 0], [1.0, -2.0, 0.5, 3.0, 0.0]),
        ({"repetition_penalty": 0.5}, [1], [2.0, -0.5, 0.5, 3.0, 0.0]),
        ({"logit_bias": {1: 4.0, 3: -100.0}}, [], [2.0, 3.0, 0.5, -97.0, 0.0]),
        ({"allowed_token_ids": [1, 4]}, [], [-math.inf, -1.0, -math.inf, -math.inf, 0.0]),
        ({"min_tokens": 2}, [1], [2.0, -1.0, 0.5, -math.inf, 0.0]),
        ({"min_tokens": 2}, [1, 1], [2.0, -1.0, 0.5, 3.0, 0.0]),
        ({"bad_words": ["\1\2"]}, [1], [2.0, -1.0, -math.inf, 3.0, 0.0]),
        ({"bad_words": ["\1\2"]}, [1, 2], [2.0, -1.0, 0.5, 3.0, 0.0]),
        ({"bad_words": ["\0"]}, [], [-math.inf, -1.0, 0.5, 3.0, 0.0]),
    ],
)
def test_each_rule_by_hand(fields: dict[str, Any], output: list[int], expected: list[float]) -> None:
    before = LOGITS.clone()
    adjusted = make(end_token_ids=(3, 77), **fields).apply(LOGITS, output)
    assert adjusted.tolist() == expected
    assert torch.equal(LOGITS, before)


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not() -> None:
    assert make([0], repetition_penalty=2.0).apply(LOGITS, []).tolist() == [1.0, -1.0, 0.5, 3.0, 0.0]
    assert make([0], frequency_penalty=1.0, presence_penalty=1.0).apply(LOGITS, []).tolist() == LOGITS.tolist()


def test_bias_comes_before_the_repetition_penalty_and_a_bias_frees_no_token() -> None:
    fields: dict[str, Any] = {"logit_bias": {1: 3.0, 2: 100.0}, "allowed_token_ids": [1, 3]}
    adjusted = make([1], repetition_penalty=2.0, **fields).apply(LOGITS, [])
    assert adjusted.tolist() == [-math.inf, 1.0, -math.inf, 3.0, -math.inf]


def test_row_j_knows_the_drafts_before_it() -> None:
    adjustments = make(frequency_penalty=1.0, min_tokens=3, end_token_ids=(3,))
    rows = adjusted_rows(adjustments, [LOGITS] * 3, [0], [0, 1])
    assert [row.tolist() for row in rows] == [
        [1.0, -1.0, 0.5, -math.inf, 0.0],
        [0.0, -1.0, 0.5, -math.inf, 0.0],
        [0.0, -2.0, 0.5, 3.0, 0.0],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_keep_their_dtype(dtype: torch.dtype) -> None:
    assert make(logit_bias={1: 0.1}, frequency_penalty=0.1).apply(LOGITS.to(dtype), [0]).dtype == dtype


def test_words_are_spelt_with_and_without_a_space_and_unknown_spellings_dropped() -> None:
    tokenizer: Any = CharTokenizer()
    assert bad_sequences(["a", " ab"], tokenizer, vocab_size=128) == ((97,), (32, 97), (97, 98), (32, 97, 98))
    assert bad_sequences(["\1a", "\2"], tokenizer, vocab_size=33) == ((2,), (32, 2))
    assert bad_sequences([], None, vocab_size=5) == ()


def test_a_text_ends_in_its_tail_and_in_nothing() -> None:
    assert ends_with([1, 2, 3], (2, 3))
    assert ends_with([], ())
    assert ends_with([1], ())
    assert not ends_with([3], (2, 3))
    assert not ends_with([1, 2, 3], (1, 2))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": [1, 5]}, r"allowed_token_ids has token ids \[5\]"),
        ({"logit_bias": {7: 1.0}}, r"logit_bias has token ids \[7\]"),
        ({"allowed_token_ids": [1, 2], "bad_words": ["\1", "\1\2"]}, "bad_words"),
        ({"bad_words": ["\0", "\1", "\2", "\3", "\4"]}, "bad_words"),
        ({"allowed_token_ids": [3], "min_tokens": 1}, "min_tokens=1"),
        ({"allowed_token_ids": [2, 3], "min_tokens": 1, "bad_words": ["\2"]}, "min_tokens=1"),
    ],
)
def test_what_could_leave_no_token_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        make(end_token_ids=(3,), **fields)


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(RequestError, match="bad_words"):
        make_test_engine(TableTarget(torch.zeros(3, 3))).add([0], SamplingParams(bad_words=("a",)))


@pytest.fixture(scope="module")
def target() -> GemmaTarget:
    return toy_target(eos_token_ids=(END,))


@pytest.fixture(scope="module")
def drafter(target: GemmaTarget) -> DFlashDrafter:
    return toy_drafter(target, block_size=8)


@pytest.mark.parametrize("seed", range(20))
def test_all_rules_together_equal_the_plain_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(96, generator=generator, dtype=torch.float64) * 3
    output = torch.randint(12, (seed,), generator=generator).tolist()
    adjustments = make_adjustments(
        ALL_RULES,
        PROMPT,
        end_token_ids=(END, 11),
        vocab_size=96,
        tokenizer=CharTokenizer(),  # type: ignore[arg-type]
        device=CPU,
    )
    assert adjustments is not None
    assert adjustments.bad_sequences == BAD_SEQUENCES
    expected = reference_row(logits.tolist(), ALL_RULES, PROMPT, output, end_token_ids=(END, 11))
    torch.testing.assert_close(adjustments.apply(logits, output).tolist(), expected, rtol=0, atol=1e-12)


RULES = {
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=0.4),
    "repetition": SamplingParams(repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias={3: 2.5, 10: -100.0}),
    "allowed": SamplingParams(allowed_token_ids=tuple(range(0, 96, 3))),
    "bad words": SamplingParams(bad_words=("0", "AB", "\1\2\3")),
    "min tokens": SamplingParams(min_tokens=9, logit_bias={END: 100.0}),
    "all": ALL_RULES,
}


@pytest.mark.parametrize("decoding", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", RULES)
def test_text_is_the_same_at_any_draft_length(
    target: GemmaTarget, drafter: DFlashDrafter, name: str, decoding: dict[str, Any]
) -> None:
    params = replace(RULES[name], max_tokens=18, **decoding)
    proposer = toy_proposer(drafter, num_seats=4)
    engine = make_test_engine(target, proposer, tokenizer=CharTokenizer(), end_token_ids=(END,))  # type: ignore[arg-type]
    texts = run_requests(engine, *((PROMPT, replace(params, num_speculative_tokens=n)) for n in (0, 3, 7)))
    assert texts[0] == texts[1] == texts[2]
    own = ScriptedProposer([PROMPT + texts[0]], script=(7, 2, 0, 5), max_draft_length=7)
    engine = make_test_engine(target, own, tokenizer=CharTokenizer(), end_token_ids=(END,))  # type: ignore[arg-type]
    assert run_requests(engine, (PROMPT, params)) == [texts[0]]
    if params.is_greedy:
        assert texts[0] == reference_text(
            lambda ids: dense_logits(target, ids)[-1].tolist(), params, PROMPT, end_token_ids=(END,)
        )


TABLE = torch.tensor([[1.0, 0.2, 0.5], [0.3, 0.6, 0.9], [0.8, 0.1, 0.4]], dtype=torch.float64)
CHANGED = SamplingParams(
    temperature=1.0,
    max_tokens=3,
    presence_penalty=0.2,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={1: 0.5},
    bad_words=("\2\2",),
)


def changed_sequence_probs(params: SamplingParams, prompt: list[int]) -> dict[Any, float]:
    """Chance of every text of three tokens, adjusted token by token without an engine."""
    chances: dict[Any, float] = {(): 1.0}
    for _ in range(3):
        longer: dict[Any, float] = {}
        for text, chance in chances.items():
            raw = TABLE[[*prompt, *text][-1]].tolist()
            row = reference_row(raw, params, prompt, list(text), bad=((2, 2),))
            total = sum(math.exp(value) for value in row)
            longer |= {(*text, token): chance * math.exp(value) / total for token, value in enumerate(row)}
        chances = longer
    return chances


def constant_drafts(token_id: int) -> FixedProposer:
    return FixedProposer(choose=lambda batch, length: torch.full((len(batch.seats), length), token_id))


@pytest.mark.parametrize(
    ("proposer", "seeded"),
    [("none", False), ("constant", False), ("sampled", False), ("constant", True)],
    ids=["none", "constant", "sampled", "matching"],
)
def test_three_adjusted_tokens_follow_the_exact_distribution(proposer: str, seeded: bool) -> None:
    made = {
        "none": None,
        "constant": constant_drafts(2),
        "sampled": FixedProposer(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), max_draft_length=2),
    }[proposer]
    engine = make_test_engine(
        TableTarget(TABLE),
        made,
        tokenizer=CharTokenizer(),
        max_seats=700,
        row_budget=5 * 700,
        seed=1,  # type: ignore[arg-type]
    )
    params = [replace(CHANGED, seed=i if seeded else None) for i in range(700)]
    texts = run_requests(engine, *(([0], each) for each in params))
    assert_chi_square(map(tuple, texts), changed_sequence_probs(CHANGED, [0]))


def test_plain_greedy_requests_store_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TableTarget(TABLE)
    largest = TABLE.max(dim=-1)
    monkeypatch.setattr(plain, "best", lambda hidden: tuple(each[hidden[:, 0].long()] for each in largest))
    monkeypatch.setattr(plain, "logits", lambda hidden: pytest.fail("a plain greedy batch asked for logits"))
    assert run_requests(make_test_engine(plain), ([0], SamplingParams(max_tokens=4))) == [[0] * 4]
