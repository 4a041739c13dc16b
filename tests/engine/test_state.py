"""Where a request ends and which text is shown when: stop tokens, stop strings across tokens, limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from outrider.core import Chunk, SamplingParams, TokenLogprobs
from outrider.engine.state import RequestState, held_back

WORDS = ("a", "b", "ab", "c", "<e>", "xyz", "")
STOP_TOKEN_ID = 4


class WordDecoder:
    """Every token is a word; `rest` is what only the end of the text makes certain."""

    def __init__(self, rest: str = "") -> None:
        self.rest = rest

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(WORDS[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return self.rest


def make_request(*stop_strings: str, max_tokens: int = 100, rest: str = "", decoder: Any = True) -> RequestState:
    return RequestState(
        index=3,
        prompt_token_ids=(0, 1),
        params=SamplingParams(stop_strings=stop_strings),
        noise_seed=0,
        draft_length=4,
        num_tokens_left=max_tokens,
        stop_token_ids=frozenset({STOP_TOKEN_ID}),
        decoder=WordDecoder(rest) if decoder else None,  # type: ignore[arg-type]
    )


def feed(request: RequestState, *blocks: Sequence[int]) -> list[Chunk]:
    """Chunks until the request ends."""
    chunks = []
    for block in blocks:
        if request.finish_reason is None:
            chunks.append(request.append(list(block), num_accepted_tokens=len(block) - 1))
    return chunks


def test_tokens_move_the_anchor() -> None:
    request = make_request()
    (chunk,) = feed(request, [0, 1, 3])
    assert chunk == Chunk(3, "abc", (0, 1, 3), 2)
    assert (request.anchor_token_id, request.anchor_position, request.num_tokens_left) == (3, 4, 97)


def test_a_stop_token_is_emitted_without_text_and_ends_the_block() -> None:
    request = make_request()
    (chunk,) = feed(request, [0, STOP_TOKEN_ID, 1, 1])
    assert chunk == Chunk(3, "a", (0, STOP_TOKEN_ID), 2, "stop")
    assert request.output_token_ids == [0, STOP_TOKEN_ID]


def test_the_limit_cuts_a_block_and_a_stop_on_the_last_token_beats_it() -> None:
    request = make_request(max_tokens=2)
    assert feed(request, [0, 1, 3])[0] == Chunk(3, "ab", (0, 1), 2, "length")
    request = make_request(max_tokens=2)
    assert feed(request, [0, STOP_TOKEN_ID, 3])[0].finish_reason == "stop"


def test_accepted_drafts_are_counted_as_far_as_they_are_shown() -> None:
    request = make_request(max_tokens=1)
    chunk = request.append([0, 1, 3], num_accepted_tokens=2, num_draft_tokens=4)
    assert (chunk.num_accepted_draft_tokens, chunk.num_draft_tokens) == (1, 4)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    request = make_request("abc")
    chunks = feed(request, [5], [0], [1], [0], [1], [3])
    assert [chunk.text for chunk in chunks] == ["xyz", "", "", "ab", "", ""]
    assert (request.text, request.finish_reason) == ("xyzab", "stop")


def test_a_stop_string_inside_one_block_cuts_tokens_after_it() -> None:
    request = make_request("bc")
    (chunk,) = feed(request, [5, 2, 3, 0, 0])
    assert chunk == Chunk(3, "xyza", (5, 2, 3), 3, "stop")


@pytest.mark.parametrize("stops", [("abc",), ("bab", "c"), ("zz", "abab"), ("cx",)])
def test_text_does_not_depend_on_how_tokens_were_blocked(stops: tuple[str, ...]) -> None:
    tokens = [5, 0, 2, 0, 1, 3, 5, 2, 2, 3, 1]
    results = set()
    for cuts in ([], [1], [3], [2, 5, 7], list(range(1, len(tokens)))):
        request = make_request(*stops, max_tokens=len(tokens))
        bounds = [0, *cuts, len(tokens)]
        chunks = feed(request, *(tokens[start:end] for start, end in pairwise(bounds)))
        assert "".join(chunk.text for chunk in chunks) == request.text
        results.add((request.text, tuple(request.output_token_ids), request.finish_reason))
    assert len(results) == 1


def test_the_end_releases_what_was_held_back() -> None:
    request = make_request("abc", max_tokens=3)
    assert [chunk.text for chunk in feed(request, [5], [2], [0])] == ["xyz", "", "aba"]
    assert request.finish_reason == "length"
    request = make_request("abc")
    assert [chunk.text for chunk in feed(request, [2], [STOP_TOKEN_ID])] == ["", "ab"]


def test_an_unfinished_character_may_complete_a_stop_string() -> None:
    request = make_request("ab?", max_tokens=2, rest="?")
    feed(request, [5], [2])
    assert (request.text, request.finish_reason) == ("xyz", "stop")


def test_the_draft_length_leaves_room_for_the_targets_own_token() -> None:
    lengths = [make_request(max_tokens=limit).max_draft_length for limit in (1, 2, 5, 6)]
    assert lengths == [0, 1, 4, 4]


def test_stop_strings_are_looked_for_after_min_tokens() -> None:
    request = make_request("b", "ab")
    request.params = SamplingParams(stop_strings=("b", "ab"), min_tokens=2)
    chunks = feed(request, [0, 1, 0, 1])
    assert (request.text, request.output_token_ids, request.finish_reason) == ("ab", [0, 1, 0, 1], "stop")
    assert chunks[0].finish_reason == "stop"


def test_logprobs_are_cut_with_the_tokens() -> None:
    request = make_request()
    entries = [TokenLogprobs(token_id, -1.0, ()) for token_id in (0, STOP_TOKEN_ID, 1)]
    chunk = request.append([0, STOP_TOKEN_ID, 1], num_accepted_tokens=2, logprobs=entries)
    assert chunk.logprobs == tuple(entries[:2])
    assert request.logprobs == entries[:2]


def test_without_a_tokenizer_there_are_only_tokens() -> None:
    request = make_request(decoder=False)
    assert feed(request, [0, 1])[0] == Chunk(3, "", (0, 1), 1)


def test_a_failed_request_says_so_and_takes_nothing() -> None:
    request = make_request()
    assert request.spell(request.fail()) == Chunk(3, "", (), 0, "error")
    assert (request.finish_reason, request.output_token_ids) == ("error", [])


def test_held_back_is_the_longest_end_that_begins_the_stop() -> None:
    assert [held_back(text, "aab") for text in ("", "x", "xa", "aaa", "aab", "ab")] == [0, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("stops", [(), ("never",)])
@pytest.mark.parametrize("last", [STOP_TOKEN_ID, 3])
def test_what_is_taken_can_be_spelled_later(stops: tuple[str, ...], last: int) -> None:
    blocks = ([0, 1], [2, 3, 0], [5, last])
    expected, request = (make_request(*stops, max_tokens=7, rest="!") for _ in range(2))
    at_once = feed(expected, *blocks)
    taken = [request.take(list(block), num_accepted_tokens=len(block) - 1) for block in blocks]
    assert (request.output_token_ids, request.finish_reason) == (expected.output_token_ids, expected.finish_reason)
    assert [request.spell(chunk) for chunk in taken] == at_once
    assert request.text == expected.text == "".join(chunk.text for chunk in at_once)


def test_a_stop_string_ends_a_request_before_it_is_spelled() -> None:
    request = make_request("ca")
    taken = request.take([3, 0, 0], num_accepted_tokens=2)
    assert (taken.shown, taken.token_ids, request.finish_reason) == ("", [3, 0], "stop")
    assert request.spell(taken) == Chunk(3, "", (3, 0), 2, "stop")


@pytest.mark.parametrize("limit", range(1, 6))
@pytest.mark.parametrize("stop_at", [None, *range(5)])
def test_tokens_taken_together_are_those_taken_one_by_one(limit: int, stop_at: int | None) -> None:
    block = [STOP_TOKEN_ID if stop_at in (slot, slot - 2) else slot % 3 for slot in range(5)]
    together, one_by_one = make_request(max_tokens=limit), make_request("never", max_tokens=limit)
    taken, expected = (each.take(block, num_accepted_tokens=4, num_draft_tokens=4) for each in (together, one_by_one))
    assert taken._replace(request=one_by_one, shown="") == expected._replace(shown="")
    for name in ("output_token_ids", "num_tokens_left", "finish_reason"):
        assert getattr(together, name) == getattr(one_by_one, name)
    assert taken.finish_reason == ("stop" if stop_at is not None and stop_at < limit else "length")


def test_a_cycle_is_counted_once_and_before_any_cut() -> None:
    request = make_request(max_tokens=2)
    taken = request.take([0, 1, 3], num_accepted_tokens=2, num_draft_tokens=4)
    assert request.acceptance.num_cycles == 0  # with the telling, not before
    request.spell(taken)
    assert (request.acceptance.num_cycles, request.acceptance.num_draft_tokens) == (1, 4)
    assert request.acceptance.accepted_histogram == {2: 1}


def test_a_plan_of_counts_goes_token_by_token() -> None:
    request = make_request()
    request.output_token_ids.append(0)
    assert (request.planned_count, request.is_synthetic) == (-1, False)
    request.planned_counts = [2, 0, 1]
    assert (request.planned_count, request.is_synthetic) == (2, True)
    request.output_token_ids += [0, 0]
    assert request.planned_count == 1
