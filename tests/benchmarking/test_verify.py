"""The ladder against a scripted server over HTTP: a sound one passes, and what fails holds up what needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.rungs import RUNGS, LadderConfig
from outrider.benchmarking.verify import Rung, climb
from outrider.errors import ConfigError
from tests.benchmarking.test_answer_quality import ESSAY
from tests.serving import Served, serve

CALL = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
SOUND = {
    "7317-kestrel": Script.of_text("It is 7317-kestrel."),
    "7334-kestrel": Script.of_text("7334-KESTREL"),
    "capital of France": Script.of_text("Paris."),
    "Count from one": Script.of_text("one two three four five six seven eight nine ten"),
    "weather in Oslo": Script.of_text(CALL),
    "bridges were built": Script.of_text(ESSAY),
    "": Script.of_text("Yes."),
}
CONFIG = LadderConfig(needle_tokens=(1_000, 3_000), essay_tokens=600)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(SOUND, context_length=8192) as served:
        yield served


def climbed(served: Served, changes: dict[str, Script] | None = None, config: LadderConfig = CONFIG) -> list[Rung]:
    """A climb of a server that has been told to answer some prompts otherwise."""
    changed = changes or {}
    served.backend._scripts = {**changed, **SOUND, **changed}  # the first key that a prompt contains wins
    client = ServerClient(served.url)
    rungs = climb(client, config)
    client.close()
    assert [rung.name for rung in rungs] == list(RUNGS)
    return rungs


def statuses(rungs: list[Rung]) -> dict[str, str]:
    return {rung.name: rung.status for rung in rungs if rung.status != "pass"}


def reason(rungs: list[Rung], name: str) -> str:
    return next(rung.reason for rung in rungs if rung.name == name)


def test_a_sound_server_climbs_to_the_top(served: Served) -> None:
    rungs = climbed(served)
    assert statuses(rungs) == {}
    assert reason(rungs, "reachable") == "outrider serves scripted"
    assert reason(rungs, "tools") == "get_weather was called for Oslo"
    assert reason(rungs, "acceptance") == "a cycle is worth 4.00 tokens"
    sizes = [int(size.replace(",", "")) for size in reason(rungs, "needle").split()[2:5:2]]
    assert sizes == [pytest.approx(1_000, abs=150), pytest.approx(3_000, abs=150)]


def test_nobody_there() -> None:
    client = ServerClient("http://127.0.0.1:9", timeout_s=1)
    rungs = climb(client, CONFIG)
    assert statuses(rungs) == {"reachable": "fail", **dict.fromkeys(RUNGS[1:], "skip")}
    assert "its address" in (rungs[0].advice or "")
    assert rungs[1].reason == "it needs 'reachable', which did not pass"


def test_rungs_are_left_out_on_request_and_hold_nothing_up(served: Served) -> None:
    config = LadderConfig(needle_tokens=(1_000,), essay_tokens=600, skipped=("basic", "tools", "quality"))
    rungs = climbed(served, {"capital of France": Script.of_text("Lyon.")}, config)
    assert statuses(rungs) == {"basic": "skip", "tools": "skip", "quality": "skip"}
    with pytest.raises(ConfigError, match="--skip 'speed'"):
        LadderConfig(skipped=("speed",))
    with pytest.raises(ConfigError, match="haystack"):
        LadderConfig(needle_tokens=(10,))
    with pytest.raises(ConfigError, match="--tie-tolerance -1"):
        LadderConfig(tie_tolerance=-1)


def test_an_answer_of_another_shape_fails_its_rung_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(self: ServerClient, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        return 200, {"choices": [{"message": {"content": 3}}]}

    monkeypatch.setattr(ServerClient, "post_json", odd)
    config = LadderConfig(skipped=("quality", "greedy", "needle", "streaming"))
    with ServerClient(served.url) as client:
        rungs = climb(client, config)
    assert statuses(rungs)["basic"] == "fail"
    assert "another shape than OpenAI's" in reason(rungs, "basic")
    with pytest.raises(ConfigError, match="--min-acceptance-length"):
        LadderConfig(min_acceptance_length=float("nan"))
