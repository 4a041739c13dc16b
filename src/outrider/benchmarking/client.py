"""One client for any OpenAI-compatible server: what is asked, which server it is, what its endpoints say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import httpx

from outrider.benchmarking.answer import MAX_ERROR_CHARACTERS, Answer, Sample, error_message, event_lines
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
        self._clock, self._model, self._timeout_s = clock, model, timeout_s
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
            self._model = self._first_model()
        return self._model

    def complete(self, request: ChatRequest) -> Sample:
        """Ask and read the whole answer; never raises for what the server does, the sample has the error."""
        body = request.body(self.model)
        answer = Answer(self._clock())
        try:
            with self._http.stream("POST", request.path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    answer.error = f"HTTP {response.status_code}: {_error_text(response)}"
                else:
                    self._read(event_lines(response.iter_text()), answer)
                    if not (answer.has_events or answer.error):
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

    def _first_model(self) -> str:
        response = self._get("/v1/models")
        if response.status_code != 200:
            hint = "Is it still loading, or does it want another --api-key?"
            raise EngineFault(
                f"{self.base_url}/v1/models: HTTP {response.status_code}: {_error_text(response)}. {hint}"
            )
        models = self._models()
        if not models:
            raise EngineFault(f"{self.base_url}/v1/models names no model. Name one with --model.")
        return str(models[0]["id"])

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

    def _read(self, lines: Iterator[str], answer: Answer) -> None:
        last_s = self._clock()
        for line in lines:
            if not line.startswith("data:"):  # comments, event names and blank lines carry nothing
                if self._clock() - last_s > self._timeout_s:
                    answer.error = f"the answer kept silent for {self._timeout_s:g} s, though the connection lived"
                    return
                continue
            last_s = self._clock()
            data = line[5:].strip()
            if data == "[DONE]":
                return
            answer.push(json.loads(data), self._clock())
            if answer.error is not None:
                return


def _kind_by_metrics(text: str) -> ServerKind:
    names = {line.split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}
    return next((kind for prefix, kind in _PREFIXES if any(name.startswith(prefix) for name in names)), "unknown")


def _error_text(response: httpx.Response) -> str:
    try:
        value = response.json()
    except ValueError:
        return response.text[:MAX_ERROR_CHARACTERS]
    return error_message(value.get("error", value) if isinstance(value, dict) else value)
