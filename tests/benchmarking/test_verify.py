"""The ladder against a scripted server over HTTP: a sound one passes, and each planted fault fails its own rung."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking import verify
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.verify import RUNGS, LadderConfig, Rung, climb
from outrider.errors import ConfigError
from tests.benchmarking.test_answer_quality import ESSAY
from tests.benchmarking.test_greedy import TwoTexts
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


WRONG: list[tuple[str, Script, str, str]] = [
    ("capital of France", Script.of_text("Lyon."), "basic", "'Lyon.'"),
    ("capital of France", Script.of_text("", error="broken"), "basic", "broken"),
    ("Count from one", Script.of_text("one, two, three, four, five", block_tokens=100), "streaming", "1 chunks"),
    ("Count from one", Script.of_text("ha", block_tokens=1), "streaming", "2 characters"),
    ("weather in Oslo", Script.of_text("It rains."), "tools", "no call came"),
    ("weather in Oslo", Script.of_text('get_weather({"city": "Oslo"})'), "tools", "not parsed"),
    ("weather in Oslo", Script.of_text(CALL.replace("get_weather", "get_time")), "tools", "get_time"),
    ("weather in Oslo", Script.of_text(CALL.replace("city", "town")), "tools", "not JSON with a city"),
    ("bridges were built", Script.of_text("and " * 120), "quality", "different ones"),
    ("bridges were built", Script.of_text(""), "quality", "empty"),
    ("bridges were built", Script.of_text(ESSAY, drafted=False), "acceptance", "nothing was drafted"),
    ("bridges were built", Script.of_text(ESSAY, block_tokens=1), "acceptance", "nothing was drafted"),
    ("honey bee", TwoTexts(b"to lay eggs", b"to lay ages"), "greedy", "fault at token 8: 101 in the reference and 97"),
    ("7334-kestrel", Script.of_text("I do not know."), "needle", "lost at 3,"),
]


@pytest.mark.parametrize(("key", "script", "rung", "said"), WRONG, ids=[f"{row[2]}-{row[3]}" for row in WRONG])
def test_a_planted_fault_fails_its_rung(served: Served, key: str, script: Script, rung: str, said: str) -> None:
    rungs = climbed(served, {key: script})
    failed = [each for each in rungs if each.status == "fail"]
    assert failed[0].name == rung
    assert said.replace(",", "") in failed[0].reason.replace(",", "")
    assert failed[0].advice


def test_an_acceptance_below_the_floor_fails_and_a_floor_of_zero_is_for_plain_servers(served: Served) -> None:
    high = LadderConfig(needle_tokens=(1_000,), essay_tokens=600, min_acceptance_length=4.5)
    assert statuses(climbed(served, config=high)) == {"acceptance": "fail"}
    plain = LadderConfig(needle_tokens=(1_000,), essay_tokens=600, min_acceptance_length=0)
    assert statuses(climbed(served, {"bridges were built": Script.of_text(ESSAY, drafted=False)}, plain)) == {
        "acceptance": "skip"
    }


def test_greedy_texts_are_judged_by_the_tolerance_that_was_given(served: Served) -> None:
    """The script's likeliest is the token, at -0.5; its second an a, at -1."""
    bee = {"honey bee": TwoTexts(b"to lay eggs", b"to lay a egg")}
    config = LadderConfig(needle_tokens=(1_000,), essay_tokens=600, tie_tolerance=0.5)
    rungs = climbed(served, bee, config)  # type: ignore[arg-type]
    assert statuses(rungs) == {}
    (flips,) = [rung.flips for rung in rungs if rung.flips]
    assert (flips["num_ties"], flips["num_faults"], flips["largest_gap"]) == (1, 0, 0.5)
    assert "1 ties in" in reason(rungs, "greedy")


def test_a_server_that_always_drafts_is_held_against_a_plain_one(served: Served) -> None:
    with serve({"": Script.of_text("Yes.")}) as plain, ServerClient(plain.url) as plain_client:
        served.backend._scripts = {"honey bee": Script.of_text("No."), **SOUND}
        with ServerClient(served.url) as client:
            client._kind = "vllm"
            assert climb(client, CONFIG)[RUNGS.index("greedy")].status == "skip"
            assert climb(client, CONFIG, plain_client=plain_client)[RUNGS.index("greedy")].status == "fail"


def test_a_needle_is_cut_to_the_context() -> None:
    with serve(SOUND, context_length=2_400) as small:
        rungs = climbed(small, config=LadderConfig(needle_tokens=(30_000,), essay_tokens=600))
    assert statuses(rungs) == {}
    assert int(reason(rungs, "needle").split()[2].replace(",", "")) == pytest.approx(0.8 * 2_400 - 200, abs=150)


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


def test_a_call_without_its_finish_reason_fails() -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "Oslo" in verify._check_calls([call], "", "tool_calls")
    with pytest.raises(verify._FailedError, match="finish_reason is 'stop'"):
        verify._check_calls([call], "", "stop")
    with pytest.raises(verify._FailedError, match="markup"):
        verify._check_calls([call], "<|tool_call>", "tool_calls")


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
