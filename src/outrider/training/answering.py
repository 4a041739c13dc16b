"""The target answers conversations through a backend, several at a time; each answer is its own greedy text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.backends.base import Backend
from outrider.core import SamplingParams
from outrider.errors import ConfigError, RequestError
from outrider.tokenizer import Tokenizer
from outrider.training.conversations import Conversation

MIN_ROOM_TOKENS = 8  # an answer with less room than a block has little to teach
_PROBE = tuple(
    {"role": role, "content": text} for role, text in (("user", "One."), ("assistant", "Two."), ("user", "Three."))
)
_MARKER = re.compile(r"<\|[^<>\s|]+\|?>|<[^<>\s|]+\|>|<(?:start|end)_of_turn>|<bos>|\[/?INST\]")

Record = dict[str, Any]


class ChatFormat(Protocol):
    """How a target is talked to: what `server.chat` knows, as far as training needs it."""

    name: str
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    shown_token_ids: tuple[int, ...]

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, thinking: bool
    ) -> str:
        """The rendered chat up to where the answer begins; RequestError where the template cannot say it."""
        ...

    def message(self, text: str, *, prompt: str, tools: Sequence[Mapping[str, Any]], thinking: bool) -> dict[str, Any]:
        """An answer's text, control tokens spelled out, as OpenAI's assistant message (`reasoning` for thoughts)."""
        ...


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How conversations are answered."""

    sequence_tokens: int
    """Most tokens of prompt and answer together: a longer prompt is dropped, a longer answer cut."""
    max_tokens: int
    """Most tokens of an answer."""
    thinking_share: float = 0.0
    """Share of conversations that are answered with thoughts, chosen by their keys."""
    num_streams: int = 4
    """Conversations under way at a time."""

    def __post_init__(self) -> None:
        """ConfigError for values that cannot mean anything."""
        if self.sequence_tokens <= MIN_ROOM_TOKENS or self.max_tokens < 1 or self.num_streams < 1:
            raise ConfigError(
                f"sequence_tokens={self.sequence_tokens} must exceed {MIN_ROOM_TOKENS}; max_tokens={self.max_tokens} "
                f"and num_streams={self.num_streams} must be at least 1."
            )
        if not 0.0 <= self.thinking_share <= 1.0:
            raise ConfigError(f"thinking_share={self.thinking_share} is no share. Give a number from 0 to 1.")

    def thinks(self, conversation: Conversation) -> bool:
        """Whether a conversation is answered with thoughts; the same whatever else is asked."""
        return int(conversation.key[:8], 16) < self.thinking_share * 2**32


def chat_sha256(chat: ChatFormat) -> str:
    """SHA-256 of what a template writes for a short chat, without thoughts and with."""
    return hashlib.sha256(json.dumps(_rendered(chat)).encode()).hexdigest()


def _rendered(chat: ChatFormat) -> list[str]:
    return [chat.prompt(_PROBE, (), thinking=thinking) for thinking in (False, True)]


def check_chat(backend: Backend, tokenizer: Tokenizer, chat: ChatFormat, options: AnswerOptions) -> str:
    """The template's `chat_sha256`; ConfigError where template, tokenizer and backend do not belong together."""
    rendered = _rendered(chat)
    unknown = sorted({mark for text in rendered for mark in _MARKER.findall(text) if tokenizer.id_of(mark) is None})
    if unknown:
        raise ConfigError(
            f"the chat template ({chat.name}) writes {unknown[0]}, which is no token of the target: it is another "
            "model's. Put the target's own chat_template.jinja beside its weights."
        )
    if options.thinking_share > 0 and rendered[0] == rendered[1]:
        raise ConfigError(f"the chat template ({chat.name}) knows no thoughts. Leave --thinking-share out.")
    if list(backend.encode(rendered[0])) != tokenizer.encode(rendered[0]):
        raise ConfigError("the backend reads text with another tokenizer than the target's. Serve the target itself.")
    return chat_sha256(chat)


