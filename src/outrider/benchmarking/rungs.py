"""The rungs of `bench verify`: one check of a server each, which says what it found or raises why it failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from outrider.benchmarking import greedy
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.answer_quality import MARKUP, text_faults
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.benchmarking.counters import Counters, settled_metrics
from outrider.benchmarking.sessions import made_up_log
from outrider.errors import ConfigError

RUNGS = (
    "reachable",
    "basic",
    "streaming",
    "tools",
    "streaming tools",
    "quality",
    "acceptance",
    "greedy",
    "needle",
)
MIN_CHUNKS, MIN_CHARACTERS = 5, 20
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_ASK_WEATHER = ({"role": "user", "content": "What is the weather in Oslo now? Use the tool."},)
_ESSAY = "Write an essay of about 800 words on how bridges were built from antiquity to our time."


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """How high to climb."""

    essay_tokens: int = 2000
    min_acceptance_length: float = 2.0
    """Tokens a cycle is worth on the essay, at least; 0 for a server without a drafter."""
    greedy_tokens: int = 128
    """Of each text that is written with and without drafting."""
    tie_tolerance: float | None = None
    """The largest gap of two log-probabilities that rounding explains; measured if left out."""
    needle_tokens: tuple[int, ...] = (10_000, 30_000)
    skipped: tuple[str, ...] = ()
    salt: str = "0"
    """Makes long prompts unlike any that the server has cached."""

    def __post_init__(self) -> None:
        """ConfigError for a rung that does not exist or a size that cannot be."""
        unknown = set(self.skipped) - set(RUNGS)
        if unknown:
            raise ConfigError(f"--skip {sorted(unknown)[0]!r} is no rung. Choose from {', '.join(RUNGS)}.")
        if min(self.essay_tokens, self.greedy_tokens) < 1 or any(size < 500 for size in self.needle_tokens):
            raise ConfigError("a text has at least 1 token and a haystack 500. Give larger numbers.")
        if not 0 <= self.min_acceptance_length < inf:
            raise ConfigError(f"--min-acceptance-length {self.min_acceptance_length} is none. Give 0 for no drafter.")
        if self.tie_tolerance is not None and not self.tie_tolerance >= 0:
            raise ConfigError(f"--tie-tolerance {self.tie_tolerance} is below 0. Give 0 for a server that is exact.")


@dataclass
class Climb:
    """What rungs share."""

    client: ServerClient
    config: LadderConfig
    plain_client: ServerClient | None
    flips: dict[str, Any] | None = None
    essay: Sample | None = None
    essay_counters: Counters = field(default_factory=Counters)

    def ask(self, request: ChatRequest) -> Sample:
        """One streamed answer; a failed rung where it has an error."""
        sample = self.client.complete(request)
        if sample.error is not None:
            raise FailedError(sample.error, "See the server's log for this request.")
        return sample


class FailedError(Exception):
    """A rung that failed: why, and what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class SkippedError(Exception):
    """A rung that cannot be judged: why."""


def _reachable(shared: Climb) -> str:
    return f"{shared.client.server_kind()} serves {shared.client.model}"


def _plain(text: str, *, max_tokens: int, **extra: Any) -> ChatRequest:
    off = {"chat_template_kwargs": {"enable_thinking": False}, **extra}
    return ChatRequest(messages=({"role": "user", "content": text},), max_tokens=max_tokens, extra=off)


def _basic(shared: Climb) -> str:
    request = _plain("What is the capital of France? Answer with its name.", max_tokens=64)
    message = _whole(shared.client, request)["message"]
    text = message.get("content") or ""
    if "paris" not in text.lower():
        advice = (
            "Check the chat template, the weights and their quantisation: a model that was taught to chat knows this. "
            "For one that was not, such as the embedded default, --skip basic."
        )
        raise FailedError(f"the capital of France came out as {text[:80]!r}", advice)
    return "the capital of France is Paris"


def _streaming(shared: Climb) -> str:
    sample = shared.ask(_plain("Count from one to thirty in words.", max_tokens=120))
    if sample.num_chunks < MIN_CHUNKS or len(sample.text) < MIN_CHARACTERS:
        raise FailedError(
            f"{sample.num_chunks} chunks and {len(sample.text)} characters came; at least {MIN_CHUNKS} and "
            f"{MIN_CHARACTERS} were expected",
            "Look for a proxy between here and the server that buffers event streams.",
        )
    if sample.num_output_tokens is None:
        raise FailedError(
            "the stream carries no usage", "Update the server: stream_options.include_usage is how tokens are counted."
        )
    return f"{sample.num_chunks} chunks, {sample.num_output_tokens} tokens, ended by {sample.finish_reason}"


