from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.backends.scripted import Script
from outrider.server.app import ServerConfig
from tests.serving import MODEL, Served, events, serve

TEXT = "Hello 🙂 friend"
CALLS = '<|channel>thought\nplan<channel|>Sure. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    scripts = {"weather": Script.of_text(CALLS), "": Script.of_text(TEXT, num_cached_tokens=2)}
    with serve(scripts, ServerConfig(served_model_names=(MODEL, "other"))) as served:
        yield served


def test_models_are_listed_by_every_name(served: Served) -> None:
    listed = served.sdk.models.list().data
    assert [model.id for model in listed] == [MODEL, "other"]
    assert listed[0].max_model_len == 2048  # type: ignore[attr-defined]


def test_a_completion(served: Served) -> None:
    done = served.sdk.completions.create(model="other", prompt="hi", max_tokens=64)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (TEXT, "stop")
    assert done.model == MODEL
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 18, 21)
    assert done.usage.prompt_tokens_details.cached_tokens == 2  # type: ignore[union-attr]
    assert done.metrics["speculative_decoding"] == {  # type: ignore[attr-defined]
        "mean_acceptance_length": 3.6,
        "draft_acceptance_rate": 13 / 15,
        "acceptance_histogram": [0, 1, 0, 4],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 13,
        "num_draft_tokens": 15,
        "num_spec_tokens": 3,
    }


def test_a_completion_that_is_not_told_its_length_is_short(served: Served) -> None:
    done = served.sdk.completions.create(model=MODEL, prompt="hi")
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 16)  # type: ignore[union-attr]


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    options = {"include_usage": True}
    stream = served.sdk.completions.create(
        model=MODEL,
        prompt="hi",
        max_tokens=64,
        stream=True,
        stream_options=options,  # type: ignore[call-overload]
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    whole = served.sdk.completions.create(model=MODEL, prompt="hi", max_tokens=64)
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_absent_unless_asked_and_everywhere_if_asked(served: Served) -> None:
    body = {"prompt": "hi", "stream": True}
    assert all("usage" not in each for each in events(served.post("/v1/completions", body)) if each != "[DONE]")
    body["stream_options"] = {"continuous_usage_stats": True}
    counts = [each["usage"]["completion_tokens"] for each in events(served.post("/v1/completions", body))[:-1]]
    assert counts == sorted(counts)
    assert counts[0] > 0


def test_prompts_and_choices_multiply(served: Served) -> None:
    done = served.sdk.completions.create(model=MODEL, prompt=["hi", "hello"], n=2, seed=7, max_tokens=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.prompt_tokens == 3 + 6  # type: ignore[union-attr]
    assert done.usage.completion_tokens == 8  # type: ignore[union-attr]
    assert not hasattr(done, "metrics")
    asked = served.backend.submitted[-4:]
    assert [params.seed for _, params in asked] == [7, 8, 7, 8]
    assert [len(prompt) for prompt, _ in asked] == [3, 3, 6, 6]


def test_completion_logprobs(served: Served) -> None:
    done = served.sdk.completions.create(model=MODEL, prompt="hi", max_tokens=8, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "e", "l", "l", "o", " ", "<0xF0>", "<0x9F>"]
    assert logprobs.token_logprobs == [-0.5] * 8
    assert logprobs.top_logprobs[0] == {"a": -1.0, "b": -2.0, "H": -0.5}  # type: ignore[index]
    assert logprobs.text_offset[:4] == [0, 1, 2, 3]  # type: ignore[index]
    body = {"prompt": "hi", "max_tokens": 8, "logprobs": 2, "stream": True}
    streamed = [each["choices"][0]["logprobs"] for each in events(served.post("/v1/completions", body))[:-1]]
    assert [token for each in streamed for token in each["tokens"]] == logprobs.tokens
    assert [offset for each in streamed for offset in each["text_offset"]] == logprobs.text_offset


def test_chat_logprobs(served: Served) -> None:
    done = served.sdk.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=8,
        logprobs=True,
        top_logprobs=1,  # type: ignore[arg-type]
    )
    content = done.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert [entry.bytes for entry in content[-3:]] == [[32], [0xF0], [0x9F]]
    assert [entry.top_logprobs[0].token for entry in content] == ["a"] * 8


def test_a_chat_with_thoughts_and_a_call(served: Served) -> None:
    done = served.sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "weather"}],
        tools=[WEATHER],  # type: ignore[list-item]
        reasoning_effort="high",
    )
    choice = done.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "Sure."  # type: ignore[union-attr]
    assert choice.message.reasoning == choice.message.reasoning_content == "plan"  # type: ignore[attr-defined]
    call = choice.message.tool_calls[0]  # type: ignore[index]
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city":"Oslo","days":3}')  # type: ignore
    prompt = served.backend.submitted[-1][0]
    assert prompt.count(256) == 1


