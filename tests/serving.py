"""A real server on a free port for tests: the scripted backend or an engine behind it, any HTTP client before it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from outrider.backends.base import ServingBackend
from outrider.backends.scripted import Script, ScriptedBackend, Step, byte_tokenizer
from outrider.server.app import ServerConfig, create_app

MODEL = "scripted"


@dataclass
class Served:
    """Where it listens, and what is behind it."""

    url: str
    backend: Any  # ScriptedBackend or LocalServing: a test asks its own one what it saw
    app: FastAPI
    http: httpx.Client
    sdk: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.sdk = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body)


@contextmanager
def serve(scripts: Mapping[str, Script], config: ServerConfig | None = None, **options: Any) -> Iterator[Served]:
    """Serve scripts; options go to ScriptedBackend."""
    with serve_backend(ScriptedBackend(scripts, **options), config) as served:
        yield served


@contextmanager
def serve_backend(backend: ServingBackend, config: ServerConfig | None = None) -> Iterator[Served]:
    """Start a backend and serve it; the server stops it in the end."""
    backend.start()
    app = create_app(backend, config)
    with listening(app) as url, httpx.Client(base_url=url, timeout=30.0) as http:
        served = Served(url, backend, app, http)
        yield served
        served.sdk.close()


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The base URL of an application that listens on a port of its own."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()


def eventually(holds: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Wait until something holds; fail where it does not in time."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """The parsed events of a stream; the last is "[DONE]" if it ended well."""
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def cut_scripts(text: str, *, num_random: int, seed: int = 0, ends_turn: bool = True) -> dict[str, Script]:
    """Scripts that give one text in all two-part cuts, in random cuts, token by token and whole, by key."""
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(text, add_bos=False) + ([tokenizer.eos_ids[-1]] if ends_turn else [])
    draw = random.Random(seed)
    cuts = [[], list(range(1, len(token_ids))), *([at] for at in range(1, len(token_ids)))]
    cuts += [
        sorted(draw.sample(range(1, len(token_ids)), draw.randint(2, len(token_ids) // 2))) for _ in range(num_random)
    ]
    return {f"cut {index}.": script_of_cut(token_ids, cut) for index, cut in enumerate(cuts)}


def script_of_cut(token_ids: Sequence[int], cut: Sequence[int], **options: Any) -> Script:
    """Token ids as blocks that part at the places of a cut."""
    edges = [0, *cut, len(token_ids)]
    blocks = [tuple(token_ids[start:end]) for start, end in pairwise(edges)]
    return Script(tuple(Step(block, len(block) - 1, len(block)) for block in blocks), **options)


def joined_message(chunks: Sequence[Any]) -> dict[str, Any]:
    """The message that the deltas of one chat stream amount to, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for choice in (chunk["choices"][0] for chunk in chunks if chunk != "[DONE]" and chunk["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # a call's first delta says what it is
                assert call["type"] == "function"
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def whole_message(body: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    choice = body["choices"][0]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }
