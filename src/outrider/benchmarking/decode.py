"""`bench decode`: which cells to time, in which processes, ours before and after the peer, and the record of it all.

No torch: with a peer, each side runs in a process of its own, so that the GPU is free of the other's weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from outrider.benchmarking.record import make_record
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError, EngineFault

OURS, OURS_AGAIN, PEER = "outrider", "outrider, again", "vllm"
CellKey = tuple[int, int, int]
"""Draft length, batch, prompt tokens."""
KEY_NAMES = ("num_speculative_tokens", "batch", "prompt_tokens")
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """One combination to time, by either side."""

    num_speculative_tokens: int
    batch: int
    prompt_tokens: int
    acceptance_length: float | None

    @property
    def key(self) -> CellKey:
        """What tells cells of a run apart."""
        return self.num_speculative_tokens, self.batch, self.prompt_tokens


def plan_cells(
    draft_lengths: str, batches: str, acceptance_lengths: str | None, prompt_tokens: str = "512"
) -> list[CellPlan]:
    """All combinations of lists as in "0,7" and "1,4"; acceptance lengths are one for all, or one a draft length.

    ConfigError for what is no such list, names a draft length twice, or accepts more than is drafted.
    """
    lengths = number_list("--num-speculative-tokens", draft_lengths, low=0)
    sizes, prompts = number_list("--batch", batches, low=1), number_list("--prompt-tokens", prompt_tokens, low=1)
    accepted = _acceptances(acceptance_lengths, lengths)
    return [
        CellPlan(num_speculative_tokens=length, batch=size, prompt_tokens=prompt, acceptance_length=accepted[length])
        for length, size, prompt in product(lengths, sizes, prompts)
    ]


def number_list(option: str, text: str, *, low: int) -> list[int]:
    """Different whole numbers of at least `low`, as in "0,7"; ConfigError naming the option for anything else."""
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of whole numbers, as in 0,7.") from None
    if min(numbers) < low or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{option} {text!r}: give different numbers of at least {low}.")
    return numbers


def _acceptances(text: str | None, lengths: Sequence[int]) -> dict[int, float | None]:
    """Acceptance length by draft length; 1 where nothing is drafted."""
    drafted = [length for length in lengths if length > 0]
    if text is None:
        return {length: None if length else 1.0 for length in lengths}
    try:
        values = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--acceptance-length {text!r} is not a list of numbers, as in 5.23.") from None
    if len(values) == 1:
        values *= len(drafted)
    if len(values) != len(drafted):
        raise ConfigError(
            f"--acceptance-length has {len(values)} numbers, but {len(drafted)} draft lengths are above 0. Give one "
            "for all, or one for each."
        )
    accepted: dict[int, float | None] = {0: 1.0}
    for length, value in zip(drafted, values, strict=True):
        if not 1.0 <= value <= length + 1:
            raise ConfigError(f"--acceptance-length {value:g} is not from 1 to {length + 1}, all drafts and one token.")
        accepted[length] = value
    return accepted


def run_ours(arguments: Sequence[str], path: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """`outrider bench decode ARGUMENTS --record PATH` in a process of its own; its progress goes to our stderr.

    `keep` hears what it has found whenever that is more. ConfigError where it refused its arguments; EngineFault where
    it ended with nothing in its record. A process that died half-way leaves what it had, its exit code the fault.
    """
    command = [sys.executable, "-m", "outrider", "bench", "decode", *arguments, "--record", str(path)]
    num_known = 0

    def keep_more() -> None:
        nonlocal num_known
        found = read_result(path)
        num_found = len(found["cells"]) + len(found["failed"])
        if num_found > num_known:
            num_known = num_found
            keep(found)

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
                keep_more()
        finally:
            child.kill()  # one that has ended is not touched
            child.wait()
            keep_more()
    if child.returncode == ConfigError.exit_code:
        raise ConfigError("our own side of the comparison refused its settings; its message is above.")
    if num_known == 0:
        raise EngineFault(
            f"our own side of the comparison failed with exit code {child.returncode}; its message is above."
        )
    keep(read_result(path, unfinished=f"its process ended with exit code {child.returncode}"))


def read_result(path: Path, *, unfinished: str | None = None) -> dict[str, Any]:
    """What a pass of ours has found, from its record; nothing where there is none yet.

    `unfinished` is the fault of cells that the process did not come to.
    """
    if not path.exists() or not path.stat().st_size:
        return {"cells": [], "failed": []}
    record = json.loads(path.read_text())
    (arm,) = record["arms"]
    settings = {name: value for name, value in arm["settings"].items() if name != "weights"}
    missing = [{**each, "fault": each["fault"] or unfinished} for each in record.get("missing", ())]
    return {
        "target": arm["target"],
        **settings,
        "environment": record["environment"],
        "cells": [_less_arm(row) for row in record["rows"]],
        "failed": [_less_arm(each) for each in missing if each["fault"]],
    }


def _less_arm(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "arm"}


@dataclass
class DecodeTable:
    """What has been found of a plan so far: by one pass of ours, or by two around the peer's."""

    plan: Sequence[CellPlan]
    has_peer: bool = False
    ours: list[dict[str, Any]] = field(default_factory=list)
    """The passes, in order; each has its `cells`, and under `failed` keys of cells with the `fault` of each."""
    peer: dict[CellKey, dict[str, Any]] = field(default_factory=dict)
    peer_faults: dict[CellKey, str] = field(default_factory=dict)

    def missing(self) -> list[dict[str, Any]]:
        """Cells that an arm has not timed: the arm, the cell's key, and its `fault`; None is one not come to yet."""
        nothing: dict[str, Any] = {"cells": [], "failed": []}
        passes = [*self.ours, nothing, nothing]
        arms = {OURS: (_keys(passes[0]["cells"]), _faults(passes[0]))}
        if self.has_peer:
            arms[PEER] = (set(self.peer), self.peer_faults)
            arms[OURS_AGAIN] = (_keys(passes[1]["cells"]), _faults(passes[1]))
        return [
            {"arm": arm, **dict(zip(KEY_NAMES, cell.key, strict=True)), "fault": faults.get(cell.key)}
            for arm, (timed, faults) in arms.items()
            for cell in self.plan
            if cell.key not in timed
        ]

    def summary(self) -> list[dict[str, Any]]:
        """One object a cell (design §5): ours as the mean of all its passes, the peer's beside it where there is one.

        `ratio` is of speeds, and so is `prefill_ratio`: above 1 ours is faster. Prefill ends with the first token.
        """
        found: dict[CellKey, list[dict[str, Any]]] = {}
        for each in self.ours:
            for cell in each["cells"]:
                found.setdefault(cell_key(cell), []).append(cell)
        return [
            _summary_row(self.ours[0]["target"], found[cell.key], self.peer.get(cell.key, {}))
            for cell in self.plan
            if cell.key in found
        ]

    def record(self) -> dict[str, Any]:
        """The record of what is there, raw rows included. At least one pass of ours has begun."""
        work, names = self.ours[0]["work"], (OURS, OURS_AGAIN)
        lengths = ", ".join(map(str, dict.fromkeys(cell.prompt_tokens for cell in self.plan)))
        prompts = f"{lengths} random token ids, {work['max_tokens']} new tokens, seeded by run and index"
        arms = [_our_arm(name, each) for name, each in zip(names, self.ours, strict=False)]
        rows = [
            {"arm": arm["name"], **cell} for arm, each in zip(arms, self.ours, strict=True) for cell in each["cells"]
        ]
        if self.peer:
            settings = {"packages": next(iter(self.peer.values()))["packages"]}
            arms.insert(1, {"name": PEER, "backend": PEER, "target": work["target"], "settings": settings})
            rows += [{"arm": PEER, **cell} for cell in self.peer.values()]
        return make_record(
            "bench-decode",
            workload=Workload("random-tokens", (prompts,)),
            arms=arms,
            rows=rows,
            summary=self.summary(),
            machine=self.ours[0]["environment"],
        )


