"""A ladder of checks for a server that was just started: from "it answers" to "it finds a needle in a long prompt".

Every rung passes, fails or is skipped, with its reason and with what to do. A rung that needs a lower one is skipped
where that failed; the others are tried all the same, so that one run shows all that is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from outrider.benchmarking.client import ServerClient
from outrider.benchmarking.rungs import CHECKS, RUNGS, Climb, FailedError, LadderConfig, SkippedError
from outrider.errors import EngineFault

Status = Literal["pass", "fail", "skip"]
_NEEDS = {
    "basic": "reachable",
    "streaming": "reachable",
    "tools": "basic",
    "streaming tools": "tools",
    "quality": "streaming",
    "acceptance": "quality",
    "greedy": "reachable",
    "needle": "streaming",
}


@dataclass(frozen=True)
class Rung:
    """What came of one check."""

    name: str
    status: Status
    reason: str
    advice: str | None = None
    """What to do, for one that failed."""
    seconds: float = 0.0
    flips: dict[str, Any] | None = None
    """Of 'greedy': how many positions were compared, ties, faults, and their rate."""


def climb(
    client: ServerClient,
    config: LadderConfig | None = None,
    *,
    plain_client: ServerClient | None = None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Rung], object] = lambda _: None,
) -> list[Rung]:
    """Try all rungs in order; `plain_client` is of a server without drafter, where drafting cannot be left out.

    `keep` gets each rung at once, for a climb that may be stopped.
    """
    shared = Climb(client, config or LadderConfig(), plain_client)
    rungs = list[Rung]()
    for name in RUNGS:
        progress(name)
        missing = _missing(name, {rung.name for rung in rungs if rung.status == "pass"}, shared.config.skipped)
        rungs.append(Rung(name, "skip", missing) if missing else _try(name, shared))
        keep(rungs[-1])
    return rungs


def _missing(name: str, passed: Collection[str], skipped: Collection[str]) -> str | None:
    """Why a rung is not tried; a rung that was skipped on request holds nothing up."""
    if name in skipped:
        return "as asked for"
    needed = _NEEDS.get(name)
    while needed is not None and needed in skipped:
        needed = _NEEDS.get(needed)
    return f"it needs '{needed}', which did not pass" if needed is not None and needed not in passed else None


def _try(name: str, shared: Climb) -> Rung:
    began_s = time.monotonic()
    try:
        status, reason, advice = "pass", CHECKS[name](shared), None
    except FailedError as error:
        status, reason, advice = "fail", error.reason, error.advice
    except SkippedError as error:
        status, reason, advice = "skip", str(error), None
    except EngineFault as error:
        status, reason, advice = "fail", str(error), "Start the server, or give its address."
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"the server's answer has another shape than OpenAI's ({type(error).__name__}: {error})"
        status, advice = "fail", "See what it answers to this request, or update it."
    flips = shared.flips if name == "greedy" else None
    return Rung(name, status, reason, advice, time.monotonic() - began_s, flips)  # type: ignore[arg-type]
