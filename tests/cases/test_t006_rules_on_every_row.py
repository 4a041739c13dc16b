"""T-006: bias, min_tokens, bad words and allowed lists hold on every row of a block, the bonus row included.

Seen red: only slot 0 adjusted; the last row left as it was; min_tokens counted without the drafts before a row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from tests.adjusting import CharTokenizer
from tests.scripted import FixedProposer, ScriptedProposer, TableTarget, make_test_engine, run_requests

END = 3
NEXT = torch.tensor(  # wants 2 after anything, and once in a while the end
    [[0.0, 1.0, 3.0, 2.0], [1.0, 0.0, 3.0, 2.5], [0.5, 2.0, 3.0, 2.9], [0.0, 0.0, 0.0, 9.0]], dtype=torch.float64
)
RULES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {2: -100.0}, "min_tokens": 9},
    "min_tokens": {"logit_bias": {END: 50.0}, "min_tokens": 6},
    "bad words": {"bad_words": ("\2\2",), "min_tokens": 9},
    "allowed": {"allowed_token_ids": (0, 1)},
}
SCRIPTS = {"all-full": (), "all-0": (0,), "mixed": (1, 4, 0, 3)}


def make_engine(proposer: Any = None) -> Any:
    return make_test_engine(TableTarget(NEXT), proposer, tokenizer=CharTokenizer(), end_token_ids=(END,))  # type: ignore[arg-type]


def holds(name: str, text: list[int]) -> bool:
    """The rule, as a user would check it."""
    if name == "min_tokens":
        return text.index(END) == 6
    return {"bias": 2 not in text, "bad words": (2, 2) not in pairwise(text), "allowed": set(text) <= {0, 1}}[name]


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("decoding", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", RULES)
def test_t006_every_row_is_adjusted(name: str, decoding: dict[str, Any], script: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=11, **RULES[name], **decoding)
    (plain,) = run_requests(make_engine(), ([0], params))
    assert holds(name, plain)
    own = ScriptedProposer([[0, *plain]], script=script, vocab_size=4, tap_layers=())
    assert run_requests(make_engine(own), ([0], params)) == [plain]


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("name", RULES)
def test_t006_drafts_that_break_a_rule_are_never_kept(name: str, wrong: int) -> None:
    stubborn = FixedProposer(choose=lambda batch, length: torch.full((len(batch.seats), length), wrong))
    params = SamplingParams(max_tokens=11, temperature=1.0, **RULES[name])
    texts = run_requests(make_engine(stubborn), *(([0], params) for _ in range(8)))
    assert all(holds(name, text) for text in texts)


def test_t006_the_bonus_row_is_adjusted() -> None:
    params = SamplingParams(max_tokens=6, bad_words=("\2\2",), min_tokens=6, num_speculative_tokens=1)
    engine = make_engine(ScriptedProposer([[0, 2, 1, 2, 1, 2, 1]], vocab_size=4, tap_layers=(), max_draft_length=1))
    request = engine.add([0], params)
    while engine.has_work:
        engine.step()
    assert request.output_token_ids == [2, 1, 2, 1, 2, 1]
    assert request.acceptance.num_accepted_tokens == request.acceptance.num_draft_tokens > 0