def _keys(cells: Sequence[dict[str, Any]]) -> set[CellKey]:
    return {cell_key(cell) for cell in cells}


def _faults(result: dict[str, Any]) -> dict[CellKey, str]:
    return {cell_key(each): each["fault"] for each in result["failed"]}


def _summary_row(target: str, cells: Sequence[dict[str, Any]], theirs: dict[str, Any]) -> dict[str, Any]:
    ours_per_s, peer_per_s = _mean(cells, "tokens_per_s"), theirs.get("tokens_per_s")
    ours_prefill_s, peer_prefill_s = _mean(cells, "prefill_s"), theirs.get("prefill_s")
    shares = [cell["floor_share"] for cell in cells]
    return {
        "target": target,
        **{name: cells[0][name] for name in KEY_NAMES},
        "acceptance_length": cells[0]["acceptance_length"] or cells[0]["measured_acceptance_length"],
        "tokens_per_s": ours_per_s,
        "peer_tokens_per_s": peer_per_s,
        "ratio": ours_per_s / peer_per_s if peer_per_s else None,
        "floor_share": None if None in shares else sum(shares) / len(shares),
        "bit_exact": cells[0]["bit_exact"],
        "ms_per_cycle": _mean(cells, "ms_per_cycle"),
        "prefill_s": ours_prefill_s,
        "peer_prefill_s": peer_prefill_s,
        "prefill_ratio": peer_prefill_s / ours_prefill_s if peer_prefill_s else None,
    }


def cell_key(cell: dict[str, Any]) -> CellKey:
    """The key of either side's figures."""
    length, batch, prompt_tokens = (cell[name] for name in KEY_NAMES)
    return length, batch, prompt_tokens


def _mean(cells: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(cell[name]) for cell in cells) / len(cells)


def _our_arm(name: str, result: dict[str, Any]) -> dict[str, Any]:
    settings = {key: result[key] for key in ("kernels", "row_invariant", "weights_s", "read_tb_per_s", "work")}
    return {
        "name": name,
        "backend": "local",
        "target": result["target"],
        "drafter": f"{result['target']}-dflash",
        "settings": {**settings, "weights": "dummy", "is_synthetic": result["is_synthetic"]},
    }
