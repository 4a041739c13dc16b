"""Reading scripted answers in any pieces."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.server.chat import GEMMA4, ChatTemplate
from outrider.server.messages import Tool
from outrider.server.parser import ChatParser, ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallStart

TOOLS = (Tool("get_weather"), Tool("f"))
NUM_RANDOM_CUTS = 300


@dataclass
class Answer:
    """A message put together from deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    finish_reason: str = ""

    def add(self, deltas: Iterable[Delta]) -> None:
        """What a client does with them; a call is started before it gets arguments."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            elif isinstance(delta, ToolCallStart):
                assert delta.index == len(self.calls)
                self.calls.append((delta.id, delta.name, ""))
            elif isinstance(delta, ToolCallArguments):
                call_id, name, arguments = self.calls[delta.index]
                assert delta.index == len(self.calls) - 1
                self.calls[delta.index] = (call_id, name, arguments + delta.text)

    @property
    def called(self) -> list[tuple[str, Any]]:
        """Names and arguments as values."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def read_answer(
    pieces: Iterable[str],
    *,
    template: ChatTemplate = GEMMA4,
    tools: tuple[Tool, ...] = TOOLS,
    think: bool = False,
    prompt: str = "",
    finish_reason: str = "stop",
) -> Answer:
    """The message that a parser makes of an answer in these pieces; calls are numbered."""
    ids = itertools.count()
    parser = ChatParser(template, tools, enable_thinking=think, prompt=prompt, new_call_id=lambda: f"call_{next(ids)}")
    answer = Answer()
    for piece in pieces:
        deltas = parser.push(piece)
        assert not [delta for delta in deltas if not isinstance(delta, ToolCallStart) and not delta.text]
        answer.add(deltas)
    deltas, answer.finish_reason = parser.finish(finish_reason)
    answer.add(deltas)
    return answer


def cuts(text: str, *, num_random: int = NUM_RANDOM_CUTS) -> Iterator[list[str]]:
    """All cuts in two, random cuts in many, and one character at a time."""
    yield list(text)
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    rng = random.Random(0)
    for _ in range(num_random):
        ends = sorted(rng.sample(range(len(text) + 1), rng.randrange(1, len(text))))
        yield [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


def read_in_any_pieces(text: str, **options: Any) -> Answer:
    """The message, the same for every cut."""
    whole = read_answer([text], **options)
    for pieces in cuts(text):
        assert read_answer(pieces, **options) == whole, pieces
    return whole