def _tools(shared: Climb) -> str:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    request = ChatRequest(messages=_ASK_WEATHER, tools=(_WEATHER,), max_tokens=256, extra=off)
    choice = _whole(shared.client, request, is_refusal_a_skip=True)
    message = choice["message"]
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return _check_calls(calls, message.get("content") or "", choice.get("finish_reason"))


def _streaming_tools(shared: Climb) -> str:
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    sample = shared.ask(ChatRequest(messages=_ASK_WEATHER, tools=(_WEATHER,), max_tokens=1024, extra=on))
    said = _check_calls(list(sample.tool_calls), sample.text, sample.finish_reason)
    thought = f"after {len(sample.reasoning)} characters of thought" if sample.reasoning else "without a thought"
    return f"{said}, {thought}"


def _check_calls(calls: list[dict[str, Any]], text: str, finish_reason: str | None) -> str:
    """The one call that was asked for; otherwise a failure that says which way it went wrong."""
    leaked = [mark for mark in MARKUP if mark in text]
    if leaked:
        raise FailedError(
            f"markup of a call or thought is in the text: {leaked[0]!r}", "Choose the server's parser for this model."
        )
    if not calls:
        is_inline = "get_weather" in text
        raise FailedError(
            "the call is in the text and was not parsed" if is_inline else f"no call came, but {text[:80]!r}",
            "Turn on the server's tool parser for this model." if is_inline else "Check the chat template.",
        )
    if [call.get("name") for call in calls] != ["get_weather"]:
        raise FailedError(f"the calls were {[call.get('name') for call in calls]}", "Check the chat template.")
    try:
        arguments = json.loads(calls[0].get("arguments") or "")
        city = str(arguments["city"])
    except (ValueError, KeyError, TypeError):
        raise FailedError(
            f"the arguments are {calls[0].get('arguments')!r}, not JSON with a city", "Update the server's tool parser."
        ) from None
    if finish_reason != "tool_calls":
        raise FailedError(f"finish_reason is {finish_reason!r}, not 'tool_calls'", "Update the server's tool parser.")
    return f"get_weather was called for {city}"


def _quality(shared: Climb) -> str:
    essay = _read_essay(shared)
    faults = text_faults(essay.text)
    if faults:
        advice = "Compare with `outrider bench quality`; look for a wrong template, weights or cache precision."
        raise FailedError("; ".join(faults), advice)
    return f"{essay.num_output_tokens} tokens without loops or markup"


def _read_essay(shared: Climb) -> Sample:
    """One long text, written once for all who judge it, with what the server counted meanwhile."""
    if shared.essay is None:
        kind = shared.client.server_kind()
        _, before = settled_metrics(shared.client, kind)
        shared.essay = shared.ask(_plain(_ESSAY, max_tokens=shared.config.essay_tokens))
        _, after = settled_metrics(shared.client, kind)
        shared.essay_counters = after - before
    return shared.essay


def _acceptance(shared: Climb) -> str:
    """The answer's own figures where it has them, else the counters' change around it."""
    floor = shared.config.min_acceptance_length
    if floor <= 0:
        raise SkippedError("the floor is 0")
    own = _read_essay(shared).acceptance or {}
    num_drafted = own.get("num_draft_tokens", shared.essay_counters.num_draft_tokens)
    length = own.get("mean_acceptance_length", shared.essay_counters.acceptance_length)
    if num_drafted is None and length is None:
        raise SkippedError("the server has neither counters nor figures of its own (turn its metrics on)")
    if not length or num_drafted == 0:
        advice = "See why the drafter is idle: `outrider doctor`, /v1/speculation, or the server's log at start."
        raise FailedError("nothing was drafted: the server decodes plainly", advice)
    if length < floor:
        advice = "Check that the drafter was made for this target and that both see the same embeddings and context."
        raise FailedError(f"a cycle is worth {length:.2f} tokens, less than {floor:g}", advice)
    return f"a cycle is worth {length:.2f} tokens"


