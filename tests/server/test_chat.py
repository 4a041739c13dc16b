"""Which template a target has, and what holds for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers.models import BPE

from outrider.errors import ConfigError, RequestError
from outrider.server.chat import CONTROL_TOKENS, GEMMA4, PLAIN, ChatTemplate, find_template
from outrider.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": " Hello. "}


def make_tokenizer(*tokens: str) -> Tokenizer:
    backend = JsonTokenizer(BPE(unk_token="<unk>"))
    backend.add_special_tokens(["<bos>", "<eos>", *tokens])
    return Tokenizer(backend, bos_id=0, eos_ids=[1])


def rendered(template: ChatTemplate) -> str:
    return template.render_chat([USER], enable_thinking=False).text


def test_the_plain_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, SAID, USER]
    chat = PLAIN.render_chat(messages, enable_thinking=True)
    assert chat.text == "<bos>Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Hi\n\nAssistant:"
    assert chat.boundaries == (len("<bos>Be brief.\n\n"), len("<bos>Be brief.\n\nUser: Hi\n\n"), len(chat.text) - 10)
    assert PLAIN.stop_strings == ("\nUser:",)
    with pytest.raises(RequestError, match="knows no tools"):
        PLAIN.render_chat([USER], [{"type": "function", "function": {"name": "f"}}], enable_thinking=False)


def test_built_in_templates_go_by_the_vocabulary(tmp_path: Path) -> None:
    assert find_template(None, make_tokenizer()) is PLAIN
    assert find_template(tmp_path, make_tokenizer()) is PLAIN
    tokenizer = make_tokenizer("<|turn>", "<turn|>", "<|channel>")
    assert find_template(tmp_path, tokenizer) is GEMMA4
    shown = ("<|channel>", "<|turn>", "<turn|>")
    assert GEMMA4.shown_token_ids(tokenizer) == tuple(map(tokenizer.id_of, shown))
    assert GEMMA4.stop_token_ids(tokenizer) == (tokenizer.id_of("<turn|>"),)


def test_the_checkpoints_own_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("<|turn>")
    config = {"chat_template": "{{ bos_token }}config {{ eos_token }}", "eos_token": {"content": "<eos>"}}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    template = find_template(tmp_path, tokenizer)
    assert (template.name, rendered(template)) == (str(path), "<bos>config <eos>")
    assert template.control_tokens == CONTROL_TOKENS

    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert rendered(find_template(tmp_path, tokenizer)) == "<bos>default"

    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert rendered(find_template(tmp_path, tokenizer)) == "<bos>file Hi"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not"):
        find_template(tmp_path, make_tokenizer())


@pytest.mark.parametrize("template", [PLAIN, GEMMA4], ids=["plain", "gemma4"])
def test_wrong_messages_are_named(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\] has role 'x'"):
        template.render_chat([USER, {"role": "x", "content": ""}], enable_thinking=False)
