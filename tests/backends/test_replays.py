from __future__ import annotations

import pytest
import torch

from outrider.backends import replays
from outrider.backends.replays import ReplayGaps, watched_replays


class Clock:
    """Events of a pretended device, at milliseconds that it is told."""

    def __init__(self, times_ms: list[float]) -> None:
        self.times_ms = iter(times_ms)

    def event(self) -> Clock:
        return self

    def record(self) -> None:
        self.at_ms = next(self.times_ms)

    def elapsed_time(self, later: Clock) -> float:
        return later.at_ms - self.at_ms


def test_each_replay_is_seen_from_both_sides_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: seen.append("replay"))
    untouched = torch.cuda.CUDAGraph.replay

    def fail_after_a_replay() -> None:
        with watched_replays(lambda _graph: seen.append("<"), lambda: seen.append(">")):
            torch.cuda.CUDAGraph.replay(object())  # type: ignore[arg-type]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_a_replay()
    assert seen == ["<", "replay", ">"]
    assert torch.cuda.CUDAGraph.replay is untouched


def test_gaps_are_from_one_end_to_the_next_beginning_and_summed_by_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 1.25, 2.0, 2.05, 3.0, 3.5, 4.0])
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(replays, "timing_event", lambda: Clock([next(times)]))
    gaps = ReplayGaps()
    with gaps.watching():
        for num_replays in (1, 2, 0, 1):
            for _ in range(num_replays):
                torch.cuda.CUDAGraph.replay(object())  # type: ignore[arg-type]
            gaps.end_cycle()
    assert gaps.gaps_us() == pytest.approx([0.0, 250.0 + 50.0, 500.0])


def test_nothing_replayed_has_no_gaps() -> None:
    gaps = ReplayGaps()
    with gaps.watching():
        pass
    assert gaps.gaps_us() == []


@pytest.mark.gpu
def test_gaps_of_a_real_graph_grow_with_what_the_host_does() -> None:
    numbers = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.mul_(1.0)
    gaps = ReplayGaps()
    with gaps.watching():
        for _ in range(5):
            graph.replay()
            gaps.end_cycle()
            torch.cuda.synchronize()
            torch.cuda._sleep(10_000_000)
    assert len(gaps.gaps_us()) == 5
    assert min(gaps.gaps_us()[1:]) > 500