def _greedy(shared: Climb) -> str:
    """Whether drafting changes greedy text, and whether rounding explains it (T-002)."""
    config, plain = shared.config, shared.plain_client
    fields: dict[str, Any] = {}
    if plain is None:
        if shared.client.server_kind() != "outrider":
            raise SkippedError(
                "it cannot leave drafting out of one request; name a server without drafter with --plain-url"
            )
        plain, fields = shared.client, {"speculative": {"enabled": False}}
    texts = greedy.read_greedy(plain, greedy.PROMPTS, max_tokens=config.greedy_tokens, fields=fields)
    drafted = greedy.read_greedy(shared.client, greedy.PROMPTS, max_tokens=config.greedy_tokens)
    if not all(text and all(len(scored.top) >= 2 for scored in text) for text in [*texts, *drafted]):
        raise SkippedError("the server gives no log-probabilities, so texts that differ could not be judged")
    found = greedy.compare_greedy(texts, drafted, tolerance=config.tie_tolerance)
    shared.flips = {**found.count.as_dict(), "shift": found.shift, "tolerance": found.tolerance}
    if found.fault is not None:
        advice = "Drafting changes the text: compare one row with several, and look for rejected rows in the caches."
        raise FailedError(found.fault, advice)
    return str(found)


def _needle(shared: Climb) -> str:
    per_token = _characters_per_token(shared)
    limit = _context_length(shared.client)
    sizes = [size for size in shared.config.needle_tokens if limit is None or size <= limit - 200]
    if not sizes and limit is not None:
        sizes = [max(1, int(0.8 * limit) - 200)]
    found = []
    for number, size in enumerate(sizes, start=1):
        code = f"{7300 + 17 * number}-kestrel"
        log = made_up_log(int(size * per_token), f"{shared.config.salt}/{number}")
        lines = log.split("\n")
        lines.insert(len(lines) // 2, f"NOTE: the access code of the vault is {code}.")
        question = "What is the access code of the vault? Answer with the code."
        sample = shared.ask(_plain("\n".join([*lines, "", question]), max_tokens=64))
        if code not in sample.text.lower():
            advice = "Try it without the drafter and with a bf16 cache, to see which of them loses it."
            raise FailedError(f"lost at {sample.num_prompt_tokens} tokens: {sample.text[:80]!r}", advice)
        found.append(f"{sample.num_prompt_tokens:,}")
    return f"found in {' and '.join(found)} tokens"


def _characters_per_token(shared: Climb) -> float:
    """By the server's own count of a short log: never guessed (T-066)."""
    log = made_up_log(2_000, f"{shared.config.salt}/size")
    num_tokens = shared.ask(_plain(log, max_tokens=1)).num_prompt_tokens
    if not num_tokens:
        raise SkippedError("the server does not count prompt tokens, so a prompt of a known length cannot be made")
    return len(log) / num_tokens


def _context_length(client: ServerClient) -> int | None:
    """As /v1/models says; None where it does not."""
    listed = (client.get_json("/v1/models") or {}).get("data") or [{}]
    own = [each for each in listed if each.get("id") == client.model] or listed
    length = own[0].get("max_model_len")
    return int(length) if length else None


def _whole(client: ServerClient, request: ChatRequest, *, is_refusal_a_skip: bool = False) -> dict[str, Any]:
    """The first choice of an answer that is not streamed."""
    body = {**request.body(client.model), "stream": False}
    del body["stream_options"]
    status, value = client.post_json(request.path, body)
    if status == 400 and is_refusal_a_skip:
        raise SkippedError(f"the server refuses tools: {_message(value)}")
    try:
        choice = value["choices"][0]
        choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError):
        reason = f"HTTP {status}: {_message(value)}"
        raise FailedError(reason, "See the server's log for this request.") from None
    return dict(choice)


def _message(value: dict[str, Any]) -> str:
    error = value.get("error", value)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


CHECKS: dict[str, Callable[[Climb], str]] = {
    "reachable": _reachable,
    "basic": _basic,
    "streaming": _streaming,
    "tools": _tools,
    "streaming tools": _streaming_tools,
    "quality": _quality,
    "acceptance": _acceptance,
    "greedy": _greedy,
    "needle": _needle,
}
"""Each rung by its name: what was found, or one of the two errors above."""
