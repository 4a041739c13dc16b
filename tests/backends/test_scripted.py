from __future__ import annotations

import threading

import pytest

from outrider.backends.scripted import Script, ScriptedBackend, Step, byte_tokenizer
from outrider.core import Chunk, SamplingParams
from outrider.errors import OverloadedError, RequestError
from tests.serving import eventually

FULL = OverloadedError("The queue is full.", retry_after_s=2.0)
SCRIPTS = {
    "bad": Script((Step((104,)),), error="logits are not finite"),
    "full": Script((), refusal=FULL),
    "ever": Script((Step((97,)),), repeats=True),
    "slow": Script((Step((97,), delay_s=5.0), Step((98,)))),
    "": Script.of_text("Hé there", block_tokens=3),
}


@pytest.fixture
def backend() -> ScriptedBackend:
    waited: list[float] = []
    backend = ScriptedBackend(SCRIPTS, context_length=64, sleep=waited.append)
    backend.waited = waited  # type: ignore[attr-defined]
    backend.start()
    yield backend
    backend.stop()


def answer(backend: ScriptedBackend, prompt: str, **params: object) -> list[Chunk]:
    chunks: list[Chunk] = []
    ended = threading.Event()

    def on_chunk(chunk: Chunk) -> None:
        chunks.append(chunk)
        if chunk.finish_reason is not None:
            ended.set()

    backend.submit(backend.tokenizer.encode(prompt), SamplingParams(**params), on_chunk)  # type: ignore[arg-type]
    assert ended.wait(10)
    return chunks


def test_bytes_and_control_tokens_have_the_ids_that_the_cases_name() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("aé") == [256, 97, 0xC3, 0xA9]
    assert tokenizer.encode("<eos><turn|><|channel><channel|><|tool_call><tool_call|>", add_bos=False) == [
        *range(257, 263)
    ]
    assert tokenizer.eos_ids == (257, 258)
    text = "".join(map(chr, range(128))) + "삼🙂<0x41>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_script_is_followed_block_by_block(backend: ScriptedBackend) -> None:
    chunks = answer(backend, "hi")
    assert "".join(chunk.text for chunk in chunks) == "Hé there"  # the end token counts, but is no text
    assert [len(chunk.token_ids) for chunk in chunks] == [3, 3, 3, 1]
    assert [chunk.num_accepted_draft_tokens for chunk in chunks] == [2, 2, 2, 0]
    summary = chunks[-1].summary
    assert summary is not None
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (3, 10)
    assert (summary.acceptance.num_cycles, summary.acceptance.num_accepted_tokens) == (4, 6)
    assert all(chunk.summary is None for chunk in chunks[:-1])


def test_limits_and_switches_hold(backend: ScriptedBackend) -> None:
    cut = answer(backend, "hi", max_tokens=4)
    assert (sum(len(chunk.token_ids) for chunk in cut), cut[-1].finish_reason) == (4, "length")
    plain = answer(backend, "hi", num_speculative_tokens=0, logprobs=2)
    assert {(chunk.num_accepted_draft_tokens, chunk.num_draft_tokens) for chunk in plain} == {(0, 0)}
    assert [entry.token_id for chunk in plain for entry in chunk.logprobs] == [
        i for chunk in plain for i in chunk.token_ids
    ]
    endless = answer(backend, "ever")
    assert endless[-1].finish_reason == "length"
    assert sum(len(chunk.token_ids) for chunk in endless) == 64 - 5


def test_failures_are_played(backend: ScriptedBackend) -> None:
    failed = answer(backend, "bad")[-1]
    assert failed.finish_reason == "error"
    assert failed.summary is not None
    assert failed.summary.error == "logits are not finite"
    with pytest.raises(OverloadedError, match="queue"):
        backend.submit([256, *b"full"], SamplingParams(), print)
    with pytest.raises(RequestError, match="context length is 64"):
        backend.submit([97] * 64, SamplingParams(), print)


def test_waits_go_by_its_own_clock(backend: ScriptedBackend) -> None:
    answer(backend, "slow")
    assert backend.waited == [5.0]  # type: ignore[attr-defined]


def test_cancel_and_stop_end_what_runs() -> None:
    backend = ScriptedBackend({"": Script((Step((97,), delay_s=0.001),), repeats=True)}, context_length=10**6)
    backend.start()
    first, second = (backend.submit([97], SamplingParams(), lambda chunk: None) for _ in range(2))
    assert backend.gauges().num_running == 2
    backend.cancel(first)
    eventually(lambda: first in backend.finish_reasons)
    assert second not in backend.finish_reasons
    backend.stop()
    assert backend.finish_reasons == {first: "abort", second: "abort"}
    gauges = backend.gauges()
    assert (gauges.num_running, gauges.num_free_pages) == (0, gauges.num_pages)
    with pytest.raises(RequestError, match="does not run"):
        backend.submit([97], SamplingParams(), print)


def test_stop_lets_short_answers_end() -> None:
    backend = ScriptedBackend({"": Script((Step((97,), delay_s=0.05), Step((98,))))})
    backend.start()
    index = backend.submit([97], SamplingParams(), lambda chunk: None)
    backend.stop(drain_s=10.0)
    assert backend.finish_reasons == {index: "stop"}


def test_it_drafts_once_it_has_drafted(backend: ScriptedBackend) -> None:
    assert backend.speculation().reason == "nothing was drafted yet"
    answer(backend, "hi")
    assert backend.speculation().is_active


def test_a_prefix_cache_counts_whole_pages() -> None:
    backend = ScriptedBackend({"": Script.of_text("ok")}, prefix_page_tokens=4)
    backend.start()
    summaries = [answer(backend, text)[-1].summary for text in ("abcdefgh", "abcdefxy", "abcdefgh", "zbcdefgh")]
    backend.stop()
    # The begin token is in the first page, and the last token is always computed.
    assert [each.num_cached_tokens for each in summaries if each] == [0, 4, 8, 0]
