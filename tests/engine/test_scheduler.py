"""Order of arrival, seats, and who gives way when pages run out."""

from __future__ import annotations

from outrider.core import SamplingParams
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import RequestState
from tests.counted_space import CountedSpace


def make_request(index: int, num_prompt_tokens: int = 4) -> RequestState:
    return RequestState(
        index=index,
        prompt_token_ids=(1,) * num_prompt_tokens,
        params=SamplingParams(),
        noise_seed=0,
        draft_length=0,
        num_tokens_left=8,
        stop_token_ids=frozenset(),
        decoder=None,
    )


def started(scheduler: Scheduler, request: RequestState) -> RequestState:
    """A request that was queued, prefilled and runs."""
    scheduler.waiting.append(request)
    assert scheduler.next_to_prefill() is request
    assert scheduler.make_room(request, num_committed=0, num_rows=len(request.prefill_token_ids))
    scheduler.start(request)
    request.output_token_ids.append(2)
    return request


def test_one_is_prefilled_at_a_time_and_seats_are_private() -> None:
    scheduler = Scheduler(num_seats=2, space=CountedSpace(10))
    first, second, third = (make_request(index) for index in range(3))
    scheduler.waiting.extend([first, second, third])
    assert scheduler.next_to_prefill() is scheduler.next_to_prefill() is first
    scheduler.start(first)
    assert scheduler.next_to_prefill() is second
    assert {first.seat, second.seat} == {0, 1}
    scheduler.start(second)
    assert scheduler.next_to_prefill() is None  # no seat
    scheduler.remove(first)
    assert scheduler.next_to_prefill() is third
    assert third.seat == 0
    assert scheduler.seated == [second, third]


def test_who_waits_needs_room_for_its_whole_text() -> None:
    scheduler = Scheduler(num_seats=2, space=CountedSpace(3))
    started(scheduler, make_request(0, 8))
    scheduler.waiting.append(make_request(1, 5))
    assert scheduler.next_to_prefill() is None
    scheduler.waiting[0].prompt_token_ids = (1,) * 4
    assert scheduler.next_to_prefill() is scheduler.prefilling is not None


def test_the_youngest_gives_way_and_order_is_kept() -> None:
    space = CountedSpace(3)
    scheduler = Scheduler(num_seats=4, space=space)
    first, second, third = (started(scheduler, make_request(index)) for index in range(3))
    late = make_request(3)
    scheduler.waiting.append(late)
    assert scheduler.make_room(first, num_committed=0, num_rows=9)
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second, third, late]
    assert [request.seat for request in (second, third)] == [-1, -1]
    assert (scheduler.num_preemptions, space.num_free) == (2, 0)


def test_the_youngest_gives_way_to_itself_last() -> None:
    scheduler = Scheduler(num_seats=4, space=CountedSpace(2))
    first, second = (started(scheduler, make_request(index)) for index in range(2))
    assert not scheduler.make_room(second, num_committed=0, num_rows=5)
    assert (scheduler.running, list(scheduler.waiting)) == ([first], [second])


def test_a_text_begun_is_prefilled_but_for_its_anchor() -> None:
    scheduler = Scheduler(num_seats=4, space=CountedSpace(2))
    _, second = (started(scheduler, make_request(index)) for index in range(2))
    second.output_token_ids += [7, 8]
    scheduler.make_room(second, num_committed=0, num_rows=5)
    assert second.prefill_token_ids == (1, 1, 1, 1, 2, 7)


def test_a_prompt_pushed_out_half_way_counts_nothing_of_its_own_as_cached() -> None:
    """What it finds when it comes back it had left there itself."""
    space = CountedSpace(3)
    scheduler = Scheduler(num_seats=2, space=space)
    first, second = started(scheduler, make_request(0)), make_request(1, 8)
    scheduler.waiting.append(second)
    space.num_found = 2
    assert scheduler.next_to_prefill() is second
    assert (second.num_cached_tokens, second.num_computed_tokens) == (2, 2)
    scheduler.make_room(second, num_committed=0, num_rows=8)
    assert scheduler.make_room(first, num_committed=0, num_rows=8)
    assert (second.seat, second.num_preemptions) == (-1, 1)
    scheduler.remove(first)
    space.num_found = 4
    assert scheduler.next_to_prefill() is second
    assert (second.num_cached_tokens, second.num_computed_tokens) == (2, 4)


def test_removing_frees_wherever_a_request_is() -> None:
    space = CountedSpace(8)
    scheduler = Scheduler(num_seats=4, space=space)
    running, prefilling, waiting = started(scheduler, make_request(0)), make_request(1), make_request(2)
    scheduler.waiting.extend([prefilling, waiting])
    scheduler.next_to_prefill()
    scheduler.make_room(prefilling, num_committed=0, num_rows=3)
    for request in (waiting, prefilling, running):
        scheduler.remove(request)
        scheduler.remove(request)  # twice is once
    assert not scheduler.has_work
    assert space.num_free == 8
