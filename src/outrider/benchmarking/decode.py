"""`bench decode`: which cells to time, in which processes, ours before and after the peer, and the record of it all.

No torch: with a peer, each side runs in a process of its own, so that the GPU is free of the other's weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from outrider.benchmarking.record import make_record
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError, EngineFault

OURS, OURS_AGAIN, PEER = "outrider", "outrider, again", "vllm"
CellKey = tuple[int, int, int]
"""Draft length, batch, prompt tokens."""


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


def run_ours(arguments: Sequence[str]) -> dict[str, Any]:
    """`outrider bench decode ARGUMENTS --json` in a process of its own; its progress goes to our stderr."""
    command = [sys.executable, "-m", "outrider", "bench", "decode", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        error = ConfigError if done.returncode == ConfigError.exit_code else EngineFault
        raise error(f"our own side of the comparison failed with exit code {done.returncode}; its message is above.")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def summarize(
    ours: Sequence[dict[str, Any]], peer: dict[CellKey, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """One object a cell (design §5): ours as the mean of all its passes, the peer's beside it where there is one.

    `ratio` is of speeds, and so is `prefill_ratio`: above 1 ours is faster. Prefill ends with the first token.
    """
    rows = []
    for cells in zip(*(each["cells"] for each in ours), strict=True):
        key = cell_key(cells[0])
        theirs = (peer or {}).get(key, {})
        ours_per_s, peer_per_s = _mean(cells, "tokens_per_s"), theirs.get("tokens_per_s")
        ours_prefill_s, peer_prefill_s = _mean(cells, "prefill_s"), theirs.get("prefill_s")
        shares = [cell["floor_share"] for cell in cells]
        rows.append(
            {
                "target": ours[0]["target"],
                "num_speculative_tokens": key[0],
                "batch": key[1],
                "prompt_tokens": key[2],
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
        )
    return rows


def cell_key(cell: dict[str, Any]) -> CellKey:
    """The key of either side's figures."""
    return cell["num_speculative_tokens"], cell["batch"], cell["prompt_tokens"]


def _mean(cells: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(cell[name]) for cell in cells) / len(cells)


def decode_record(ours: Sequence[dict[str, Any]], peer: dict[CellKey, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The record of one or two passes of ours and perhaps the peer's, raw rows included."""
    work, names = ours[0]["work"], (OURS, OURS_AGAIN)
    lengths = ", ".join(map(str, dict.fromkeys(cell["prompt_tokens"] for cell in ours[0]["cells"])))
    prompts = f"{lengths} random token ids, {work['max_tokens']} new tokens, seeded by run and index"
    arms = [_our_arm(name, each) for name, each in zip(names, ours, strict=False)]
    rows = [{"arm": arm["name"], **cell} for arm, each in zip(arms, ours, strict=True) for cell in each["cells"]]
    if peer:
        settings = {"packages": next(iter(peer.values()))["packages"]}
        arms.insert(1, {"name": PEER, "backend": PEER, "target": work["target"], "settings": settings})
        rows += [{"arm": PEER, **cell} for cell in peer.values()]
    return make_record(
        "bench-decode",
        workload=Workload("random-tokens", (prompts,)),
        arms=arms,
        rows=rows,
        summary=summarize(ours, peer),
        machine=ours[0]["environment"],
    )


def _our_arm(name: str, result: dict[str, Any]) -> dict[str, Any]:
    settings = {key: result[key] for key in ("kernels", "row_invariant", "weights_s", "read_tb_per_s", "work")}
    return {
        "name": name,
        "backend": "local",
        "target": result["target"],
        "drafter": f"{result['target']}-dflash",
        "settings": {**settings, "weights": "dummy", "is_synthetic": result["is_synthetic"]},
    }
