"""The target's chat template, as training asks for it: `training` and `server` do not know each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.chat import ChatTemplate
from outrider.server.messages import read_tools
from outrider.server.parser import ChatParser, ContentDelta, ReasoningDelta, ToolCallStart
from outrider.tokenizer import Tokenizer


class TemplateChat:
    """A `training.answering.ChatFormat` made of the template that `serve` would use."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template, self.name = template, template.name
        self.stop_strings = template.stop_strings
        self.stop_token_ids = template.stop_token_ids(tokenizer)
        self.shown_token_ids = template.shown_token_ids(tokenizer)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, thinking: bool
    ) -> str:
        """The chat as text, begin token spelled out; RequestError names the message or tool that is wrong."""
        return self.template.render_chat(messages, tools or None, enable_thinking=thinking).text

    def message(self, text: str, *, prompt: str, tools: Sequence[Mapping[str, Any]], thinking: bool) -> dict[str, Any]:
        """What `serve` would send for an answer: content, `reasoning` and the names of calls that it began."""
        parser = ChatParser(self.template, read_tools(tools or None), enable_thinking=thinking, prompt=prompt)
        deltas = [*parser.push(text), *parser.finish("stop")[0]]
        return {
            "role": "assistant",
            "content": "".join(each.text for each in deltas if isinstance(each, ContentDelta)),
            "reasoning": "".join(each.text for each in deltas if isinstance(each, ReasoningDelta)),
            "tool_calls": [each.name for each in deltas if isinstance(each, ToolCallStart)],
        }