def unwritable(conversation: Conversation, chat: ChatFormat, options: AnswerOptions) -> str | None:
    """Why the template cannot write a conversation as its file has it; None if it can."""
    given = [message for turn in conversation.turns for message in (*turn.given, _recorded(turn.recorded_call))]
    try:
        chat.prompt(given[:-1], conversation.tools, thinking=options.thinks(conversation))
    except RequestError as error:
        return str(error)
    return None


def _recorded(call: dict[str, Any] | None) -> dict[str, Any]:
    return call or {"role": "assistant", "content": "An answer."}


def answer(
    backend: Backend, chat: ChatFormat, conversations: Iterable[Conversation], options: AnswerOptions
) -> Iterator[Record]:
    """Records of conversations as they end, `num_streams` of them under way at a time.

    A record has `key`, `answers` and `ended`: None, or why the conversation ended before its last turn. An answer has
    `prompt_token_ids`, `token_ids` (end token included), `text`, `finish_reason`, `has_thought` and `num_calls`.
    """
    waiting = iter(conversations)
    running: list[Generator[None, None, Record]] = []
    try:
        while True:
            while len(running) < options.num_streams and (following := next(waiting, None)) is not None:
                running.append(_converse(backend, chat, following, options))
            if not running:
                return
            for conversing in list(running):
                try:
                    next(conversing)
                except StopIteration as ended:
                    running.remove(conversing)
                    yield ended.value
    finally:
        for conversing in running:
            conversing.close()


def _converse(
    backend: Backend, chat: ChatFormat, conversation: Conversation, options: AnswerOptions
) -> Generator[None, None, Record]:
    """One conversation, a chunk of an answer a step; its own answers are what later turns go on from."""
    messages: list[dict[str, Any]] = []
    answers: list[Record] = []
    thinking, tools = options.thinks(conversation), conversation.tools
    ended = None
    for turn in conversation.turns:
        if ended is not None:
            break
        messages += turn.given
        prompt = chat.prompt(messages, tools, thinking=thinking)
        prompt_ids = list(backend.encode(prompt))
        if options.sequence_tokens - len(prompt_ids) < MIN_ROOM_TOKENS:
            ended = "over-long prompt"
            break
        found = yield from _ask(backend, chat, prompt_ids, options)
        said = chat.message(found["text"], prompt=prompt, tools=tools, thinking=thinking)
        calls = said.get("tool_calls") or []
        if not calls and not (said.get("content") or "").strip() and not (said.get("reasoning") or "").strip():
            ended = "empty answer"
            break
        answers.append({**found, "has_thought": bool(said.get("reasoning")), "num_calls": len(calls)})
        if turn.recorded_call is not None:
            messages.append(turn.recorded_call)
        elif calls:
            ended = "call without a result"
        elif found["finish_reason"] == "length" or not (said.get("content") or "").strip():
            ended = "cut answer"
        else:
            messages.append({"role": "assistant", "content": said["content"]})
    is_last = len(answers) == len(conversation.turns)  # an answer that nothing follows may end as it likes
    return {"key": conversation.key, "answers": answers, "ended": None if is_last else ended, "thinking": thinking}


def _ask(
    backend: Backend, chat: ChatFormat, prompt_ids: list[int], options: AnswerOptions
) -> Generator[None, None, Record]:
    params = SamplingParams(
        max_tokens=min(options.max_tokens, options.sequence_tokens - len(prompt_ids)),
        stop_strings=chat.stop_strings,
        stop_token_ids=chat.stop_token_ids,
        shown_token_ids=chat.shown_token_ids,
    )
    text, token_ids, finish_reason = "", list[int](), None
    for chunk in backend.stream(prompt_ids, params):
        text, finish_reason = text + chunk.text, chunk.finish_reason
        token_ids += chunk.token_ids
        yield
    return {
        "prompt_token_ids": prompt_ids,
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason,
    }
