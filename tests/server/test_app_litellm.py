"""LiteLLM before the server: thoughts and calls by script, all else by the engine. `make clients` brings LiteLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from outrider.backends.scripted import Script
from tests.server import embedded
from tests.serving import MODEL, Served, eventually, serve

pytestmark = pytest.mark.slow

ANSWER = (
    '<|channel>thought\nplan it<channel|>Sure. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
)
ARGUMENTS = {"city": "Oslo", "days": 3}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
PROMPT = "1, 2, 3, 4, 5, 6,"
PLAIN = {"speculative": {"enabled": False}}


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or its import asks GitHub for prices
        yield pytest.importorskip("litellm", reason="LiteLLM is not installed: 200 MB for one file. Run make clients")


@pytest.fixture(scope="module")
def scripted() -> Iterator[Served]:
    with serve({"": Script.of_text(ANSWER, block_tokens=5)}) as served:
        yield served


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with embedded.serve_embedded() as served:
        yield served


def call(function: Any, served: Served, model: str, **fields: Any) -> Any:
    """A call of LiteLLM's against one of our servers."""
    return function(model=model, api_base=f"{served.url}/v1", api_key="none", max_retries=0, **fields)


@pytest.fixture
def ask_script(litellm: Any, scripted: Served) -> Any:
    return partial(
        call,
        litellm.completion,
        scripted,
        f"openai/{MODEL}",
        messages=[{"role": "user", "content": "Weather in Oslo?"}],
        tools=[WEATHER],
        extra_body={"reasoning_effort": "high"},
    )


@pytest.fixture
def complete(litellm: Any, engine: Served) -> Any:
    model = f"text-completion-openai/{embedded.MODEL}"
    return partial(call, litellm.text_completion, engine, model, prompt=PROMPT, temperature=0.0, max_tokens=12)


@pytest.fixture
def chat(litellm: Any, engine: Served) -> Any:
    messages = [{"role": "user", "content": "Name a colour."}]
    options = {"messages": messages, "temperature": 0.0, "max_tokens": 10}
    return partial(call, litellm.completion, engine, f"openai/{embedded.MODEL}", **options)


def test_thoughts_and_a_call_of_a_whole_answer(ask_script: Any) -> None:
    choice = ask_script().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "plan it"
    assert choice.message.content.strip() == "Sure."
    (found,) = choice.message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == ("get_weather", ARGUMENTS)


def test_thoughts_and_a_call_come_as_deltas(litellm: Any, ask_script: Any) -> None:
    chunks = list(ask_script(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [thought for delta in deltas if (thought := getattr(delta, "reasoning_content", None))]
    assert len(thoughts) > 1
    assert "".join(thoughts) == "plan it"
    assert "".join(delta.content or "" for delta in deltas).strip() == "Sure."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
    assert len({part.id for part in parts if part.id}) == 1
    assert json.loads("".join(part.function.arguments or "" for part in parts)) == ARGUMENTS
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.reasoning_content == "plan it"
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS
    assert whole.usage.completion_tokens == ask_script().usage.completion_tokens


def test_a_completion_and_the_switch(complete: Any) -> None:
    drafted, plain = complete(), complete(extra_body=PLAIN)
    assert drafted.choices[0].text == plain.choices[0].text
    assert drafted.choices[0].text.startswith(" 7, 8, 9, 10")
    assert drafted.usage.completion_tokens == 12
    assert "".join(chunk.choices[0].text or "" for chunk in complete(stream=True)) == drafted.choices[0].text


def test_a_chat_whole_and_in_pieces(chat: Any) -> None:
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0


def test_logprobs(chat: Any) -> None:
    entries = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries)


def test_an_answer_matches_its_json_schema(chat: Any) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = json.loads(chat(max_tokens=40, response_format=wanted).choices[0].message.content)
    assert answer["sky"] in ("blue", "grey")


def test_a_client_that_leaves_frees_its_seat_and_pages(chat: Any, engine: Served) -> None:
    num_free = engine.backend.gauges().num_free_pages
    stream = chat(max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert engine.backend.gauges().num_running == 1
    stream.completion_stream.close()
    eventually(lambda: engine.backend.gauges().num_running == 0)
    assert engine.backend.gauges().num_free_pages == num_free


def test_errors_keep_their_kind(litellm: Any, chat: Any, engine: Served) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    with pytest.raises(litellm.BadRequestError, match="text only"):
        chat(messages=image)
    with pytest.raises(litellm.NotFoundError, match="zebra"):
        call(litellm.completion, engine, "openai/zebra", messages=[{"role": "user", "content": "hi"}])
