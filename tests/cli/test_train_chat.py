from __future__ import annotations

from outrider.cli.train_chat import TemplateChat
from outrider.server.chat import PLAIN
from tests.training.talk import CALL, CHAT, END_ID, TOKENIZER, TOOL

ASKED = [{"role": "user", "content": "Time?"}]


def test_a_chat_is_written_and_read_as_the_server_does() -> None:
    prompt = CHAT.prompt(ASKED, [TOOL], thinking=True)
    assert prompt.startswith("<bos>")
    assert "clock" in prompt
    assert "<|think|>" in prompt
    assert "<|think|>" not in CHAT.prompt(ASKED, [], thinking=False)
    text = f"<|channel>thought\nhm<channel|>Let me see.{CALL}"
    assert CHAT.message(text, prompt=prompt, tools=[TOOL], thinking=True) == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "hm",
        "tool_calls": ["clock"],
    }
    assert END_ID in CHAT.stop_token_ids
    assert TOKENIZER.id_of("<|channel>") in CHAT.shown_token_ids


def test_a_target_without_a_template_ends_where_the_user_would_speak() -> None:
    chat = TemplateChat(PLAIN, TOKENIZER)
    assert chat.prompt(ASKED, [], thinking=False) == "<bos>User: Time?\n\nAssistant:"
    assert chat.message(" Noon.", prompt="", tools=[], thinking=False)["content"].strip() == "Noon."
    assert chat.stop_strings == ("\nUser:",)
