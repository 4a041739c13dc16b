from __future__ import annotations

import pytest

from outrider.backends.scripted import Script, ScriptedBackend
from outrider.server.chat import PLAIN
from outrider.server.faults import Fault
from outrider.server.readiness import Readiness


@pytest.fixture
def backend() -> ScriptedBackend:
    backend = ScriptedBackend({"": Script.of_text("x")})
    backend.start()
    yield backend
    backend.stop()


def code_of(readiness: Readiness) -> str | None:
    with pytest.raises(Fault) as refused:
        readiness.serving()
    assert refused.value.status == 503
    return refused.value.code


def test_nothing_is_served_before_there_is_a_backend(backend: ScriptedBackend) -> None:
    readiness = Readiness()
    assert code_of(readiness) == "loading"
    readiness.serve(backend, PLAIN)
    assert readiness.serving() is backend
    assert readiness.status == "ready"


def test_low_acceptance_is_served_and_said(backend: ScriptedBackend) -> None:
    readiness = Readiness()
    readiness.serve(backend, PLAIN, low_acceptance=("another target",))
    assert (readiness.status, readiness.reasons) == ("acceptance-low", ("another target",))
    assert readiness.serving() is backend


def test_a_backend_that_broke_is_not_served(backend: ScriptedBackend) -> None:
    readiness = Readiness()
    readiness.serve(backend, PLAIN)
    backend.fault = "the engine died"
    assert code_of(readiness) == "failed"
    assert readiness.reasons == ("the engine died",)


def test_draining_stops_once_and_stays(backend: ScriptedBackend) -> None:
    readiness = Readiness()
    readiness.serve(backend, PLAIN)
    readiness.drain(0.0)
    readiness.drain(0.0)
    assert code_of(readiness) == "draining"
    late = Readiness()
    late.drain(0.0)
    late.serve(backend, PLAIN)  # the boot may end after the server was told to
    assert code_of(late) == "draining"
