"""One client for any OpenAI-compatible server, and what it saw of one answer.

Tokens come from the server's usage and never from counting stream chunks: where drafts are accepted, one chunk carries
several tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, Literal

import httpx

from outrider.errors import ConfigError, EngineFault

ServerKind = Literal["outrider", "vllm", "sglang", "llama.cpp", "unknown"]
_OWNERS: dict[str, ServerKind] = {
    "outrider": "outrider",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
}
_PREFIXES: tuple[tuple[str, ServerKind], ...] = (
    ("outrider:", "outrider"),
    ("vllm:", "vllm"),
    ("sglang:", "sglang"),
    ("llamacpp:", "llama.cpp"),
)
_MAX_ERROR_CHARACTERS = 300
_BROKEN_ENDS = ("abort", "error")
"""Finish reasons of answers that a server gave up."""
LEAST_WHOLE_S, LEAST_DECODE_SHARE, LEAST_PACE_S = 0.1, 0.05, 1e-4
"""A longer answer, decoded in less than this share of its time and faster than a token in so many seconds, came out of
a buffer: what was timed is the buffer, not the server."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What to ask: messages for /v1/chat/completions, or a prompt for /v1/completions."""

    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """More fields of the body, such as `speculative`, `ignore_eos`, `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        """ConfigError unless there is exactly one of messages and prompt."""
        if bool(self.messages) == (self.prompt is not None):
            raise ConfigError("a request has either messages or a prompt. Give one of them.")

    @property
    def path(self) -> str:
        """Where it is posted."""
        return "/v1/completions" if self.prompt is not None else "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body of a streamed answer; usage is asked for in every chunk."""
        asked: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        asked |= {"prompt": self.prompt} if self.prompt is not None else {"messages": list(self.messages)}
        if self.seed is not None:
            asked["seed"] = self.seed
        if self.tools:
            asked["tools"] = list(self.tools)
        streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return {**asked, **streamed, **self.extra}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer as the client saw it. Times in seconds; an error leaves what had come until then."""

    started_s: float
    """When it was sent, on the monotonic clock."""
    ttft_s: float | None
    """Sent to the first chunk that carries a token; None if none came."""
    chunk_gaps_s: tuple[float, ...]
    """Between consecutive chunks that carry tokens, each of which may carry several."""
    e2e_s: float
    """Sent to the last chunk."""
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    """From the server's usage; None if it gave none."""
    num_chunks: int
    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str | None
    error: str | None
    acceptance: dict[str, Any] | None
    """The response's `metrics.speculative_decoding`."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server had in its prefix cache, from usage; None if it does not say."""
    num_first_tokens: int | None = None
    """Tokens of the first chunk, from the running usage; None where the server gives usage only at the end."""

    @property
    def is_buffered(self) -> bool:
        """Whether its chunks came all at once, so that nothing is known of decoding."""
        if self.ttft_s is None or self.num_chunks < 2 or not self.num_output_tokens or self.e2e_s < LEAST_WHOLE_S:
            return False
        decode_s = self.e2e_s - self.ttft_s
        return decode_s < LEAST_DECODE_SHARE * self.e2e_s and decode_s < LEAST_PACE_S * (self.num_output_tokens - 1)

    @property
    def tpot_s(self) -> float | None:
        """(e2e − TTFT) ÷ (tokens − 1), as vLLM defines it; None for fewer than two tokens, a single chunk or a buffer.

        The last is `is_buffered`.
        """
        if self.ttft_s is None or self.num_output_tokens is None or self.num_output_tokens < 2 or self.num_chunks < 2:
            return None
        return None if self.is_buffered else (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first chunk ÷ seconds from the first chunk to the last (T-062).

        None for a single chunk, a buffer, and where the server does not say how many tokens its first chunk had.
        """
        is_timed = self.chunk_gaps_s and not self.is_buffered
        if self.num_output_tokens is None or self.num_first_tokens is None or not is_timed:
            return None
        decode_s = sum(self.chunk_gaps_s)
        return (self.num_output_tokens - self.num_first_tokens) / decode_s if decode_s > 0 else None


class ServerClient:
    """Asks one server; may be used from many threads at a time."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`base_url` with or without /v1; without a `model` the first of /v1/models is asked for.

        ConfigError for what cannot be: a URL, a key or a time limit.
        """
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{base_url!r} is no URL of a server. Give one such as http://127.0.0.1:8000.")
        if not 0 < timeout_s < inf:
            raise ConfigError(f"--timeout-s {timeout_s} is no time. Give seconds above 0.")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("--api-key has characters that no key has. Give it as the server's owner wrote it.")
        self._clock, self._model = clock, model
        self._kind: ServerKind | None = None
        headers = {"Accept-Encoding": "identity"}  # what compresses a stream holds chunks back
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.Client(
                base_url=self.base_url, headers=headers, timeout=timeout_s, limits=limits, transport=transport
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"{base_url!r} is no URL ({error}). Give one such as http://127.0.0.1:8000.") from None

    def __enter__(self) -> ServerClient:
        """Itself; leaving closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    @property
    def model(self) -> str:
        """The name that is asked for; EngineFault if the server cannot be reached or names none."""
        if self._model is None:
            models = self._models()
            if not models:
                raise EngineFault(
                    f"{self.base_url}/v1/models names no model. Name one with --model, and --api-key if it wants one."
                )
            self._model = str(models[0]["id"])
        return self._model

    def complete(self, request: ChatRequest) -> Sample:
        """Ask and read the whole answer; never raises for what the server does, the sample has the error."""
        body = request.body(self.model)
        answer = _Answer(self._clock())
        try:
            with self._http.stream("POST", request.path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    answer.error = f"HTTP {response.status_code}: {_error_text(response)}"
                else:
                    self._read(_lines(response.iter_text()), answer)
                    if not answer.has_events:
                        kind = response.headers.get("content-type", "nothing that it names")
                        answer.error = f"the server does not stream: it answered with {kind}, and without an event"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            answer.error = f"an event of the stream is not one of OpenAI's: {type(error).__name__}: {error}"
        return answer.sample(self._clock())

    def metrics_text(self) -> str:
        """The text of /metrics, empty where the server has none; EngineFault if it cannot be reached."""
        response = self._get("/metrics")
        return response.text if response.status_code == 200 else ""

    def server_kind(self) -> ServerKind:
        """Which server this is, by who owns its models, else by the names of its metrics."""
        if self._kind is None:
            owners = [str(each.get("owned_by", "")).lower() for each in self._models()]
            named = [kind for owner in owners if (kind := _OWNERS.get(owner))]
            self._kind = named[0] if named else _kind_by_metrics(self.metrics_text())
        return self._kind

    def get_json(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None where the server has none there."""
        response = self._get(path)
        try:
            value = response.json() if response.status_code == 200 else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def post_json(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of an answer that is not streamed, empty where there is none; EngineFault as above."""
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineFault(f"{self.base_url}{path} does not answer ({error}). Is the server running?") from None
        try:
            value = response.json()
        except ValueError:
            value = None
        return response.status_code, value if isinstance(value, dict) else {}

    def _models(self) -> list[dict[str, Any]]:
        listed = (self.get_json("/v1/models") or {}).get("data")
        return [each for each in listed if isinstance(each, dict) and "id" in each] if isinstance(listed, list) else []

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path)
        except httpx.HTTPError as error:
            raise EngineFault(
                f"{self.base_url}{path} does not answer ({error}). Is the server running at this address?"
            ) from None

    def _read(self, lines: Iterator[str], answer: _Answer) -> None:
        for line in lines:
            if not line.startswith("data:"):  # comments, event names and blank lines carry nothing
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            answer.push(json.loads(data), self._clock())
            if answer.error is not None:
                return


class _Answer:
    """An answer as it grows."""

    def __init__(self, started_s: float) -> None:
        self.error: str | None = None
        self.has_events = False
        """Whether any event came, well-formed or not."""
        self._started_s, self._last_s = started_s, started_s
        self._times_s: list[float] = []
        self._usage: dict[str, Any] = {}
        self._num_counted = 0
        self._num_first: int | None = None
        self._is_counted: bool | None = None  # whether usage runs along, which the first chunk with a token shows
        self._text, self._reasoning = "", ""
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None
        self._acceptance: dict[str, Any] | None = None

    def push(self, event: dict[str, Any], now_s: float) -> None:
        """Take one event that came at a time."""
        self.has_events = True
        if event.get("error"):
            self.error = _message(event["error"])
            return
        self._acceptance = (event.get("metrics") or {}).get("speculative_decoding") or self._acceptance
        usage = event.get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            if type(usage.get(name) or 0) is not int:
                raise TypeError(f"{name} of its usage is {usage[name]!r}")
        self._usage = usage or self._usage
        if not event.get("choices"):
            return
        self._last_s = now_s
        has_text = self._push_choice(event["choices"][0])
        num_counted = usage.get("completion_tokens") or 0
        if self._is_counted is None and (has_text or num_counted):
            self._is_counted = bool(num_counted)
            self._num_first = num_counted or None
        if num_counted > self._num_counted if self._is_counted and num_counted else has_text:
            self._times_s.append(now_s)
        self._num_counted = max(num_counted, self._num_counted)

    def _push_choice(self, choice: dict[str, Any]) -> bool:
        """Whether it carries text of any kind."""
        delta = choice.get("delta") or {}
        text = (delta.get("content") if "delta" in choice else choice.get("text")) or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or []
        for call in calls:
            self._push_call(call)
        self._text, self._reasoning = self._text + text, self._reasoning + reasoning
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return bool(text or reasoning or calls)

    def _push_call(self, call: dict[str, Any]) -> None:
        known = self._calls.setdefault(call.get("index", 0), {"id": None, "name": "", "arguments": ""})
        function = call.get("function") or {}
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += function.get("arguments") or ""

    def sample(self, now_s: float) -> Sample:
        """What there is, now that no more comes."""
        if self.error is None and self._finish_reason is None:
            self.error = "the stream ended without a finish reason: the answer was lost on its way"
        if self.error is None and self._finish_reason in _BROKEN_ENDS:
            self.error = f"the server gave the answer up: its finish reason is {self._finish_reason!r}"
        ended_s = now_s if self.error else self._last_s
        details = self._usage.get("prompt_tokens_details") or {}
        return Sample(
            started_s=self._started_s,
            ttft_s=self._times_s[0] - self._started_s if self._times_s else None,
            chunk_gaps_s=tuple(later - earlier for earlier, later in pairwise(self._times_s)),
            e2e_s=ended_s - self._started_s,
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_output_tokens=self._usage.get("completion_tokens"),
            num_chunks=len(self._times_s),
            text=self._text,
            reasoning=self._reasoning,
            tool_calls=tuple(call for _, call in sorted(self._calls.items())),
            finish_reason=self._finish_reason,
            error=self.error,
            acceptance=self._acceptance,
            num_cached_tokens=details.get("cached_tokens"),
            num_first_tokens=self._num_first,
        )


def _lines(parts: Iterator[str]) -> Iterator[str]:
    """Lines of an event stream, which CR, LF or both end; a text inside an event may hold other line separators."""
    left = ""
    for part in parts:
        text = (left + part).replace("\r\n", "\n")
        is_cut = text.endswith("\r")  # its LF may be about to come
        *whole, left = text.removesuffix("\r").replace("\r", "\n").split("\n")
        left += "\r" if is_cut else ""
        yield from whole
    yield from left.rstrip("\r").split("\n") if left else ()


def _kind_by_metrics(text: str) -> ServerKind:
    names = {line.split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}
    return next((kind for prefix, kind in _PREFIXES if any(name.startswith(prefix) for name in names)), "unknown")


def _error_text(response: httpx.Response) -> str:
    try:
        value = response.json()
    except ValueError:
        return response.text[:_MAX_ERROR_CHARACTERS]
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_MAX_ERROR_CHARACTERS]
