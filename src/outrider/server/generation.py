"""How one request is answered, streamed or whole, whatever becomes of its client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.server.answers import Answers, Job
from outrider.server.faults import Fault, fault_of, fault_of_bug
from outrider.server.replies import DONE, Choice, Envelope, check_chunk, draft_marks, event
from outrider.server.schemas import StreamOptions
from outrider.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


@dataclass(frozen=True)
class Exchange:
    """One request as it is being answered."""

    request: Request
    tokenizer: Tokenizer
    answers: Answers
    choices: Sequence[Choice]
    envelope: Envelope
    options: StreamOptions

    async def respond(self, jobs: Sequence[Job], *, stream: bool) -> Response:
        """Submit the jobs and answer. A fault before the first token is a plain HTTP error, streamed or not."""
        try:
            await unless_gone(self.request, self.answers.submit(jobs))
            if not stream:
                await unless_gone(self.request, self._collect())
                self.answers.cancel()
                return JSONResponse(self.envelope.response())
            events = self._events()
            first = await unless_gone(self.request, anext(events))
        except BaseException:
            self.answers.cancel()
            raise
        return _AnswerStream(self._sent(first, events), self.answers)

    async def _collect(self) -> None:
        async for position, chunk in self.answers.chunks():
            check_chunk(chunk)
            self.choices[position].push(chunk)

    async def _events(self) -> AsyncGenerator[str, None]:
        """The events of a stream that goes well; the first comes with the first chunk."""
        is_open = False
        async for position, chunk in self.answers.chunks():
            check_chunk(chunk)
            if not is_open:
                is_open = True
                for choice in self.choices:
                    for piece in choice.opening():
                        yield event(self.envelope.chunk(piece, **self._usage()))
            marks = {"outrider": draft_marks(chunk, self.tokenizer)} if self.options.include_draft_marks else {}
            for piece in self.choices[position].push(chunk):
                yield event(self.envelope.chunk(piece, **self._usage(), **marks))
                marks = {}
        if self.options.include_usage:
            yield event(self.envelope.usage_chunk())
        yield DONE

    def _usage(self) -> dict[str, Any]:
        """OpenAI's rule: the field is null in all chunks but the last, and absent where nobody asked."""
        if self.options.continuous_usage_stats:
            return {"usage": self.envelope.usage()}
        return {"usage": None} if self.options.include_usage else {}

    async def _sent(self, first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """All events; a failure half-way is an event that clients raise on, and no [DONE] after it."""
        try:
            yield first
            async for each in events:
                yield each
        except Fault as fault:
            yield event(fault.body())
        except OutriderError as error:
            yield event(fault_of(error).body())
        except Exception as error:
            logger.exception("A stream met a bug.")
            yield event(fault_of_bug(error).body())


class _AnswerStream(StreamingResponse):
    """Server-sent events; however the stream ends, its answers are cancelled if they still run."""

    def __init__(self, events: AsyncIterator[str], answers: Answers) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of some work; ClientGoneError, and an end to the work, where the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
