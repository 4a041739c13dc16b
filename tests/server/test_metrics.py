from __future__ import annotations

from outrider.backends.base import Gauges
from outrider.core import AcceptanceStats, Chunk
from outrider.server.metrics import ServerMetrics

GAUGES = Gauges(
    num_running=2,
    num_waiting=3,
    num_free_pages=6,
    num_pages=8,
    num_preemptions=1,
    num_prompt_tokens=50,
    num_cached_tokens=20,
    num_output_tokens=70,
    acceptance=AcceptanceStats(6, 18, 9, {0: 2, 1: 1, 2: 1, 3: 2}),
)


def series(metrics: ServerMetrics) -> dict[str, float]:
    """Values by name and the labels that are not on every series."""
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    named = (
        line.replace('engine="0",', "").replace(',model_name="m"', "").replace('model_name="m",', "") for line in lines
    )
    pairs = (line.replace('{model_name="m"}', "").rsplit(" ", 1) for line in named)
    return {name: float(value) for name, value in pairs}


def test_a_backends_counts_go_by_vllms_names() -> None:
    shown = series(ServerMetrics(lambda: GAUGES, model="m", prefix="vllm"))
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 1,
        "prompt_tokens_total": 50,
        "generation_tokens_total": 70,
        "prefix_cache_queries_total": 50,
        "prefix_cache_hits_total": 20,
        "spec_decode_num_drafts_total": 6,
        "spec_decode_num_draft_tokens_total": 18,
        "spec_decode_num_accepted_tokens_total": 9,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 4,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 3,
        'spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 2,
    }
    assert {name: shown[f"vllm:{name}"] for name in expected} == expected


def test_requests_are_timed_from_their_chunks() -> None:
    now = [100.0]
    metrics = ServerMetrics(lambda: None, model="m", clock=lambda: now[0])
    timer = metrics.watch()
    for elapsed_s, token_ids, reason in ((1.0, (), None), (2.0, (1,), None), (6.0, (2, 3, 4, 5), "stop")):
        now[0] = 100.0 + elapsed_s
        timer.push(Chunk(0, "", token_ids, 0, reason))
    shown = series(metrics)
    assert shown["outrider:time_to_first_token_seconds_sum"] == 2.0
    assert shown["outrider:e2e_request_latency_seconds_sum"] == 6.0
    assert shown["outrider:request_time_per_output_token_seconds_sum"] == 1.0  # 4 s for 4 tokens after the first
    assert shown['outrider:request_success_total{finished_reason="stop"}'] == 1.0


def test_an_answer_without_tokens_has_no_first_one() -> None:
    metrics = ServerMetrics(lambda: None, model="m")
    metrics.watch().push(Chunk(0, "", (), 0, "error"))
    metrics.watch().push(Chunk(0, "", (1,), 0, "length"))
    shown = series(metrics)
    assert shown["outrider:time_to_first_token_seconds_count"] == 1.0
    assert shown["outrider:request_time_per_output_token_seconds_count"] == 0.0
    assert shown["outrider:e2e_request_latency_seconds_count"] == 2.0
