from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider.cli.train_chat import TemplateChat
from outrider.core import Prompt
from outrider.errors import ConfigError, RequestError
from outrider.server.chat import PLAIN, ChatTemplate
from outrider.server.jinja_template import JinjaRenderer
from outrider.training.answering import AnswerOptions, answer, check_chat, unwritable
from outrider.training.conversations import Conversation, read_row
from tests.training.talk import CALL, CHAT, END_ID, OPTIONS, TOKENIZER, TOOL, Talker, question, row

ROOM = 215
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "Oslo"}'}}],
}


def chat_row(*messages: Any, **more: Any) -> Conversation:
    turned = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    return row(json.dumps({"messages": turned, **more}))


def record_of(talker: Talker, conversation: Conversation, options: AnswerOptions = OPTIONS) -> dict[str, Any]:
    (record,) = answer(talker, CHAT, [conversation], options)
    assert record["key"] == conversation.key
    return record


def spelled(token_ids: list[int]) -> str:
    return "".join(map(TOKENIZER.token_text, token_ids))


def test_a_conversation_goes_on_from_the_targets_own_answers() -> None:
    """Not from those of the file; every answer is kept with the tokens it followed, end token included."""
    talker = Talker(lambda prompt: f"answer {prompt.count('<|turn>user')}")
    record = record_of(talker, chat_row("One?", {"role": "assistant", "content": "From the file."}, "Two?"))
    assert [found["text"] for found in record["answers"]] == ["answer 1", "answer 2"]
    assert (record["ended"], record["thinking"]) == (None, False)
    second = record["answers"][1]
    prompt = spelled(second["prompt_token_ids"])
    assert "answer 1<turn|>" in prompt
    assert "From the file" not in prompt
    assert prompt == talker.prompts[1]
    assert spelled(second["token_ids"]) == "answer 2<turn|>"
    assert second["token_ids"][-1] == END_ID


def test_a_call_of_the_file_keeps_its_results_whatever_the_target_writes() -> None:
    talker = Talker(lambda prompt: "Noon." if "noon" in prompt else CALL)
    record = record_of(
        talker, chat_row("Time?", CALLING, {"role": "tool", "content": "noon", "tool_call_id": "a"}, tools=[TOOL])
    )
    assert [(found["num_calls"], found["text"]) for found in record["answers"]] == [(1, CALL), (0, "Noon.")]
    assert "Oslo" in talker.prompts[1]
    assert "Rome" not in talker.prompts[1]


@pytest.mark.parametrize(
    ("said", "ended", "num_answers"),
    [
        ("", "empty answer", 0),
        (" \n", "empty answer", 0),
        (CALL, "call without a result", 1),
        ("word " * 40, "cut answer", 1),
        ("x" * 90, "over-long prompt", 1),
    ],
)
def test_a_conversation_ends_where_it_cannot_go_on(said: str, ended: str, num_answers: int) -> None:
    record = record_of(
        Talker(lambda _: said),
        chat_row("One?", {"role": "assistant", "content": "x"}, "Two?", tools=[TOOL]),
        replace(OPTIONS, sequence_tokens=ROOM, max_tokens=200),
    )
    assert (record["ended"], len(record["answers"])) == (ended, num_answers)
    assert all(len(each["prompt_token_ids"] + each["token_ids"]) <= ROOM for each in record["answers"])


def test_the_last_answer_may_end_as_it_likes() -> None:
    record = record_of(Talker(lambda _: CALL), chat_row("One?", tools=[TOOL]))
    assert (record["ended"], record["answers"][0]["num_calls"]) == (None, 1)
    record = record_of(Talker(lambda _: "word " * 40), chat_row("One?"))
    assert (record["ended"], record["answers"][0]["finish_reason"]) == (None, "length")
    assert len(record["answers"][0]["token_ids"]) == OPTIONS.max_tokens


def test_a_share_of_conversations_thinks_and_thoughts_stay_out_of_later_prompts() -> None:
    talker = Talker(lambda prompt: ("<|channel>thought\nhm<channel|>" if "<|think|>" in prompt else "") + "Well.")
    asked = [chat_row(f"Is {number} even?", {"role": "assistant", "content": "x"}, "Sure?") for number in range(40)]
    half = replace(OPTIONS, thinking_share=0.5)
    records = list(answer(talker, CHAT, asked, half))
    assert 10 < sum(record["thinking"] for record in records) < 30
    assert {each["key"]: each["thinking"] for each in records} == {each.key: half.thinks(each) for each in asked}
    for record in records:
        assert [found["has_thought"] for found in record["answers"]] == [record["thinking"]] * 2
        assert "hm" not in spelled(record["answers"][1]["prompt_token_ids"])
    assert all(replace(OPTIONS, thinking_share=1.0).thinks(each) for each in asked)


def test_as_many_as_asked_are_under_way_and_it_changes_no_answer() -> None:
    asked = [question(f"Number {number}?") for number in range(5)]
    answers = []
    for num_streams in (1, 3, 9):
        talker = Talker(lambda prompt: "long " * prompt.count("2") * 3 + "end")
        found = answer(talker, CHAT, asked, replace(OPTIONS, num_streams=num_streams))
        first = next(found)
        assert len(talker.prompts) == min(num_streams, 5)
        answers.append({record["key"]: record for record in (first, *found)})
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 5


def test_template_tokenizer_and_backend_must_belong_together() -> None:
    talker = Talker(str)
    assert check_chat(talker, TOKENIZER, CHAT, OPTIONS) == check_chat(talker, TOKENIZER, CHAT, OPTIONS)
    plain = TemplateChat(PLAIN, TOKENIZER)
    assert check_chat(talker, TOKENIZER, plain, OPTIONS) != check_chat(talker, TOKENIZER, CHAT, OPTIONS)
    source = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    foreign = TemplateChat(ChatTemplate("x.jinja", JinjaRenderer(source, origin="x", special_tokens={})), TOKENIZER)
    with pytest.raises(ConfigError, match=r"x.jinja.*<\|im_end\|>, which is no token of the target"):
        check_chat(talker, TOKENIZER, foreign, OPTIONS)
    with pytest.raises(ConfigError, match="knows no thoughts"):
        check_chat(talker, TOKENIZER, plain, replace(OPTIONS, thinking_share=0.1))

    class Other(Talker):
        def encode(self, prompt: Prompt) -> list[int]:
            return [*super().encode(prompt), 7]

    with pytest.raises(ConfigError, match="another tokenizer"):
        check_chat(Other(str), TOKENIZER, CHAT, OPTIONS)


def test_what_the_template_cannot_write_is_found_before_anything_is_asked() -> None:
    plain = TemplateChat(PLAIN, TOKENIZER)
    assert unwritable(question("Why?"), CHAT, OPTIONS) is None
    with pytest.raises(RequestError):
        plain.prompt([{"role": "user", "content": "Why?"}], [TOOL], thinking=False)
    assert "knows no tools" in str(unwritable(chat_row("Why?", tools=[TOOL]), plain, OPTIONS))
    later = chat_row("Why?", CALLING, {"role": "tool", "content": "noon", "tool_call_id": "a"})
    assert "knows no tools" in str(unwritable(later, plain, OPTIONS))
    assert unwritable(later, CHAT, OPTIONS) is None
    assert unwritable(read_row('{"turns": ["a", "b", "c"]}'), CHAT, OPTIONS) is None


@pytest.mark.parametrize(
    "wrong", [{"sequence_tokens": 8}, {"max_tokens": 0}, {"num_streams": 0}, {"thinking_share": 1.5}]
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(OPTIONS, **wrong)
