"""The routes that need a backend: OpenAI's, and those around text and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.backends.base import ServingBackend
from outrider.core import SamplingParams
from outrider.server.answers import Answers
from outrider.server.chat import ChatTemplate
from outrider.server.chat_replies import ChatChoice
from outrider.server.chat_request import prepare_chat, render
from outrider.server.faults import Fault
from outrider.server.generation import Exchange
from outrider.server.readiness import Readiness
from outrider.server.replies import Choice, CompletionChoice, Envelope, Tally, acceptance_object
from outrider.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from outrider.server.translate import checked_ids, completion_params, jobs_of, prompts_of

openai_routes = APIRouter(prefix="/v1")
text_routes = APIRouter()


@openai_routes.get("/models")
def models(request: Request) -> dict[str, Any]:
    """The one model, under each of its names."""
    backend = _backend(request, None)
    entries = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "outrider",
            "root": backend.model,
            "parent": None,
            "max_model_len": backend.context_length,
        }
        for name in request.app.state.names
    ]
    return {"object": "list", "data": entries}


@openai_routes.post("/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue one or several prompts."""
    backend = _backend(request, body.model)
    params = completion_params(body)
    prompts = await asyncio.to_thread(prompts_of, body, backend.tokenizer)
    num_choices = body.n or 1
    jobs = jobs_of(prompts, params, num_choices)
    choices = [
        CompletionChoice(
            index,
            backend.tokenizer,
            Tally(len(job.prompt_token_ids)),
            wants_logprobs=params.logprobs is not None,
            shows_all=_shows_all(body),
            shows_ids=bool(body.return_tokens_as_token_ids),
        )
        for index, job in enumerate(jobs)
    ]
    exchange = _exchange(request, body, backend, choices, params, "text_completion")
    return await exchange.respond(jobs, stream=bool(body.stream))


@openai_routes.post("/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a chat."""
    backend = _backend(request, body.model)
    chat = await asyncio.to_thread(prepare_chat, body, request.app.state.readiness.template, backend.tokenizer)
    jobs = jobs_of([chat.prompt_token_ids], chat.params, body.n or 1, boundaries=chat.boundaries)
    choices = [
        ChatChoice(
            index,
            backend.tokenizer,
            Tally(len(chat.prompt_token_ids)),
            chat.parser(),
            chat.thought_counter(backend.tokenizer),
            wants_logprobs=chat.params.logprobs is not None,
            shows_all=_shows_all(body),
            shows_ids=bool(body.return_tokens_as_token_ids),
        )
        for index in range(len(jobs))
    ]
    exchange = _exchange(request, body, backend, choices, chat.params, "chat.completion")
    return await exchange.respond(jobs, stream=bool(body.stream))


@openai_routes.get("/speculation")
def speculation(request: Request) -> dict[str, Any]:
    """Whether it drafts, with what, why not if not, and what drafting has brought so far."""
    readiness: Readiness = request.app.state.readiness
    backend = readiness.backend
    if backend is None:
        return {"status": readiness.status, "reasons": list(readiness.reasons), "active": False}
    now = backend.speculation()
    return {
        "status": readiness.status,
        "reasons": list(readiness.reasons),
        "active": now.is_active,
        "drafter": now.drafter,
        "num_speculative_tokens": now.num_speculative_tokens,
        "reason": now.reason,
        "details": now.details,
        "acceptance": acceptance_object(backend.gauges().acceptance, now.num_speculative_tokens),
    }


@text_routes.post("/tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a prompt, or of messages as the chat template writes them."""
    backend = _backend(request, body.model)
    tokenizer = backend.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise Fault(400, "Give either prompt or messages.", param="prompt")
    if body.messages is None:
        text, add_bos = body.prompt or "", body.add_special_tokens is not False
    else:
        template: ChatTemplate = request.app.state.readiness.template
        text, add_bos = render(template, body.messages, body.tools, enable_thinking=False).text, True
    token_ids = await asyncio.to_thread(tokenizer.encode, text, add_bos=add_bos)
    strings = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": backend.context_length,
        "tokens": token_ids,
        "token_strs": strings,
    }


@text_routes.post("/detokenize")
def detokenize(request: Request, body: DetokenizeBody) -> dict[str, str]:
    """The text of token ids, control tokens left out."""
    tokenizer = _backend(request, body.model).tokenizer
    return {"prompt": tokenizer.decode(checked_ids(body.tokens, tokenizer, "tokens"))}


def _backend(request: Request, model: str | None) -> ServingBackend:
    """The backend, if it answers and goes by this name (or by any, where none was given)."""
    readiness: Readiness = request.app.state.readiness
    backend = readiness.serving()
    names: Sequence[str] = request.app.state.names
    if model is not None and model not in names:
        message = f"The model {model[:200]!r} does not exist. Here is {', '.join(names)}."
        raise Fault(404, message, param="model", code="model_not_found")
    return backend


def _shows_all(body: GenerationBody) -> bool:
    options = body.stream_options or StreamOptions()
    return bool(options.include_draft_marks or options.continuous_usage_stats)


def _exchange(
    request: Request,
    body: GenerationBody,
    backend: ServingBackend,
    choices: Sequence[Choice],
    params: SamplingParams,
    kind: str,
) -> Exchange:
    wanted = params.num_speculative_tokens
    num_drafts = backend.speculation().num_speculative_tokens if wanted is None else wanted
    return Exchange(
        request,
        backend.tokenizer,
        Answers(backend, request.app.state.metrics),
        choices,
        Envelope(kind, request.app.state.names[0], choices, body.n or 1, num_drafts),
        body.stream_options or StreamOptions(),
    )
