from __future__ import annotations

import pytest

from outrider.backends.scripted import byte_tokenizer
from outrider.core import AcceptanceStats, Chunk, RequestSummary, TokenLogprobs
from outrider.server.faults import Fault
from outrider.server.replies import CompletionChoice, Envelope, Tally, acceptance_object, check_chunk, event, usage

TOKENIZER = byte_tokenizer()
STATS = AcceptanceStats(3, 9, 4, {0: 1, 1: 1, 3: 1})


def test_usage_counts_each_prompt_once() -> None:
    tallies = [Tally(5, 2, 10, 1), Tally(5, 2, 20, 0), Tally(7, 0, 1, 0), Tally(7, 0, 2, 0)]
    assert usage(tallies, 2) == {
        "prompt_tokens": 12,
        "completion_tokens": 33,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_acceptance_has_vllms_names() -> None:
    assert acceptance_object(STATS, 4) == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 9,
        "acceptance_histogram": [1, 1, 0, 1, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 9,
        "num_spec_tokens": 4,
    }
    assert acceptance_object(AcceptanceStats(5, 0, 0, {0: 5}), 4) is None


def test_synthetic_acceptance_is_marked() -> None:
    for synthetic in (False, True):
        choice = CompletionChoice(0, TOKENIZER, Tally(3), wants_logprobs=False)
        summary = RequestSummary(3, 0, 1, STATS, synthetic=synthetic)
        choice.push(Chunk(0, "a", (97,), 0, "length", summary=summary))
        stats = Envelope("text_completion", "m", [choice], 1, 4).response()["metrics"]["speculative_decoding"]
        assert ("synthetic" in stats) == synthetic


def test_a_failure_is_never_a_finish() -> None:
    summary = RequestSummary(1, 0, 0, STATS, "logits are not finite")
    with pytest.raises(Fault) as failed:
        check_chunk(Chunk(0, "", (), 0, "error", summary=summary))
    assert (failed.value.status, failed.value.message) == (500, "logits are not finite")
    with pytest.raises(Fault) as aborted:
        check_chunk(Chunk(0, "", (), 0, "abort"))
    assert aborted.value.status == 503
    for reason in (None, "stop", "length"):
        check_chunk(Chunk(0, "", (), 0, reason))


def test_a_choice_sends_what_shows_and_keeps_all() -> None:
    choice = CompletionChoice(0, TOKENIZER, Tally(3), wants_logprobs=False)
    assert choice.push(Chunk(0, "", (240,), 0)) == []
    assert choice.push(Chunk(0, "é", (97,), 0))[0]["text"] == "é"
    assert (
        choice.push(Chunk(0, "", (257,), 0, "stop", summary=RequestSummary(3, 2, 3, STATS)))[0]["finish_reason"]
        == "stop"
    )
    assert choice.whole() == {"index": 0, "text": "é", "logprobs": None, "finish_reason": "stop"}
    assert (choice.tally.num_output_tokens, choice.tally.num_cached_tokens) == (3, 2)
    shown = CompletionChoice(0, TOKENIZER, Tally(3), wants_logprobs=False, shows_all=True)
    assert [piece["text"] for piece in shown.push(Chunk(0, "", (240,), 0))] == [""]


def test_logprobs_come_though_no_text_does() -> None:
    choice = CompletionChoice(0, TOKENIZER, Tally(3), wants_logprobs=True)
    pieces = choice.push(Chunk(0, "", (240,), 0, logprobs=(TokenLogprobs(240, -0.5, ((97, -1.0),)),)))
    assert pieces[0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "<0xF0>": -0.5}]


def test_tokens_are_spelled_as_ids_on_request() -> None:
    choice = CompletionChoice(0, TOKENIZER, Tally(3), wants_logprobs=True, shows_ids=True)
    logprobs = choice.push(Chunk(0, "a", (97,), 0, logprobs=(TokenLogprobs(97, -0.5, ((98, -1.0),)),)))[0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert logprobs["top_logprobs"] == [{"token_id:98": -1.0, "token_id:97": -0.5}]
    assert choice.whole()["text"] == "a"


def test_statistics_are_those_of_one_answer() -> None:
    choices = [CompletionChoice(i, TOKENIZER, Tally(3, acceptance=STATS), wants_logprobs=False) for i in range(2)]
    one = Envelope("text_completion", "m", choices[:1], 1, 4)
    assert one.response()["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4
    assert "metrics" not in one.chunk({"finish_reason": None})
    assert "metrics" in one.chunk({"finish_reason": "stop"})
    two = Envelope("text_completion", "m", choices, 2, 4)
    assert "metrics" not in two.response()


def test_an_event_is_one_line_of_json() -> None:
    assert event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'
