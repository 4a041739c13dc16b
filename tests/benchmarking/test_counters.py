from __future__ import annotations

import pytest

from outrider.backends.scripted import Script
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.benchmarking.counters import CounterReset, Counters, read_counters
from outrider.errors import EngineFault
from tests.serving import serve

VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 20.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 984.0
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 16.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 260.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 1.0
sglang:spec_verify_calls_total{model_name="m"} 5.0
sglang:prompt_tokens_total{model_name="m",is_streaming="true"} 10.0
sglang:prompt_tokens_total{model_name="m",is_streaming="false"} 30.0
sglang:generation_tokens_total{model_name="m"} 20.0
sglang:cached_tokens_total{model_name="m",cache_source="device"} 6.0
sglang:num_requests_total{model_name="m"} 2.0
"""
LLAMA = """
llamacpp:prompt_tokens_total 11
llamacpp:tokens_predicted_total 12
llamacpp:requests_processing 0
llamacpp:spec_decode_num_drafts_total 4
llamacpp:spec_decode_num_draft_tokens_total 12
llamacpp:spec_decode_num_accepted_tokens_total 6
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 2
"""


def test_vllm() -> None:
    found = read_counters(VLLM, "vllm")
    assert found == Counters(
        num_drafts=100,
        num_draft_tokens=300,
        num_accepted_tokens=150,
        accepted_per_position=(90, 60),
        num_prompt_tokens=1000,
        num_generation_tokens=260,
        num_cached_prompt_tokens=16,
        num_requests_running=3,
        num_requests_finished=7,
    )
    assert (found.acceptance_length, found.acceptance_rate, found.acceptance_by_position) == (2.5, 0.5, (0.9, 0.6))
    assert found.fire_rate == 100 / (260 - 7 - 150)
    assert read_counters(VLLM, "outrider") == found
    assert read_counters(VLLM.replace("vllm:", "outrider:"), "outrider") == found
    assert read_counters(VLLM.replace("vllm:", "outrider:"), "vllm") == Counters()


def test_sglang_and_llama() -> None:
    found = read_counters(SGLANG, "sglang")
    assert (found.num_prompt_tokens, found.num_cached_prompt_tokens, found.num_requests_running) == (40, 6, 1)
    assert (found.num_drafts, found.num_accepted_tokens) == (5, None)
    assert found.acceptance_length == (20 - 2) / 5  # all its steps are counted, and each answer's first token is none
    assert found.fire_rate is None
    assert found.accepted_per_position is None
    found = read_counters(LLAMA, "llama.cpp")
    assert (found.num_generation_tokens, found.accepted_per_position) == (12, (4, 0, 2))
    assert (found.acceptance_length, found.num_requests_finished) == (2.5, None)


def test_what_is_missing_is_unknown_and_not_zero() -> None:
    assert read_counters("", "vllm") == read_counters(VLLM, "unknown") == Counters()
    assert read_counters("vllm:spec_decode_num_drafts_total 0", "vllm").acceptance_length is None
    with pytest.raises(EngineFault, match="Prometheus"):
        read_counters("<html>{</html>", "vllm")


def test_a_difference_is_what_came_between() -> None:
    before, after = read_counters(LLAMA, "llama.cpp"), read_counters(LLAMA.replace("12", "20"), "llama.cpp")
    grown = after - before
    assert (grown.num_generation_tokens, grown.num_draft_tokens, grown.num_drafts) == (8, 8, 0)
    assert (grown.accepted_per_position, grown.num_requests_running, grown.acceptance_length) == ((0, 0, 0), 0, None)
    assert (before - Counters()) == before  # series that appear with their first event


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Counters(num_drafts=5), Counters(num_drafts=4)),
        (Counters(num_drafts=5), Counters()),
        (Counters(accepted_per_position=(5, 3)), Counters(accepted_per_position=(6, 2))),
        (Counters(accepted_per_position=(5, 3)), Counters(accepted_per_position=(6,))),
    ],
)
def test_a_counter_that_falls_is_a_new_server(before: Counters, after: Counters) -> None:
    with pytest.raises(CounterReset, match="started anew"):
        after - before


@pytest.mark.parametrize("prefix", ["outrider", "vllm"])
def test_a_real_scrape_counts_what_was_answered(prefix: str) -> None:
    from outrider.server.app import ServerConfig

    script = Script.of_text("The answer.", block_tokens=4)  # 3 blocks, each of 3 drafts, all accepted
    with serve({"": script}, ServerConfig(metrics_prefix=prefix)) as served:
        client = ServerClient(served.url)
        before = read_counters(client.metrics_text(), client.server_kind())
        client.complete(ChatRequest(prompt="hello", max_tokens=50))
        grown = read_counters(client.metrics_text(), client.server_kind()) - before
        client.close()
    assert (grown.num_generation_tokens, grown.num_prompt_tokens, grown.num_requests_finished) == (12, 6, 1)
    assert (grown.num_drafts, grown.accepted_per_position, grown.acceptance_length) == (3, (3, 3, 3), 4.0)


def test_figures_that_are_no_numbers_are_unknown() -> None:
    text = "vllm:num_requests_running NaN\nvllm:generation_tokens_total 7\nvllm:prompt_tokens_total +Inf\n"
    found = read_counters(text, "vllm")
    assert (found.num_requests_running, found.num_prompt_tokens, found.num_generation_tokens) == (None, None, 7)


def test_counts_of_another_process_are_no_difference() -> None:
    def scrape(num_tokens: int, started_s: float | None) -> Counters:
        start = "" if started_s is None else f"process_start_time_seconds {started_s}\n"
        return read_counters(f"{start}vllm:generation_tokens_total {num_tokens}\n", "vllm")

    assert (scrape(90, 5.5) - scrape(50, 5.5)).num_generation_tokens == 40
    assert (scrape(90, 5.5) - scrape(50, None)).num_generation_tokens == 40
    with pytest.raises(CounterReset, match="started anew between two readings, or two servers"):
        _ = scrape(90, 7.0) - scrape(50, 5.5)