def test_the_first_delta_has_the_role(served: Served) -> None:
    stream = served.sdk.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[arg-type]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_tokens"] == 3  # type: ignore[attr-defined]


def test_the_request_switch(served: Served) -> None:
    body = {"prompt": "hi", "speculative": {"enabled": False}}
    done = served.post("/v1/completions", body).json()
    assert done["metrics"] == {"speculative_decoding": None}
    assert served.backend.submitted[-1][1].num_speculative_tokens == 0
    served.post("/v1/completions", {"prompt": "hi", "speculative": {"num_speculative_tokens": 2}})
    assert served.backend.submitted[-1][1].num_speculative_tokens == 2


def test_draft_marks_come_when_asked(served: Served) -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_draft_marks": True}, "max_tokens": 10}
    marks = [each["outrider"] for each in events(served.post("/v1/chat/completions", body))[:-1] if "outrider" in each]
    assert "".join(token for each in marks for token in each["tokens"]) == "Hello <0xF0><0x9F><0x99><0x82>"
    assert [each["accepted"] for each in marks] == [3, 3, 2]
    del body["stream_options"]
    assert "outrider" not in served.post("/v1/chat/completions", body).text


def test_tokenize_and_detokenize(served: Served) -> None:
    counted = served.post("/tokenize", {"prompt": "aé", "return_token_strs": True}).json()
    assert counted["tokens"] == [256, 97, 0xC3, 0xA9]
    assert (counted["count"], counted["max_model_len"]) == (4, 2048)
    assert counted["token_strs"] == ["<bos>", "a", "<0xC3>", "<0xA9>"]
    assert served.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]
    assert served.post("/detokenize", {"tokens": counted["tokens"]}).json() == {"prompt": "aé"}
    chat = served.post("/tokenize", {"messages": USER}).json()["tokens"]
    served.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1})
    assert tuple(chat) == served.backend.submitted[-1][0]


def test_speculation_says_what_is_so(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "hi"})
    shown = served.http.get("/v1/speculation").json()
    assert (shown["status"], shown["active"], shown["drafter"], shown["reason"]) == ("ready", True, "script", None)
    assert shown["acceptance"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/completions", {"prompt": "hi", "model": "zebra"}, 404, "zebra"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": "5"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "hi", "temperature": -1}, 400, "temperature=-1"),
        ("/v1/completions", {"prompt": "hi", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "hi", "n": 0}, 400, "n:"),
        ("/v1/completions", {"prompt": []}, 400, "0 prompts"),
        ("/v1/completions", {"prompt": [1, 9999]}, 400, "9999"),
        ("/v1/completions", {"prompt": "hi", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "x" * 3000}, 400, "context length is 2048"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", [], 400, "JSON object"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "text only",
        ),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, 400, "logprobs"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1"),
        ("/tokenize", {}, 400, "prompt or messages"),
    ],
)
def test_a_wrong_request_is_refused_by_name(served: Served, path: str, body: object, status: int, named: str) -> None:
    before = len(served.backend.submitted)
    answered = served.post(path, body)
    assert answered.status_code == status, answered.text
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert len(served.backend.submitted) == before


def test_unknown_fields_are_ignored(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": "hi", "user": "me", "whatever": {"x": [1]}}).status_code == 200
