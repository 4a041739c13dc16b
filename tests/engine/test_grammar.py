"""Grammars: what is refused, where drafts end, and that drafting changes neither text nor distribution.

Seen red: candidates left illegal; a draft that goes on where no candidate is legal; control tokens taken for their
spelling; adjustments that win over the grammar; the filters applied before the mask.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.core import Grammar, SamplingParams
from outrider.engine.batch import CycleBatch
from outrider.engine.grammar import LegalDrafts, make_constraint
from outrider.engine.proposer import walked
from outrider.engine.rejection import DraftBlock
from outrider.errors import RequestError
from outrider.models.dspark import BlockWalk
from tests.byte_tokenizer import BOS, CALL, CALL_END, EOS, QUOTE, byte_tokenizer
from tests.cases.common import toy_proposer
from tests.cases.constrained import VOCAB_SIZE, fresh_constraint, run
from tests.embedded import embedded_llm, plain_llm
from tests.scripted import FixedProposer, TableTarget, make_test_engine
from tests.statistics import assert_chi_square
from tests.toy import toy_drafter, toy_dspark, toy_target

AB = Grammar("regex", "[abc]{2}")


def constraint_error(grammar: Grammar, **params: object) -> str:
    with pytest.raises(RequestError) as caught:
        make_constraint(SamplingParams(grammar=grammar, **params), byte_tokenizer(), VOCAB_SIZE, [EOS])
    return str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("json_schema", "{"), "json_schema) cannot be followed: Check failed"),
        (Grammar("json_schema", '{"type": "x"}'), 'json_schema) cannot be followed: Unsupported type "x"'),
        (Grammar("regex", "(a"), "regex) cannot be followed: Regex parsing error at position 3"),
        (Grammar("ebnf", "root ::= x"), 'EBNF parser error at line 1, column 10: Rule "x" is not defined'),
        (Grammar("structural_tag", "{}"), "must have a format field"),
        (Grammar("regex", "(" * 101), "nested more than 100 brackets deep"),
    ],
)
def test_what_cannot_be_followed(grammar: Grammar, says: str) -> None:
    assert says in constraint_error(grammar)


def test_what_a_grammar_needs() -> None:
    params = SamplingParams(grammar=AB)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        make_constraint(params, None, VOCAB_SIZE, [EOS])
    with pytest.raises(RequestError, match="needs a token to end with"):
        make_constraint(params, byte_tokenizer(), VOCAB_SIZE, [VOCAB_SIZE])
    assert make_constraint(SamplingParams(), None, VOCAB_SIZE, []) is None


def test_masks() -> None:
    constraint = fresh_constraint([], AB)
    allowed = constraint.allows()
    assert allowed.shape == (VOCAB_SIZE,)
    assert allowed.nonzero().flatten().tolist() == [*b"abc"]
    assert constraint.allows(torch.tensor([EOS, ord("c"), 31, 32])).tolist() == [False, True, False, False]
    constraint.try_token(ord("a"))
    constraint.try_token(ord("b"))
    assert constraint.allows().nonzero().flatten().tolist() == [EOS]
    constraint.try_token(EOS)
    assert constraint.has_ended
    constraint.take_back()
    assert constraint.allows().nonzero().flatten().tolist() == [*b"abc"]
    assert not constraint.advance(ord("d"))
    assert constraint.advance(ord("a"))


def test_rows_follow_the_drafts_and_adjustments_may_not_rule_out_everything() -> None:
    constraint, raw = fresh_constraint([], AB), [torch.zeros(VOCAB_SIZE) for _ in range(4)]
    rows = [torch.full((VOCAB_SIZE,), -torch.inf), *raw[1:]]
    legal = constraint.legal_rows(rows, raw, [ord("a"), ord("x"), ord("b")])
    assert [(row > -torch.inf).nonzero().flatten().tolist() for row in legal[:2]] == [[*b"abc"], [*b"abc"]]
    assert legal[2] is rows[2]  # behind an illegal draft
    assert not bool((rows[1] == -torch.inf).any())  # copies, no writes
    assert not constraint.has_ended


def test_control_tokens_match_nothing_unless_they_are_spelled() -> None:
    grammar = Grammar("regex", "<\\|tool_call>")
    assert fresh_constraint([], grammar).allows().nonzero().flatten().tolist() == [ord("<")]
    tag = {
        "type": "tag",
        "begin": "<|tool_call>",
        "content": {"type": "const_string", "value": "x"},
        "end": "<tool_call|>",
    }
    params = SamplingParams(
        grammar=Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag})),
        shown_token_ids=(CALL, CALL_END, QUOTE),
    )
    constraint = make_constraint(params, byte_tokenizer(), VOCAB_SIZE, [EOS])
    assert constraint is not None
    assert [constraint.advance(token_id) for token_id in (CALL, ord("x"), CALL_END, EOS)] == [True] * 4


def test_a_draft_ends_where_no_candidate_is_legal() -> None:
    ids = torch.tensor([[ord("x"), ord("a")], [ord("x"), ord("a")], [ord("x"), ord("y")]])
    logits = torch.tensor([[2.0, 1.0]]).expand(3, 2)
    constraints = (fresh_constraint([], AB), None, fresh_constraint([], AB))
    legal = LegalDrafts(constraints)
    masked = legal.mask(ids, logits)
    assert masked.tolist() == [[-torch.inf, 1.0], [2.0, 1.0], [2.0, 1.0]]
    legal.take(torch.tensor([ord("a"), ord("x"), ord("x")]))
    legal.mask(ids, logits)
    legal.take(torch.tensor([ord("a"), ord("x"), ord("x")]))
    legal.mask(ids, logits)  # now only the end is legal, and no candidate
    assert legal.finish(5) == (2, 5, 0)
    assert constraints[0] is not None
    assert constraints[0].allows(torch.tensor([ord("a")])).item()
    assert LegalDrafts((None, None)).finish(3) is None


class WalkingProposer(FixedProposer):
    """Walks over the same base logits in every slot, by the rule of every drafter with candidates."""

    def __init__(self, logits: Tensor, *, num_candidates: int) -> None:
        super().__init__(max_draft_length=3)
        self.logits, self.num_candidates = logits, num_candidates
        self.lengths: list[tuple[int, ...] | None] = []

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        """Candidates are the likeliest of the logits [V]."""
        base = self.logits.expand(len(batch.seats), draft_length, -1)
        parts = {"draft_to_target": None, "markov": None, "confidence": None}
        draft = walked(batch, BlockWalk(base, base, num_candidates=self.num_candidates, **parts))
        self.lengths.append(draft.lengths)
        return draft


def table_logits(seed: int, *letters: float) -> Tensor:
    """Noise, but for a, b and c."""
    logits = 1.5 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[97 : 97 + len(letters)] = torch.tensor(letters, dtype=torch.float64)
    return logits


@pytest.mark.parametrize(
    ("drafting", "acceptance"),
    [("walk", "rejection"), ("walk", "block"), ("short-walk", "rejection"), ("unmasked", "rejection")],
)
def test_sampled_text_has_the_targets_masked_distribution(drafting: str, acceptance: str) -> None:
    logits, draft_logits, num_draws = table_logits(0, 0.8, 0.2, -0.3), table_logits(1, -0.5, 0.9, 0.1), 400
    proposer = {
        "walk": WalkingProposer(draft_logits, num_candidates=VOCAB_SIZE),
        "short-walk": WalkingProposer(draft_logits.index_fill(0, torch.tensor([*b"ab"]), 9.0), num_candidates=2),
        "unmasked": FixedProposer(draft_logits.index_fill(0, torch.tensor([*b"abc"]), 4.0).softmax(-1)),
    }[drafting]
    engine = make_test_engine(
        TableTarget(logits.expand(VOCAB_SIZE, -1)),
        proposer,
        tokenizer=byte_tokenizer(),
        end_token_ids=[EOS],
        max_seats=32,
        acceptance=acceptance,
    )
    grammar = Grammar("regex", "[abc]{2}")
    requests = [engine.add([BOS], SamplingParams(grammar=grammar, temperature=1.0)) for _ in range(num_draws)]
    while engine.has_work:
        engine.step()
    probs = dict(zip("abc", logits[list(b"abc")].softmax(-1).tolist(), strict=True))
    assert_chi_square((request.text[1] for request in requests), probs)  # the first letter is never drafted
    assert sum(request.acceptance.num_accepted_tokens for request in requests) > num_draws // 8
    if isinstance(proposer, WalkingProposer):
        longest = max(max(lengths) for lengths in proposer.lengths if lengths is not None)
        assert longest == {"walk": 2, "short-walk": 1}[drafting]  # a letter and the end; the end is no candidate


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "seeded"]
)
def test_text_equals_plain_decoding_with_a_drafter(params: SamplingParams, heads: bool) -> None:
    vocab_size = 96 if heads else VOCAB_SIZE  # bytes below 96: digits and capitals
    target = toy_target(vocab_size=vocab_size)
    drafter = toy_dspark(target) if heads else toy_drafter(target)
    grammar = Grammar("regex", "[0-9A-F]{1,8}(-[0-9A-F]{1,8}){2}!")
    params = replace(params, grammar=grammar, max_tokens=30, stop_token_ids=(5,))
    engines = [
        make_test_engine(target, proposer, tokenizer=byte_tokenizer())
        for proposer in (None, toy_proposer(drafter, num_seats=4))
    ]
    texts = []
    for engine in engines:
        requests = [engine.add([6, token_id], params) for token_id in range(40, 46)]
        while engine.has_work:
            engine.step()
        texts.append([(request.text, request.finish_reason) for request in requests])
    assert texts[0] == texts[1]
    assert {reason for _, reason in texts[0]} == {"stop"}
    assert len(set(texts[0])) > 1


def test_a_grammar_without_a_way_on_ends_its_request_alone() -> None:
    """Its character is in no token of this target."""
    target = TableTarget(torch.zeros(96, 96))
    engine = make_test_engine(target, tokenizer=byte_tokenizer(), max_seats=2)
    stuck = engine.add([1], SamplingParams(grammar=Grammar("regex", "Az"), stop_token_ids=(5,)))
    other = engine.add([1], SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
    assert (stuck.text, stuck.finish_reason) == ("A", "error")
    assert (len(other.output_token_ids), other.finish_reason) == (4, "length")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=1.0)]
)
def test_the_embedded_default_writes_json(params: SamplingParams) -> None:
    params = replace(params, grammar=Grammar("json_schema", json.dumps(SCHEMA)), max_tokens=120)
    results = [llm.generate(["A person as JSON: "], params)[0] for llm in (embedded_llm(), plain_llm())]
    for result in results:
        value = json.loads(result.text)
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 130
        assert set(value["tags"]) <= {"a", "b"}
        assert result.finish_reason == "stop"
    if params.is_greedy or params.seed is not None:
        assert results[0].text == results[1].text
    assert results[0].acceptance.num_accepted_tokens > 0


def test_one_letter_at_a_time() -> None:
    engine = make_test_engine(
        TableTarget(table_logits(2).expand(VOCAB_SIZE, -1)), tokenizer=byte_tokenizer(), end_token_ids=[EOS]
    )
    assert run(engine, SamplingParams(grammar=Grammar("json_schema", '{"enum": ["yes"]}'))).text == '"yes"'
