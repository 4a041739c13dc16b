"""Functions in parts. Seen red: the first part run as well where nothing is captured; parts in the wrong order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from outrider.engine.graph_capture import Graphs


def test_without_cuda_the_second_part_is_all_of_it() -> None:
    graphs, calls = Graphs(torch.device("cpu")), list[str]()

    def function(begin_part: Callable[[], None]) -> None:
        calls.append("first")
        begin_part()
        calls.append("second")

    graphs.run("verify", "key", function, part=0)
    assert calls == []
    graphs.run("verify", "key", function, part=1)
    assert calls == ["first", "second"]
    graphs.run("verify", "key", function)
    assert calls == ["first", "second"] * 2
    assert graphs.has("another key")


@pytest.mark.gpu
def test_parts_are_replayed_apart_and_what_lies_between_them_stays() -> None:
    device = torch.device("cuda")
    graphs, numbers, sums = Graphs(device), torch.arange(4.0, device=device), torch.zeros(4, device=device)

    def function(begin_part: Callable[[], None]) -> None:
        squares = numbers * numbers  # lives on in the second part
        begin_part()
        sums.add_(squares)

    assert not graphs.has("key")
    graphs.run("verify", "key", function)  # once to compile, once replayed
    assert graphs.has("key")
    assert sums.tolist() == [0, 2, 8, 18]
    numbers.fill_(1.0)
    graphs.run("verify", "key", function, part=0)
    numbers.fill_(5.0)
    graphs.run("verify", "key", function, part=1)
    assert sums.tolist() == [1, 3, 9, 19]
    assert [graph.half for graph in graphs._graphs["key"]] == ["verify", "verify"]
