"""Prompts beside plain text at the engine's door: placeholders are refused, given rows are checked.

Seen red: placeholders let through; add_rows without a check of the size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.models.attention import GivenRows
from outrider.models.config import Placeholder
from outrider.models.multimodal import PromptRows, row_positions
from tests.cases.mixed import IMAGE_ID, finish_rows, mixed_prompt
from tests.scripted import make_test_engine, run_requests
from tests.toy import reference_greedy, toy_target

GREEDY = SamplingParams(max_tokens=8)


def multimodal_engine() -> Engine:
    target = toy_target()
    target.config = replace(target.config, placeholders=(Placeholder(text="<|image|>", token_id=IMAGE_ID),))
    return make_test_engine(target)


def test_a_placeholder_is_refused_and_the_other_requests_go_on() -> None:
    engine, texts = multimodal_engine(), ([5, 17, 80], [3, 44])
    requests = [engine.add(texts[0], GREEDY)]
    with pytest.raises(RequestError, match=r"<\|image\|> \(token id 90\) at position 1, .*Remove <\|image\|>\."):
        engine.add([5, IMAGE_ID, 17], GREEDY)
    requests.append(engine.add(texts[1], GREEDY))
    while engine.has_work:
        engine.step()
    expected = [reference_greedy(engine.target, text, 8) for text in texts]
    assert [request.output_token_ids for request in requests] == expected


def test_a_text_only_target_declares_none() -> None:
    engine = make_test_engine(toy_target())
    assert run_requests(engine, ([5, IMAGE_ID, 17], GREEDY)) == [reference_greedy(engine.target, [5, 90, 17], 8)]


def test_a_placeholder_with_its_embedding_runs() -> None:
    engine, prompt = multimodal_engine(), mixed_prompt([5, 17], 3, [44])
    answer = reference_greedy(engine.target, prompt.token_ids.tolist(), 8, prompt.given)
    assert finish_rows(engine, prompt, GREEDY).output_token_ids == answer


def test_a_placeholder_among_given_rows_that_brings_none_is_refused() -> None:
    prompt = mixed_prompt([5, 17], 3, [44])
    is_given = prompt.given.is_given.clone()
    is_given[3] = False
    with pytest.raises(RequestError, match="at position 3"):
        multimodal_engine().add_rows(replace(prompt, given=GivenRows(is_given, prompt.given.embeddings)), GREEDY)


def test_embeddings_of_another_size_are_refused() -> None:
    prompt = PromptRows(torch.tensor([1, 2, 3]), row_positions(3), GivenRows(torch.ones(3).bool(), torch.zeros(3, 31)))
    with pytest.raises(RequestError, match=r"has shape .*, but the target takes \(32,\)"):
        multimodal_engine().add_rows(prompt, GREEDY)


def test_embeddings_that_are_not_finite_fail_their_own_request_alone() -> None:
    engine, prompt = multimodal_engine(), mixed_prompt([5, 17], 3, [44])
    broken = GivenRows(prompt.given.is_given, torch.full_like(prompt.given.embeddings, torch.inf))
    requests = [engine.add_rows(replace(prompt, given=broken), GREEDY), engine.add([5, 17, 80], GREEDY)]
    while engine.has_work:
        engine.step()
    assert [request.finish_reason for request in requests] == ["error", "length"]
    assert requests[1].output_token_ids == reference_greedy(engine.target, [5, 17, 80], 8)
