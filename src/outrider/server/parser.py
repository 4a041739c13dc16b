"""Answers to messages: thoughts, content and tool calls, told apart while the text grows.

What comes out depends on the text alone and not on how it was cut into pieces: text that might be the beginning of a
marker, or whitespace that might stand before one, is kept back until the next piece decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from uuid import uuid4

from outrider.server.chat import ChatTemplate
from outrider.server.gemma4_template import CALL, CALL_END, CHANNEL, CHANNEL_END
from outrider.server.messages import Tool
from outrider.server.tool_syntax import QUOTE, ArgumentStream

LABEL = "thought\n"
_OPEN_THOUGHT = re.compile(re.escape(CHANNEL) + r"(thought\s*)?\Z")
_CALL_HEAD = re.compile(r"\s*(?:call:)?\s*([A-Za-z0-9_.-]+)\s*\Z")


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the thoughts before it."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins; all that is known of it but its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class _State(Enum):
    START = auto()  # a bare "thought" line may follow
    OPENED = auto()  # so may the label of a channel
    THOUGHT = auto()
    CONTENT = auto()
    GAP = auto()  # content, once something other than whitespace comes
    CALL_HEAD = auto()
    ARGUMENTS = auto()


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


class ChatParser:
    """Reads one answer, control tokens spelled out, and says what it adds to the message.

    Without tools nothing is a call. A thought that the prompt has opened already is seen in `prompt`, the rendered
    chat. With thinking on, a prompt that ends in a closed thought is taken for one that closed too early: the answer
    begins with a thought and the end marker of that decides.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tools: Sequence[Tool],
        *,
        enable_thinking: bool,
        prompt: str = "",
        new_call_id: Callable[[], str] = _new_call_id,
    ) -> None:
        self.num_calls = 0
        self._markers = template.control_tokens
        self._any_marker = re.compile("|".join(map(re.escape, self._markers)))
        self._has_tools, self._enable_thinking, self._new_call_id = bool(tools), enable_thinking, new_call_id
        self._state = _start_state(template, prompt, enable_thinking=enable_thinking)
        self._buffer = ""  # may end in the beginning of a marker
        self._held = ""  # a label, trailing whitespace of a thought, or the head of a call
        self._arguments = ArgumentStream()
        self._deltas: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        """Take more text; what is certain with it."""
        self._buffer += text
        self._read(is_last=False)
        return self._take()

    def finish(self, finish_reason: str) -> tuple[list[Delta], str]:
        """What was kept back, and the message's finish reason: "tool_calls" where complete calls ended the answer.

        A call that is cut off stays cut off, invalid JSON: completed, it would be one that the model did not make.
        """
        self._read(is_last=True)
        if self._state is _State.START:
            self._emit(ContentDelta(self._held))
        elif self._state is _State.OPENED and not LABEL.startswith(self._held):
            self._emit(ReasoningDelta(self._held))
        is_cut_off = self._state in (_State.CALL_HEAD, _State.ARGUMENTS)
        is_call = finish_reason == "stop" and self.num_calls > 0 and not is_cut_off
        return self._take(), "tool_calls" if is_call else finish_reason

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _emit(self, delta: Delta) -> None:
        """Add a delta, joined to the last one if they are of a kind."""
        if isinstance(delta, ToolCallStart):
            self._deltas.append(delta)
            return
        if not delta.text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(delta, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == delta.index:
            self._deltas[-1] = ToolCallArguments(last.index, last.text + delta.text)
        elif not isinstance(delta, ToolCallArguments) and last is not None and type(last) is type(delta):
            self._deltas[-1] = type(delta)(last.text + delta.text)
        else:
            self._deltas.append(delta)

    def _read(self, *, is_last: bool) -> None:
        """Cut the buffer at markers, which have a meaning of their own."""
        while self._markers and (found := self._any_marker.search(self._buffer)):
            text, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
            self._read_text(text)
            self._read_marker(found.group())
        held = 0 if is_last else self._num_undecided()
        text, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        self._read_text(text)

    def _num_undecided(self) -> int:
        """Length of the longest end of the buffer that begins a marker."""
        longest = max(map(len, self._markers), default=0)
        for length in range(min(longest - 1, len(self._buffer)), 0, -1):
            if any(marker.startswith(self._buffer[-length:]) for marker in self._markers):
                return length
        return 0

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if self._state in (_State.START, _State.OPENED):
            self._read_label(text)
        elif self._state is _State.THOUGHT:
            thought = self._held + text
            kept = thought.rstrip()
            self._held = thought[len(kept) :]
            self._emit(ReasoningDelta(kept))
        elif self._state is _State.CALL_HEAD:
            self._read_head(text)
        elif self._state is _State.ARGUMENTS:
            self._read_arguments(text)
        else:
            shown = text.lstrip() if self._state is _State.GAP else text
            self._state = _State.CONTENT if shown else self._state
            self._emit(ContentDelta(shown))

    def _read_label(self, text: str) -> None:
        """Wait until it is clear whether "thought" and a line end stand here, which are no text."""
        held = self._held + text
        self._held = ""
        if held.startswith(LABEL):
            is_thought = self._state is _State.OPENED or self._enable_thinking
            self._state = _State.THOUGHT if is_thought else _State.CONTENT
            self._read_text(held.removeprefix(LABEL))
        elif LABEL.startswith(held):
            self._held = held
        else:
            self._state = _State.THOUGHT if self._state is _State.OPENED else _State.CONTENT
            self._read_text(held)

    def _read_head(self, text: str) -> None:
        head, brace, rest = (self._held + text).partition("{")
        found = _CALL_HEAD.match(head)
        if not brace:
            self._held = head
        elif found is None:
            self._held, self._state = "", _State.CONTENT
            self._emit(ContentDelta(head + brace + rest))
        else:
            self._held, self._state, self._arguments = "", _State.ARGUMENTS, ArgumentStream()
            self._emit(ToolCallStart(self.num_calls, self._new_call_id(), found.group(1)))
            self.num_calls += 1
            self._read_arguments(rest)

    def _read_arguments(self, text: str) -> None:
        num_read = self._arguments.push(text)
        self._emit_arguments()
        self._read_text(text[num_read:])

    def _emit_arguments(self) -> None:
        self._emit(ToolCallArguments(self.num_calls - 1, self._arguments.take()))
        if self._arguments.is_complete:
            self._state = _State.GAP

    def _read_marker(self, marker: str) -> None:
        if self._state is _State.ARGUMENTS and marker == QUOTE:
            self._arguments.quote()
            self._emit_arguments()
        elif marker == QUOTE:
            self._read_text('"')
        else:
            self._end_state(marker)
            if marker == CHANNEL:
                self._state = _State.OPENED
            elif marker == CALL and self._has_tools:
                self._state = _State.CALL_HEAD
            elif self._state is not _State.GAP or marker != CALL_END:
                self._state = _State.CONTENT

    def _end_state(self, marker: str) -> None:
        """Settle what was kept back: any marker ends a thought, a label and a call."""
        held, self._held = self._held, ""
        if self._state is _State.START and not (marker == CHANNEL_END and held == LABEL.strip()):
            self._emit(ContentDelta(held))
        elif self._state is _State.OPENED and held != LABEL.strip():
            self._emit(ReasoningDelta(held))
        elif self._state is _State.CALL_HEAD:
            self._emit(ContentDelta(held))
        elif self._state is _State.ARGUMENTS:
            self._arguments.complete()
            self._emit_arguments()


def _start_state(template: ChatTemplate, prompt: str, *, enable_thinking: bool) -> _State:
    if not template.control_tokens:
        return _State.GAP
    opened = _OPEN_THOUGHT.search(prompt)
    if opened is not None:
        return _State.THOUGHT if opened.group(1) else _State.OPENED
    return _State.OPENED if enable_thinking and prompt.endswith(CHANNEL_END) else _State.START
