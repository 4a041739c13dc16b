"""Raw log-probabilities: the softmax of the target's own logits, one entry a token."""

from __future__ import annotations

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine.logprobs import raw_logprobs
from tests.scripted import TableTarget, make_test_engine, run_requests

ROWS = [torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log() + 5, torch.zeros(3, dtype=torch.float64)]


def test_each_token_has_its_own_row_and_the_likeliest_come_first() -> None:
    first, second = raw_logprobs(ROWS, [0, 2], 2)
    assert (first.token_id, second.token_id) == (0, 2)
    assert first.raw_logprob == pytest.approx(torch.tensor(0.1).log().item())
    assert [token_id for token_id, _ in first.top] == [1, 2]
    assert sum(torch.tensor([value for _, value in first.top]).exp()) == pytest.approx(0.9)
    assert second.raw_logprob == pytest.approx(-torch.tensor(3.0).log().item())


def test_no_top_and_more_top_than_tokens() -> None:
    assert raw_logprobs(ROWS[:1], [1], 0)[0].top == ()
    assert len(raw_logprobs(ROWS[:1], [1], 20)[0].top) == 3


def test_only_who_asks_gets_them_and_settings_do_not_change_them() -> None:
    engine = make_test_engine(TableTarget(torch.stack(ROWS[:1] * 3)))
    asking = SamplingParams(max_tokens=3, logprobs=1, temperature=0.5, seed=1, allowed_token_ids=(2,))
    states = [engine.add([0], params) for params in (asking, SamplingParams(max_tokens=3))]
    chunks = [chunk for _ in range(8) if engine.has_work for chunk in engine.step()]
    assert states[1].logprobs == []
    assert [entry.token_id for entry in states[0].logprobs] == states[0].output_token_ids == [2, 2, 2]
    assert all(entry.raw_logprob == pytest.approx(torch.tensor(0.3).log().item()) for entry in states[0].logprobs)
    own = [chunk for chunk in chunks if chunk.request_index == 0]
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in own)
    assert [entry for chunk in own for entry in chunk.logprobs] == states[0].logprobs


def test_asking_does_not_change_the_text() -> None:
    target = TableTarget(torch.stack(ROWS[:1] * 3))
    for params in (SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=4)):
        asking = SamplingParams(**{**vars(params), "logprobs": 2})
        assert run_requests(make_test_engine(target), ([0], params)) == run_requests(
            make_test_engine(target), ([0], asking)
        )
