"""Quality over HTTP: a scripted server whose answers do, or do not, change with the switch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import comb

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.problems import own_problems
from outrider.benchmarking.quality import Answer, run_quality, summarize_quality
from outrider.errors import ConfigError
from tests.serving import Served, serve

RIGHT = Script.of_text("Answer: 126")
SCRIPTS = {
    "14 loaves": RIGHT,
    "45 stamps": Script.of_text("Answer: 41"),
    "Oslo": Script.of_text('<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'),
    "": Script.of_text("Hm.", error="it broke"),
}
PROBLEMS = [problem for problem in own_problems() if problem.name in ("numbers/1", "numbers/2", "calls/1")]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(SCRIPTS, context_length=8192) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[ServerClient]:
    client = ServerClient(served.url)
    yield client
    client.close()


def test_a_lossless_server_passes(served: Served, client: ServerClient) -> None:
    num_before = len(served.backend.submitted)
    found = summarize_quality(run_quality(client, PROBLEMS))
    assert (found["num_same_text"], found["different_text"], found["faults"]) == (3, [], [])
    assert found["accuracy"] == {"plain": pytest.approx(2 / 3), "speculative": pytest.approx(2 / 3)}
    assert (found["mcnemar_p"], found["drafting_confirmed"]) == (1.0, True)
    assert found["max_discordance"] == pytest.approx(1 - 0.05 ** (1 / 3))
    assert found["by_kind"]["call"] == {"num_problems": 1, "num_same_text": 1, "plain": 1.0, "speculative": 1.0}
    drafted = [params.num_speculative_tokens for _, params in served.backend.submitted[num_before:]]
    assert drafted == [0, None, None, 0, 0, None]
    assert all(params.temperature == 0 for _, params in served.backend.submitted[num_before:])


def test_a_server_that_writes_otherwise_without_drafts_fails(client: ServerClient) -> None:
    wrong = {**SCRIPTS, "14 loaves": Script.of_text("Answer: 127", drafted=False)}
    with serve(wrong, context_length=8192) as other:
        plain = ServerClient(other.url)
        found = summarize_quality(run_quality(client, PROBLEMS, plain_client=plain))
        plain.close()
    assert (found["different_text"], found["faults"]) == (["numbers/1"], ["different_text"])
    assert (found["only_plain_right"], found["only_speculative_right"]) == (0, 1)


def test_a_switch_that_is_ignored_is_refused(client: ServerClient, served: Served) -> None:
    class Deaf(ServerClient):
        def complete(self, request):  # type: ignore[no-untyped-def]
            return super().complete(replace(request, extra={}))

    deaf = Deaf(served.url)
    with pytest.raises(ConfigError, match="--plain-url"):
        run_quality(deaf, PROBLEMS)
    deaf.close()


def test_errors_and_idle_drafters_are_faults() -> None:
    plain = {key: Script.of_text("Answer: 1", drafted=False) for key in ("14 loaves", "45 stamps")}
    with serve(
        {**plain, "": replace(Script.of_text("Hm.", drafted=False), error="it broke")}, context_length=8192
    ) as idle:
        client = ServerClient(idle.url)
        found = summarize_quality(run_quality(client, PROBLEMS))
        client.close()
    assert (found["num_errors"], found["faults"]) == (1, ["errors", "nothing_drafted"])
    assert found["drafting_confirmed"] is False


def answered(is_right: bool, *, arm: str = "plain", num_draft_tokens: int | None = 0) -> Answer:
    return Answer(
        problem="p", kind="number", arm=arm, is_right=is_right, text="t", reasoning="", tool_calls=(),
        finish_reason="stop", num_output_tokens=1, num_draft_tokens=num_draft_tokens, error=None,
    )  # fmt: skip


def paired(both: int, only_plain: int, only_speculative: int) -> list[tuple[Answer, Answer]]:
    kinds = [(True, True)] * both + [(True, False)] * only_plain + [(False, True)] * only_speculative
    return [(answered(a), answered(b, arm="speculative", num_draft_tokens=3)) for a, b in kinds]


@pytest.mark.parametrize(
    ("counts", "p_value", "faults"),
    [
        ((150, 0, 0), 1.0, []),
        ((20, 5, 0), 0.0625, []),
        ((20, 6, 0), 0.03125, ["accuracy"]),
        ((20, 0, 6), 0.03125, []),
        ((20, 3, 1), 0.625, []),
    ],
)
def test_mcnemar_is_exact_and_says_what_n_allows(
    counts: tuple[int, int, int], p_value: float, faults: list[str]
) -> None:
    found = summarize_quality(paired(*counts))
    assert found["mcnemar_p"] == pytest.approx(p_value)
    assert found["faults"] == faults
    num_pairs, num_apart, bound = sum(counts), sum(counts[1:]), found["max_discordance"]
    chances = [comb(num_pairs, k) * bound**k * (1 - bound) ** (num_pairs - k) for k in range(num_apart + 1)]
    assert sum(chances) == pytest.approx(0.05)


def test_calls_are_the_same_whatever_their_ids() -> None:
    one = replace(answered(True), tool_calls=({"id": "a", "name": "f", "arguments": "{}"},))
    assert one.same_as(replace(one, tool_calls=({"id": "b", "name": "f", "arguments": "{}"},)))
    assert not one.same_as(replace(one, tool_calls=({"id": "a", "name": "f", "arguments": '{"x": 1}'},)))
    assert not one.same_as(replace(one, finish_reason="length"))
    assert not one.same_as(replace(one, reasoning="hm"))


def test_nothing_at_all_is_no_figure() -> None:
    found = summarize_quality([])
    assert (found["mcnemar_p"], found["max_discordance"], found["accuracy"]["plain"]) == (None, None, None)
