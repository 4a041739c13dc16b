from __future__ import annotations

import asyncio

import pytest

from outrider.backends.scripted import Script, ScriptedBackend, Step
from outrider.core import SamplingParams
from outrider.errors import RequestError
from outrider.server.answers import Answers, Job
from outrider.server.metrics import ServerMetrics
from tests.serving import eventually

SCRIPTS = {
    "no": Script((), refusal=RequestError("no")),
    "ever": Script((Step((97,), delay_s=0.002),), repeats=True),
    "": Script.of_text("abcdef", block_tokens=2),
}


@pytest.fixture
def backend() -> ScriptedBackend:
    backend = ScriptedBackend(SCRIPTS, context_length=10**6)
    backend.start()
    yield backend
    backend.stop()


def job(prompt: str) -> Job:
    return Job([256, *prompt.encode()], SamplingParams(), boundaries=(1,))


def metrics() -> ServerMetrics:
    return ServerMetrics(lambda: None, model="m")


def test_chunks_come_with_their_answers_position(backend: ScriptedBackend) -> None:
    async def collect() -> dict[int, str]:
        answers, texts = Answers(backend, metrics()), {0: "", 1: ""}
        await answers.submit([job("x"), job("y")])
        async for position, chunk in answers.chunks():
            texts[position] += chunk.text
        answers.cancel()
        return texts

    assert asyncio.run(collect()) == {0: "abcdef", 1: "abcdef"}
    assert set(backend.finish_reasons.values()) == {"stop"}
    assert backend.boundaries == [(1,), (1,)]


def test_a_refusal_cancels_what_was_submitted_before_it(backend: ScriptedBackend) -> None:
    async def refused() -> None:
        await Answers(backend, metrics()).submit([job("ever"), job("no")])

    with pytest.raises(RequestError):
        asyncio.run(refused())
    eventually(lambda: backend.finish_reasons == {0: "abort"})


def test_cancelling_while_submitting_leaves_nothing_behind(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = backend.submit
    answers: list[Answers] = []

    def submit_and_lose_the_client(*arguments: object, **options: object) -> int:
        index = submit(*arguments, **options)  # type: ignore[arg-type]
        answers[0].cancel()
        return index

    async def lost() -> None:
        answers.append(Answers(backend, metrics()))
        await answers[0].submit([job("ever"), job("ever")])

    monkeypatch.setattr(backend, "submit", submit_and_lose_the_client)
    asyncio.run(lost())
    eventually(lambda: backend.finish_reasons == {0: "abort"})
    assert len(backend.submitted) == 1


def test_cancelled_answers_are_counted_once(backend: ScriptedBackend) -> None:
    counted = metrics()

    async def left() -> None:
        answers = Answers(backend, counted)
        await answers.submit([job("ever")])
        await anext(answers.chunks())
        answers.cancel()
        answers.cancel()

    asyncio.run(left())
    assert 'request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in counted.text().decode()
