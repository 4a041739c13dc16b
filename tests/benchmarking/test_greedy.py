"""Greedy texts over HTTP, with and without drafting: the same, parted by a tie, or by a fault.

Seen red: the tolerance never measured, ids left as text, a shift that no rounding makes taken for a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from outrider.backends.scripted import Script, Step
from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.flips import Scored, first_difference
from outrider.benchmarking.greedy import PROMPTS, compare_greedy, read_greedy
from outrider.core import SamplingParams
from outrider.errors import EngineFault, RequestError
from tests.serving import Served, serve

PLAIN = {"speculative": {"enabled": False}}
X, Y, Z = 120, 121, 122


class TwoTexts:
    """Writes one text plainly and another with drafts."""

    num_speculative_tokens = 3

    def __init__(self, plain: Sequence[int], drafted: Sequence[int]) -> None:
        self.plain, self.drafted = tuple(plain), tuple(drafted)

    def script(self, _index: int, params: SamplingParams) -> Script:
        """By whether drafting was left out."""
        is_plain = params.num_speculative_tokens == 0
        return Script((Step(self.plain) if is_plain else Step(self.drafted, 1, 3),), finish_reason="length")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"same": TwoTexts([X, Y, Z], [X, Y, Z]), "other": TwoTexts([X, Y, Z], [X, Z, Z])}) as served:  # type: ignore[dict-item]
        yield served


def read(served: Served, prompt: str, **fields: object) -> list[Scored]:
    with ServerClient(served.url) as client:
        return read_greedy(client, [prompt], max_tokens=3, fields=fields)[0]


def test_tokens_come_as_ids_with_the_two_likeliest(served: Served) -> None:
    found = read(served, "same", **PLAIN)
    assert [scored.token for scored in found] == [X, Y, Z]
    assert found[0].top == ((X, -0.5), (97, -1.0), (98, -2.0))
    assert first_difference(found, [scored.token for scored in read(served, "same")], tolerance=0.0) is None


def test_another_text_is_a_fault_where_nothing_else_moves(served: Served) -> None:
    plain, drafted = read(served, "other", **PLAIN), read(served, "other")
    found = compare_greedy([plain], [drafted])
    assert (found.shift, found.tolerance, found.count.num_faults) == (0.0, 0.0, 1)
    assert "fault at token 2: 121 in the reference and 122 in the other" in str(found.fault)


def scored(token: int, first: float, second: float) -> Scored:
    pair = [(X, first), (Y, second)]
    return Scored(token, tuple(sorted(pair, key=lambda each: -each[1])))


def test_ties_are_what_the_same_text_shows_to_be_rounding() -> None:
    plain = [scored(X, -0.1, -2.4), scored(X, -0.69, -0.70), scored(X, -0.1, -2.0)]
    drafted = [scored(X, -0.1, -2.38), scored(Y, -0.70, -0.69), scored(Y, -3.0, -0.1)]
    found = compare_greedy([plain, plain], [drafted, plain])
    assert found.tolerance == pytest.approx(2 * 0.02)
    assert found.fault is None
    assert (found.count.num_ties, found.count.num_positions) == (1, 2 + 3)
    assert "1 ties in 5 tokens (20.00 %)" in str(found)
    assert compare_greedy([plain], [drafted], tolerance=0.0).fault is not None


def test_a_shift_that_no_rounding_makes_is_a_fault() -> None:
    plain, drafted = [scored(X, -0.1, -2.4)], [scored(X, -0.1, -4.4)]
    assert "2.00 apart" in str(compare_greedy([plain], [drafted]).fault)
    assert compare_greedy([plain], [drafted], tolerance=0.1).fault is None


def test_a_server_that_refuses_is_named(served: Served) -> None:
    served.backend._scripts["refused"] = Script((), refusal=RequestError("no such thing"))
    with pytest.raises(EngineFault, match=r"HTTP 400 and .*no such thing"):
        read(served, "refused")


def test_prompts_are_of_several_kinds() -> None:
    assert len(set(PROMPTS)) == 4
