"""Around the endpoints: bodies that are too long, callers without the key, and what no endpoint caught."""

from __future__ import annotations

import hmac
import logging

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.faults import Fault, fault_of_bug

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/")  # and what the playground is made of
STATIC_PATH = "/static/"


class BodyLimit:
    """ASGI middleware that refuses bodies over `max_bytes` with 413, by their header or while they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that counts."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes or _declared_bytes(scope) > self._max_bytes:
                # an HTTPException is what the framework's body reader lets through
                raise HTTPException(
                    413, f"The body has more than {self._max_bytes} bytes, the most that is read. Send a shorter one."
                )
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)


class KeyGuard:
    """ASGI middleware that asks for `Authorization: Bearer KEY`, except for /health and the playground's own files."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                fault = Fault(
                    401, "The API key is missing or wrong. Send Authorization: Bearer KEY.", code="invalid_api_key"
                )
                await JSONResponse(fault.body(), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_open(path: str) -> bool:
        return path in OPEN_PATHS or path.startswith(STATIC_PATH)


class BugGuard:
    """ASGI middleware that answers whatever nobody caught, a bug, with 500, and logs it; a begun answer is cut off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            logger.exception("A request met a bug.")
            fault = fault_of_bug(error)
            await JSONResponse(fault.body(), fault.status)(scope, receive, send)


def _declared_bytes(scope: Scope) -> int:
    values = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
    return int(values[0]) if values and values[0].isdigit() else 0
