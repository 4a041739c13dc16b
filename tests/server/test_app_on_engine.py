"""The whole way: OpenAI's own client, the server, the engine, the embedded default with its drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.embedded import MODEL, serve_embedded
from tests.serving import Served, eventually

PROMPT = "1, 2, 3, 4, 5, 6,"
GREEDY = {"model": MODEL, "temperature": 0.0}
COUNTING = {**GREEDY, "prompt": PROMPT, "max_tokens": 12}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 10}
PLAIN = {"speculative": {"enabled": False}}
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "birds": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sky", "birds"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_embedded() as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.sdk


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}


def test_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(**COUNTING)
    assert done.choices[0].text.startswith(" 7, 8, 9, 10")
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (12, done.usage.prompt_tokens + 12)


def test_the_switch_changes_the_work_and_not_the_text(client: openai.OpenAI) -> None:
    drafted = client.completions.create(**COUNTING)
    plain = client.completions.create(**COUNTING, extra_body=PLAIN)
    short = client.completions.create(**COUNTING, extra_body={"speculative": {"num_speculative_tokens": 1}})
    assert drafted.choices[0].text == plain.choices[0].text == short.choices[0].text
    assert plain.model_extra["metrics"] == {"speculative_decoding": None}
    stats, short_stats = (each.model_extra["metrics"]["speculative_decoding"] for each in (drafted, short))
    assert stats["num_accepted_draft_tokens"] > 0
    assert stats["mean_acceptance_length"] > 1
    assert stats["num_spec_steps"] < 12
    assert short_stats["num_spec_tokens"] == 1
    assert short_stats["num_draft_tokens"] <= short_stats["num_spec_steps"]


def test_a_completion_in_pieces_has_the_usage_of_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(**COUNTING)
    chunks = list(client.completions.create(**COUNTING, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_chat_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    message = whole.choices[0].message
    assert message.role == chunks[0].choices[0].delta.role == "assistant"
    assert message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0


def test_logprobs_of_both_kinds_agree_with_the_text(client: openai.OpenAI) -> None:
    found = client.completions.create(**COUNTING, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 12
    assert all(top[token] == max(top.values()) for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    plain = client.completions.create(**COUNTING, logprobs=2, extra_body=PLAIN).choices[0].logprobs
    assert found.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-3)
    chat = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0]
    entries = chat.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.lstrip().startswith(chat.message.content)  # a chat's text has no space at its start, no stop string
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in entries)


def test_an_answer_matches_its_json_schema(client: openai.OpenAI) -> None:
    asked = {**CHAT, "max_tokens": 40, "response_format": json_format(SCHEMA)}
    done = client.chat.completions.create(**asked)
    answer = json.loads(done.choices[0].message.content)
    assert done.choices[0].finish_reason == "stop"
    assert set(answer) == {"sky", "birds"}
    assert answer["sky"] in ("blue", "grey")
    assert 0 <= answer["birds"] <= 99
    plain = client.chat.completions.create(**asked, extra_body=PLAIN)
    assert plain.choices[0].message.content == done.choices[0].message.content


def test_seeded_choices_are_those_of_their_own_seeds(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 1.0}
    both = client.completions.create(**asked, n=2, seed=7)
    alone = [client.completions.create(**asked, seed=seed, extra_body=PLAIN).choices[0].text for seed in (7, 8)]
    assert [choice.text for choice in sorted(both.choices, key=lambda choice: choice.index)] == alone
    assert alone[0] != alone[1]
    assert both.usage.completion_tokens == 12


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    done = client.completions.create(**COUNTING, stop=[" 9,", "zebra"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (" 7, 8,", "stop")
    chunks = list(client.completions.create(**COUNTING, stop=" 9,", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 7, 8,"


@pytest.mark.parametrize("path", ["completions", "chat.completions"])
def test_a_client_that_leaves_frees_its_seat_and_pages(served: Served, client: openai.OpenAI, path: str) -> None:
    eventually(lambda: served.backend.gauges().num_running == 0)
    before = served.backend.gauges()
    asked = {**(COUNTING if path == "completions" else CHAT), "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    endpoint = client.completions if path == "completions" else client.chat.completions
    stream = endpoint.create(**asked, stream=True)
    next(iter(stream))
    assert served.backend.gauges().num_running == 1
    assert served.backend.gauges().num_free_pages < before.num_free_pages
    stream.close()
    eventually(lambda: served.backend.gauges().num_running == 0)
    after = served.backend.gauges()
    assert (after.num_free_pages, after.num_waiting) == (before.num_free_pages, 0)
    assert after.num_output_tokens - before.num_output_tokens < 200
    assert client.completions.create(**COUNTING).choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            openai.BadRequestError,
            "text only",
        ),
        ({"model": "zebra"}, openai.NotFoundError, "zebra"),
        ({"response_format": json_format({"type": "zebra"})}, openai.BadRequestError, "schema"),
        ({"extra_body": {"speculative": {"num_speculative_tokens": 999}}}, openai.BadRequestError, "999"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_name(
    served: Served,
    client: openai.OpenAI,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    named: str,
    stream: bool,
) -> None:
    with pytest.raises(kind, match=named):
        client.chat.completions.create(**{**CHAT, "stream": stream, **fields})
    assert served.backend.fault is None


def test_the_server_says_that_it_drafts(served: Served, client: openai.OpenAI) -> None:
    client.completions.create(**COUNTING)
    assert [model.id for model in client.models.list().data] == [MODEL]
    shown = served.http.get("/v1/speculation").json()
    assert (shown["status"], shown["active"], shown["reason"]) == ("ready", True, None)
    assert shown["acceptance"]["num_accepted_draft_tokens"] > 0
