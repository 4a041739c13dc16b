"""What goes wrong, as OpenAI's clients read it: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError

from outrider.errors import OutriderError, OverloadedError, RequestError

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable"}


@dataclass
class Fault(Exception):
    """An answer that is an error; raised anywhere below an endpoint."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """`{"error": ...}`, for a response or for one event of a stream."""
        text = self.message.encode("utf-8", "backslashreplace").decode()  # a client's text may hold lone surrogates
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}


def fault_of(error: OutriderError) -> Fault:
    """The answer to an error from below: the client's fault 400, no room 429, all else 500."""
    if isinstance(error, OverloadedError):
        retry_after = str(max(1, math.ceil(error.retry_after_s)))
        return Fault(429, str(error), code="queue_full", headers={"Retry-After": retry_after})
    return Fault(400 if isinstance(error, RequestError) else 500, str(error))


def fault_of_bug(error: Exception) -> Fault:
    """The answer to what should not have happened; details go to the log, not to the client."""
    return Fault(500, f"A fault of the server: {type(error).__name__}. Its log says more.", code="bug")


def fault_of_validation(error: RequestValidationError) -> Fault:
    """The first field that is wrong, named as a path: `stop.0: Input should be a valid string`."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Fault(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}.")
    if not path:
        return Fault(400, "The body is not a JSON object; send one, with Content-Type: application/json.")
    return Fault(400, f"{'.'.join(path)}: {first['msg']}.", param=path[0])
