"""Each rung against a scripted server over HTTP: every planted fault fails its own."""

from __future__ import annotations

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking import rungs as checks
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.rungs import RUNGS, LadderConfig
from outrider.benchmarking.verify import climb
from tests.benchmarking.test_answer_quality import ESSAY
from tests.benchmarking.test_greedy import TwoTexts
from tests.benchmarking.test_verify import CALL, CONFIG, SOUND, climbed, reason, served, statuses
from tests.serving import Served, serve

__all__ = ["served"]  # the fixture

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


def test_a_call_without_its_finish_reason_fails() -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "Oslo" in checks._check_calls([call], "", "tool_calls")
    with pytest.raises(checks.FailedError, match="finish_reason is 'stop'"):
        checks._check_calls([call], "", "stop")
    with pytest.raises(checks.FailedError, match="markup"):
        checks._check_calls([call], "<|tool_call>", "tool_calls")
