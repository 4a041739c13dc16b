"""Phases and cycles in the speeds of successive requests: where a server jumped to another level, and what repeats.

A phase begins with a jump, so drift makes none. All arithmetic is on logarithms: a fall from 200 to 100 weighs as much
as one from 20 to 10.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, inf, log, sqrt

MIN_REQUESTS = 6
"""Fewer cannot tell a level from noise: they are one phase."""
MIN_STEP = 0.15
"""A jump changes the speed by at least this share of the higher level."""
NUM_DEVIATIONS = 4.5
"""And by so many standard errors, of a difference of means of as many requests as the two medians have."""
MIN_DEVIATION = 0.015
"""Noise is never taken to be less than this share of the speed."""
MAX_TRANSITION = 2
"""Requests on the way between two levels that are a transition, not a level of their own."""
NUM_NEIGHBOURS = 3
"""Requests on either side of a border whose medians make the jump."""
NUM_DRIFTING = 10
"""Requests on either side of a border whose median change from one to the next is drift, and no part of a jump."""
PENALTY = 3.0
"""Price of a border, in variances times log n. Borders that are no jumps are taken out afterwards."""
PERIOD_TOLERANCE = 0.2
"""How far repeats of one cycle may differ, as a share of the period; one request is always allowed."""


@dataclass(frozen=True)
class Phase:
    """A run of requests at one level; requests are counted from 1 and `last` belongs to it."""

    name: str
    """'steady' (there is no other), 'fast', 'transition', 'degraded' or 'recovered' (fast again)."""
    first: int
    last: int
    tokens_per_s: float
    """Median of its requests, in the unit of the rates given."""
    cause: str | None = None
    """Why it is slow, where somebody looked into that; see `causes.cause_of`."""


@dataclass(frozen=True)
class Phases:
    """What `find_phases` found."""

    phases: tuple[Phase, ...]
    period: float | None
    """Requests from one fall to the next, where two whole periods were seen and agree; otherwise not established."""
    intervals: tuple[int, ...] = field(default=(), repr=False)
    """Requests between falls and between rises, in the order they were seen: what the period is taken from."""

    @property
    def is_cycle(self) -> bool:
        """True where the falls repeat."""
        return self.period is not None

    @property
    def degraded(self) -> tuple[Phase, ...]:
        """The slow ones."""
        return tuple(phase for phase in self.phases if phase.name == "degraded")


def find_phases(rates: Sequence[float]) -> Phases:
    """Phases in the speeds of requests, in the order they ran (tokens a second, or any unit above 0).

    Log speeds are cut into pieces of least squared deviation at a price a piece (optimal partitioning, Jackson et al.
    2005); a cut stays where the medians beside it differ by `MIN_STEP` and by `NUM_DEVIATIONS` of the noise, which is
    estimated from the smaller differences of neighbours, so that neither drift nor jumps count as noise. ValueError
    for a speed that is not above 0: a request that failed has none, leave it out.
    """
    rates = list(rates)
    if any(rate is None or not 0 < rate < inf for rate in rates):
        raise ValueError("phases need speeds above 0; leave out requests that have none.")
    if not rates:
        return Phases((), None)
    logs = [log(rate) for rate in rates]
    if len(logs) < MIN_REQUESTS:
        return Phases((_phase("steady", rates, 0, len(rates)),), None)
    deviation = _noise(logs)
    borders = _keep_jumps(logs, _partition(logs, PENALTY * deviation**2 * log(len(logs))), deviation)
    phases = _named(rates, borders)
    intervals, period = _period(phases, len(rates))
    return Phases(phases, period, intervals)


def _noise(logs: Sequence[float]) -> float:
    """Standard deviation of one request, from the lower third of differences of neighbours; more where they are few.

    A normal difference lies within 0.4307 of its deviations in a third of cases; jumps are among the other two thirds.
    """
    steps = sorted(abs(after - before) for before, after in pairwise(logs))
    deviation = steps[len(steps) // 3] / 0.4307 / sqrt(2)
    return max(MIN_DEVIATION, deviation * (1 + 3 / len(steps)))


def _partition(logs: Sequence[float], penalty: float) -> list[int]:
    """Where pieces begin, 0 first: least sum of squared deviations plus a price for each piece."""
    sums, squares = [0.0], [0.0]
    for value in logs:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)
    costs, starts = [-penalty], [0]
    for end in range(1, len(logs) + 1):
        best, best_start = inf, 0
        for start in range(end):
            total = sums[end] - sums[start]
            cost = costs[start] + squares[end] - squares[start] - total * total / (end - start) + penalty
            if cost < best:
                best, best_start = cost, start
        costs.append(best)
        starts.append(best_start)
    borders, end = list[int](), len(logs)
    while end > 0:
        end = starts[end]
        borders.append(end)
    return borders[::-1]


def _keep_jumps(logs: Sequence[float], borders: Sequence[int], deviation: float) -> list[int]:
    """The borders without those where no jump is: the weakest goes first, since that changes its neighbours."""
    kept = [*borders, len(logs)]
    while len(kept) > 2:
        sides = zip(kept, kept[1:], kept[2:], strict=False)
        strengths = [_strength(logs, start, border, end, deviation) for start, border, end in sides]
        weakest = min(range(len(strengths)), key=strengths.__getitem__)
        if strengths[weakest] >= 1:
            break
        del kept[weakest + 1]
    return kept


def _strength(logs: Sequence[float], start: int, border: int, end: int, deviation: float) -> float:
    """How large the jump at a border is, as a multiple of the least that counts."""
    start, end = max(start, border - NUM_NEIGHBOURS), min(end, border + NUM_NEIGHBOURS)
    step = statistics.median(logs[border:end]) - statistics.median(logs[start:border])
    around = logs[max(0, border - NUM_DRIFTING) : border + NUM_DRIFTING]
    drift = statistics.median(after - before for before, after in pairwise(around)) * (end - start) / 2
    rest = abs(step) - (abs(drift) if drift * step > 0 else 0.0)
    error = deviation * sqrt(1 / (border - start) + 1 / (end - border))
    return rest / max(-log(1 - MIN_STEP), NUM_DEVIATIONS * error)


def _named(rates: Sequence[float], borders: Sequence[int]) -> tuple[Phase, ...]:
    """Names for pieces. A level is fast if it is what the last fast one was in the end, wherever that had drifted to.

    Until there is one, the first level is fast if it falls to the next, and a later one if it rose to get there.
    """
    pieces = [_phase("", rates, start, end) for start, end in pairwise(borders)]
    if len(pieces) == 1:
        return (replace(pieces[0], name="steady"),)
    pieces = _with_transitions(rates, pieces)
    levels = [piece for piece in pieces if piece.name != "transition"]
    fast: float | None = None
    last = _beside(rates, levels[1])[0]
    names = dict[int, str]()
    recovered = list[Phase]()  # without a jump: the ends of slow levels that climbed
    for piece in levels:
        begin, end = _beside(rates, piece)
        is_fast = begin > (1 - MIN_STEP) * fast if fast is not None else (end if not names else begin) > last
        names[piece.first] = "degraded" if not is_fast else "recovered" if "fast" in names.values() else "fast"
        if not is_fast and fast is not None and (climbed := _climbed(rates, piece, (1 - MIN_STEP) * fast)) is not None:
            recovered.append(_phase("recovered", rates, climbed, piece.last))
            is_fast = True
        fast, last = end if is_fast else fast, end
    named = [replace(piece, name=names.get(piece.first, piece.name)) for piece in pieces]
    ends = {phase.last: phase for phase in recovered}
    cut = [_phase(p.name, rates, p.first - 1, ends[p.last].first - 1) if p.last in ends else p for p in named]
    return tuple(sorted([*cut, *recovered], key=lambda phase: phase.first))


def _climbed(rates: Sequence[float], piece: Phase, least: float) -> int | None:
    """Index of the first request of a slow piece from which on it is no longer slow, all the rest together included."""
    for at in range(piece.first + NUM_NEIGHBOURS - 1, piece.last - NUM_NEIGHBOURS + 1):
        rest = rates[at : piece.last]
        if min(statistics.median(rest), statistics.median(rest[:NUM_NEIGHBOURS])) > least:
            return at
    return None


def _beside(rates: Sequence[float], piece: Phase) -> tuple[float, float]:
    """Medians of the requests just inside both borders of a piece."""
    inside = rates[piece.first - 1 : piece.last]
    return statistics.median(inside[:NUM_NEIGHBOURS]), statistics.median(inside[-NUM_NEIGHBOURS:])


def _with_transitions(rates: Sequence[float], pieces: Sequence[Phase]) -> list[Phase]:
    """Short pieces on the way from one level to the next are transitions, and several in a row are one."""
    found = list[Phase]()
    for at, piece in enumerate(pieces):
        is_between = 0 < at < len(pieces) - 1 and _is_between(pieces[at - 1], piece, pieces[at + 1])
        if is_between and piece.last - piece.first < MAX_TRANSITION:
            if found[-1].name == "transition":
                piece = _phase("", rates, found.pop().first - 1, piece.last)
            piece = replace(piece, name="transition")
        found.append(piece)
    return found


def _is_between(before: Phase, piece: Phase, after: Phase) -> bool:
    low, high = sorted((before.tokens_per_s, after.tokens_per_s))
    return low < piece.tokens_per_s < high


def _phase(name: str, rates: Sequence[float], start: int, end: int) -> Phase:
    return Phase(name, start + 1, end, exp(statistics.median(log(rate) for rate in rates[start:end])))


def _period(phases: Sequence[Phase], num_requests: int) -> tuple[tuple[int, ...], float | None]:
    """Intervals between falls and between rises, and the period that they agree on.

    A run that begins fast also has a rise before its first request: a server that was just started, or had recovered.
    That one may begin anywhere in a cycle, so it only counts where it agrees with a fall to fall, and never alone.
    """
    levels = [phase for phase in phases if phase.name != "transition"]
    falls, rises = list[int](), list[int]()
    begins = {phase.first: before for before, phase in pairwise(phases)}
    for before, after in pairwise(levels):
        transition = begins.get(after.first)
        first = transition.first if transition is not None and transition.name == "transition" else after.first
        if (before.name == "degraded") != (after.name == "degraded"):
            (falls if after.name == "degraded" else rises).append(first)
    intervals = [late - early for each in (falls, rises) for early, late in pairwise(each)]
    if not intervals:
        return (), None
    if levels[0].name != "degraded" and len(intervals) == 1:
        intervals.append(rises[0] - 1)
    period = statistics.median(intervals)
    agrees = max(intervals) - min(intervals) <= max(1.0, PERIOD_TOLERANCE * period)
    is_seen = len(intervals) >= 2 and num_requests >= 2 * period
    return tuple(intervals), period if agrees and is_seen else None
