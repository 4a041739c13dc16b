"""On a GPU: what a drafter is worth in bf16, served by graphs and row-invariant kernels, is what the walk says."""

from __future__ import annotations

import pytest

import outrider
from outrider.benchmarking.request_sets import load_request_set
from outrider.benchmarking.selection import different_texts, summarize
from outrider.training.acceptance import HeldOutPrompt, MeasureOptions, measure_drafter
from outrider.weights.locate import embedded_drafter


@pytest.mark.gpu
def test_offline_and_serving_agree_within_3_percent_on_a_gpu() -> None:
    config = outrider.EngineConfig(context_length=512, max_seats=8)
    plain = outrider.load(drafter=None, config=config, device="cuda")
    prompts = [
        HeldOutPrompt(domain="demo", index=index, text=item.prompt or "")
        for index, item in enumerate(load_request_set("demo").items)
    ]
    options = MeasureOptions(temperatures=(0.0, 1.0), max_tokens=96)
    rows = []
    for name in ("one", "two"):
        drafting = plain.with_drafter(embedded_drafter(), target_name="embedded")
        rows += measure_drafter(drafting, name, prompts, options, progress=print)
    assert different_texts(rows) == []
    greedy, sampled = ([each for each in summarize(rows, baseline="one") if each["temperature"] == t] for t in (0, 1))
    for each in greedy:
        assert each["mean_acceptance_length"] > 1.5
        assert abs(each["offline_error_share"]) < 0.03
    assert greedy[1]["difference"] == 0
    assert all(each["offline_error_share"] is None for each in sampled)
