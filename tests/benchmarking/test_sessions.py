from __future__ import annotations

import pytest

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.sessions import SHAPES, Conversation, find_shape, made_up_log
from outrider.errors import ConfigError


def answer(text: str = "done", *calls: dict[str, str]) -> Sample:
    return Sample(
        started_s=0.0, ttft_s=0.1, chunk_gaps_s=(), e2e_s=1.0, num_prompt_tokens=1, num_output_tokens=1, num_chunks=1,
        text=text, reasoning="", tool_calls=calls, finish_reason="stop", error=None, acceptance=None,
    )  # fmt: skip


def length(messages: tuple[dict[str, object], ...]) -> int:
    return sum(len(str(message["content"])) for message in messages)


def test_shapes_are_those_people_soak_with() -> None:
    sizes = {name: (shape.num_sessions, len(shape.turns)) for name, shape in SHAPES.items()}
    assert sizes == {"fresh": (20, 5), "continuous": (5, 5), "quick": (8, 5)}
    grown = [turn.num_result_characters for turn in SHAPES["continuous"].turns]
    assert grown == [0, 20_000, 24_000, 24_000, 32_000]
    with pytest.raises(ConfigError, match="--shape 'long'"):
        find_shape("long")


@pytest.mark.parametrize("has_tools", [True, False])
def test_context_grows_by_answers_and_tool_results(has_tools: bool) -> None:
    conversation = Conversation(SHAPES["continuous"].turns, "s-1", has_tools=has_tools)
    lengths = []
    for _, request in conversation.requests():
        lengths.append(length(request.messages))
        assert bool(request.tools) == has_tools
        roles = {message["role"] for message in request.messages}
        assert ("tool" in roles) == (has_tools and len(lengths) > 1)
        assert request.messages[-1]["role"] != "assistant"
        conversation.answered(answer("x" * 100))
    assert lengths[-1] - lengths[0] == pytest.approx(100_000 + 4 * 100, abs=500)


def test_calls_of_an_answer_are_answered() -> None:
    conversation = Conversation(SHAPES["fresh"].turns, "s-1", has_tools=True)
    asked = conversation.requests()
    next(asked)
    conversation.answered(answer("", {"id": "a", "name": "read_file", "arguments": "{}"}))
    _, request = next(asked)
    call, result = request.messages[-3:-1]
    assert call["tool_calls"][0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "read_file", "arguments": "{}"},
    }
    assert (result["role"], result["tool_call_id"]) == ("tool", "a")


def test_logs_are_of_the_size_asked_for_and_salted() -> None:
    assert len(made_up_log(12_345, "a")) == 12_345
    assert made_up_log(500, "a") == made_up_log(500, "a")
    assert made_up_log(500, "a")[:40] != made_up_log(500, "b")[:40]


def test_results_are_scaled() -> None:
    scaled = SHAPES["continuous"].scaled(0.1)
    assert [turn.num_result_characters for turn in scaled.turns] == [0, 2_000, 2_400, 2_400, 3_200]
    with pytest.raises(ConfigError, match="--scale 0"):
        SHAPES["fresh"].scaled(0)
