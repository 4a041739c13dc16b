from __future__ import annotations

import pytest

from outrider.errors import EngineFault, OutriderError, OverloadedError, RequestError
from outrider.server.faults import Fault, fault_of


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (OverloadedError("x", retry_after_s=0.1), 429, "rate_limit_error"),
        (EngineFault("x"), 500, "server_error"),
    ],
)
def test_errors_have_a_status_and_a_type(error: OutriderError, status: int, kind: str) -> None:
    fault = fault_of(error)
    assert fault.status == status
    assert fault.body()["error"]["type"] == kind
    assert fault.body()["error"]["message"] == "x"


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    for seconds, header in ((0.0, "1"), (1.2, "2"), (7.0, "7")):
        assert fault_of(OverloadedError("x", retry_after_s=seconds)).headers == {"Retry-After": header}


def test_half_a_surrogate_pair_does_not_break_the_answer() -> None:
    assert Fault(400, "\ud800").body()["error"]["message"] == "\\ud800"
