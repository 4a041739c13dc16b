"""Arms by their text, over a server's socket and over a backend in this process.

Seen red: nested fields flat, a field that never reaches the body, drafts counted where none were verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking import arms
from outrider.benchmarking.arms import ArmSpec, Asking, LocalArm, Rendering, ServerArm, parse_arm
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.request_sets import Item
from outrider.core import Chunk, Prompt, SamplingParams
from outrider.errors import ConfigError, EngineFault
from tests.benchmarking.planted import sample
from tests.serving import Served, serve

TEXT = "twenty-four characters, "


def test_an_arm_is_a_name_a_place_and_fields() -> None:
    spec = parse_arm("off=http://127.0.0.1:8000/v1,speculative.enabled=false,top_k=20,speculative.x=1,tier=best")
    assert (spec.name, spec.place, spec.local_kind) == ("off", "http://127.0.0.1:8000/v1", None)
    assert spec.fields == {"speculative": {"enabled": False, "x": 1}, "top_k": 20, "tier": "best"}
    local = parse_arm("n2=local:drafter,num_speculative_tokens=2")
    assert (local.local_kind, local.fields) == ("drafter", {"num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("http://127.0.0.1:8000", "has no name"),
        ("http://127.0.0.1:8000/?a=b", "has no name"),
        ("local:plain", "has no name"),
        ("=local:plain", "has no name"),
        ("a=127.0.0.1:8000", "is no URL"),
        ("a=local:fast", "local:plain, local:drafter or a URL"),
        ("a=local:plain,top_k=20", "no field 'top_k'"),
        ("a=http://h,top_k", "'top_k' is no field"),
        ("a=http://h,temperature=0.7", "temperature is the same for all arms"),
    ],
)
def test_what_is_no_arm_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arm(text)


@pytest.mark.parametrize(
    "text", ["a=http://x,b=1,b.c=2", "a=http://x,b.c=2,b.c.d=1", "a=http://x,.b=1", "a again=http://x"]
)
def test_fields_that_contradict_each_other_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--arm"):
        parse_arm(text)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"": Script.of_text(TEXT * 4)}) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[ServerClient]:
    with closing(ServerClient(served.url)) as opened:
        yield opened


def server_arm(client: ServerClient, *fields: str, **asking: Any) -> ServerArm:
    spec = parse_arm(",".join(["arm=http://here", *fields]))
    return ServerArm(spec, client, Asking(max_tokens=16, **asking))


def test_a_server_is_asked_with_the_fields_of_the_arm(served: Served, client: ServerClient) -> None:
    on = server_arm(client, "speculative.enabled=true")
    first = on.measure(Item(prompt="Dear Anna"))
    assert (first.error, first.num_output_tokens, first.text) == (None, 16, TEXT[:16])
    assert (on.asked, on.echo([first])) == ({"drafting": True}, {"drafting": True})
    off = server_arm(client, "speculative.num_speculative_tokens=0")
    second = off.measure(Item(prompt="Dear Anna"))
    assert second.text == first.text
    assert (off.asked, off.echo([second])) == ({"drafting": False}, {"drafting": False})
    assert server_arm(client).asked == {}
    params = served.backend.submitted[-1][1]
    assert (params.num_speculative_tokens, params.ignore_eos, params.temperature) == (0, True, 0.0)


def test_chat_adds_a_template_and_counting_says_how_much(served: Served, client: ServerClient) -> None:
    plain, chat = server_arm(client), server_arm(client, is_chat=True, ignore_eos=False)
    assert chat.count_prompt_tokens(Item(prompt="hello")) > plain.count_prompt_tokens(Item(prompt="hello")) == 6
    assert chat.measure(Item(prompt="hello")).num_prompt_tokens == chat.count_prompt_tokens(Item(prompt="hello"))
    assert not served.backend.submitted[-1][1].ignore_eos
    about = plain.describe()
    assert about["settings"].items() >= {"max_tokens": 16, "ignore_eos": True}.items()
    assert (about["name"], about["backend"], about["target"]) == ("arm", "outrider", "scripted")


def test_a_server_that_does_not_count_is_named() -> None:
    arm = ServerArm(ArmSpec(name="gone", place=""), ServerClient("http://127.0.0.1:9", model="m"), Asking(max_tokens=2))
    with pytest.raises(EngineFault, match="gone does not count a prompt"):
        arm.count_prompt_tokens(Item(prompt="hello"))
    assert arm.measure(Item(prompt="hello")).error


def test_answers_without_acceptance_mean_off_on_our_own_server_only(client: ServerClient, monkeypatch: Any) -> None:
    arm = server_arm(client)
    assert arm.echo([sample()]) == {"drafting": False}
    monkeypatch.setattr(ServerClient, "server_kind", lambda _: "vllm")
    assert arm.echo([sample()]) == {}


class CountingClient:
    """vLLM as an arm sees it: answers say nothing of drafts, counters grow by what is planted."""

    def __init__(self, *grown: float, kind: str = "vllm") -> None:
        self.kind, self.grown, self.num_answers, self.num_scrapes = kind, grown, 0, 0

    def server_kind(self) -> str:
        return self.kind

    def complete(self, request: Any) -> Any:
        self.num_answers += 1
        return sample()

    def metrics_text(self) -> str:
        self.num_scrapes += 1
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        texts = (
            f"vllm:spec_decode_{name}_total {100 + self.num_answers * value}"
            for name, value in zip(names, self.grown, strict=False)
        )
        return "\n".join([*texts, ""])


def test_what_a_foreign_server_drafted_is_read_from_its_counters() -> None:
    found = server_arm(CountingClient(5, 20, 9))  # type: ignore[arg-type]
    measured = found.measure(Item(prompt="hello"))
    assert measured.acceptance == {"num_spec_steps": 5, "num_draft_tokens": 20, "num_accepted_draft_tokens": 9}
    assert found.echo([measured]) == {"drafting": True}
    idle = server_arm(CountingClient(0, 0, 0))  # type: ignore[arg-type]
    assert idle.echo([idle.measure(Item(prompt="hello"))]) == {"drafting": False}
    for nothing in (CountingClient(), CountingClient(5), CountingClient(-5, 20, 9)):
        arm = server_arm(nothing)  # type: ignore[arg-type]
        assert arm.measure(Item(prompt="hello")).acceptance is None
    ours = CountingClient(5, 20, 9, kind="outrider")
    assert server_arm(ours).measure(Item(prompt="hello")).acceptance is None  # type: ignore[arg-type]
    assert ours.num_scrapes == 0


class FakeBackend:
    """Two drafted tokens kept of three, then one plain cycle; each chunk takes a second of the clock it is given."""

    def __init__(self, clock: list[float], error: Exception | None = None) -> None:
        self.clock, self.error = clock, error
        self.params: SamplingParams | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        return [0] * len(prompt)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        self.params = params
        for chunk in (Chunk(0, "1", (1,), 0), Chunk(0, "234", (2, 3, 4), 2, None, 3), Chunk(0, "5", (5,), 0, "length")):
            self.clock[0] += 1.0
            yield chunk
        if self.error:
            raise self.error


def local_arm(monkeypatch: pytest.MonkeyPatch, *, drafter: str | None = "d", **options: Any) -> LocalArm:
    clock = [0.0]
    monkeypatch.setattr(arms.time, "perf_counter", lambda: clock[0])
    backend = FakeBackend(clock, options.get("error"))
    spec = ArmSpec(name="here", place="local:drafter", fields=options.get("fields", {}))
    asking = Asking(max_tokens=5, temperature=0.5, seed=3, ignore_eos=options.get("ignore_eos", True))
    return LocalArm(spec, backend, asking, target="embedded", drafter=drafter, kernels="cpu", render=written)


def written(item: Item) -> Rendering:
    """A template of one character a turn."""
    return Rendering(text=f"<{item.messages[0]['content']}>", stop_strings=("<",), stop_token_ids=(9,))


def test_a_local_answer_is_timed_and_counted_by_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = local_arm(monkeypatch, fields={"num_speculative_tokens": 3})
    found = arm.measure(Item(prompt="abc"))
    assert (found.ttft_s, found.e2e_s, found.chunk_gaps_s) == (1.0, 3.0, (1.0, 1.0))
    assert (found.num_prompt_tokens, found.num_output_tokens, found.text, found.finish_reason) == (
        3,
        5,
        "12345",
        "length",
    )
    assert found.tpot_s == pytest.approx(2 / 4)
    assert found.acceptance == {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2}
    assert (arm.asked, arm.echo([found])) == ({"drafting": True}, {"drafting": True})
    params = arm._backend.params  # type: ignore[attr-defined]
    assert (params.max_tokens, params.temperature, params.seed, params.num_speculative_tokens) == (5, 0.5, 3, 3)
    settings = arm.describe()["settings"]
    assert (
        settings.items() >= {"kernels": "cpu", "num_speculative_tokens": 3, "max_tokens": 5, "temperature": 0.5}.items()
    )


def test_chats_tools_and_their_own_limits_reach_a_server(served: Served, client: ServerClient) -> None:
    chat = Item(messages=({"role": "user", "content": "hello"},), max_tokens=3)
    arm = server_arm(client)
    assert arm.measure(chat).num_output_tokens == 3
    assert arm.count_prompt_tokens(chat) == server_arm(client, is_chat=True).count_prompt_tokens(Item(prompt="hello"))
    assert arm._request(Item(prompt="x", tools=({"type": "function"},)), max_tokens=1).tools == ({"type": "function"},)


def test_chats_are_written_out_for_a_local_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Item(messages=({"role": "user", "content": "abc"},), max_tokens=3)
    arm = local_arm(monkeypatch)
    assert arm.measure(chat).num_prompt_tokens == arm.count_prompt_tokens(chat) == len("<abc>")
    params = arm._backend.params  # type: ignore[attr-defined]
    assert (params.max_tokens, params.stop_strings, params.stop_token_ids) == (3, (), ())
    ending = local_arm(monkeypatch, ignore_eos=False)
    ending.measure(chat)
    params = ending._backend.params  # type: ignore[attr-defined]
    assert (params.stop_strings, params.stop_token_ids) == (("<",), (9,))


def test_plain_arms_and_drafts_of_length_0_ask_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_arm(monkeypatch, drafter=None).asked == {"drafting": False}
    assert local_arm(monkeypatch, fields={"num_speculative_tokens": 0}).asked == {"drafting": False}


def test_a_fault_of_the_engine_is_in_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    found = local_arm(monkeypatch, error=EngineFault("logits are not finite")).measure(Item(prompt="abc"))
    assert (found.error, found.num_output_tokens) == ("logits are not finite", 5)
    with pytest.raises(ZeroDivisionError):
        local_arm(monkeypatch, error=ZeroDivisionError()).measure(Item(prompt="abc"))
