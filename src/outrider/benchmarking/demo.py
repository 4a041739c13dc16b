"""The demo's measurement: plain and speculative decoding of the same prompts, in turn, on one machine.

Each prompt is decoded by both arms, which of them first alternates (A B B A), and only decode time is compared:
from the first token to the last. Prefill is reported beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider import metrics
from outrider.backends.base import Backend
from outrider.core import AcceptanceStats, Chunk, SamplingParams

PLAIN, SPECULATIVE, TORCH = "plain", "speculative", "torch"
TORCH_PROMPTS, TORCH_TOKENS = 2, 64
WARMUP_TOKENS = 8
OnChunk = Callable[[str, Chunk], None]


@dataclass
class Row:
    """One prompt decoded by one arm."""

    arm: str
    prompt_index: int
    num_prompt_tokens: int
    prefill_s: float
    decode_s: float
    token_ids: list[int]
    text: str
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    outside_repeats: AcceptanceStats = field(default_factory=AcceptanceStats)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo runs."""

    params: SamplingParams
    prompts: tuple[str, ...]
    num_speculative_tokens: int


def run_prompt(backend: Backend, arm: str, index: int, prompt: str, params: SamplingParams, on_chunk: OnChunk) -> Row:
    """Decode one prompt and time it; acceptance is counted also for cycles that start outside a repeat alone."""
    prompt_ids = backend.encode(prompt)
    row = Row(arm, index, len(prompt_ids), 0.0, 0.0, [], "")
    seen = metrics.NgramSeen()
    is_repeat = [seen.push(token_id) for token_id in prompt_ids][-1]
    for chunk, seconds in timed(backend.stream(prompt, params)):
        if not row.token_ids:
            row.prefill_s = seconds
        else:
            row.decode_s += seconds
            if chunk.num_draft_tokens > 0:
                count_cycle(row, chunk, is_repeat=is_repeat)
        for token_id in chunk.token_ids:
            is_repeat = seen.push(token_id)
        row.token_ids += chunk.token_ids
        row.text += chunk.text
        on_chunk(arm, chunk)
    return row


def timed(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, float]]:
    """Each chunk and the seconds the backend took for it; what the caller does in between is free."""
    while True:
        started = time.perf_counter()
        chunk = next(chunks, None)
        seconds = time.perf_counter() - started
        if chunk is None:
            return
        yield chunk, seconds


def count_cycle(row: Row, chunk: Chunk, *, is_repeat: bool) -> None:
    """Count a cycle; `is_repeat` says that its anchor ends a 4-gram already in prompt and output."""
    counts = {"draft_length": chunk.num_draft_tokens, "num_accepted_tokens": chunk.num_accepted_draft_tokens}
    row.acceptance.record_cycle(**counts)
    if not is_repeat:
        row.outside_repeats.record_cycle(**counts)


def run_demo(
    arms: dict[str, Backend],
    config: DemoConfig,
    *,
    on_chunk: OnChunk,
    on_prompt: Callable[[int, str, str], None],
) -> list[Row]:
    """Run all prompts on plain and speculative arms, the torch arm (if there) on the first few; returns raw rows."""
    for backend in arms.values():
        for _ in backend.stream(config.prompts[0], replace(config.params, max_tokens=WARMUP_TOKENS)):
            pass
    rows: list[Row] = []
    for index, prompt in enumerate(config.prompts):
        order = [PLAIN, SPECULATIVE] if index % 2 == 0 else [SPECULATIVE, PLAIN]
        for arm in order:
            on_prompt(index, arm, prompt)
            rows.append(run_prompt(arms[arm], arm, index, prompt, config.params, on_chunk))
        if TORCH in arms and index < TORCH_PROMPTS:
            rows.append(run_torch(arms, config, index, prompt, on_prompt))
    return rows


def run_torch(
    arms: dict[str, Backend], config: DemoConfig, index: int, prompt: str, on_prompt: Callable[[int, str, str], None]
) -> Row:
    """The torch arm on a prompt that ours has just decoded."""
    on_prompt(index, TORCH, prompt)
    params = replace(config.params, max_tokens=min(TORCH_TOKENS, config.params.max_tokens or TORCH_TOKENS))
    return run_prompt(arms[TORCH], TORCH, index, prompt, params, _ignore_chunk)


def _ignore_chunk(arm: str, chunk: Chunk) -> None:
    del arm, chunk


def summarize(rows: Sequence[Row], config: DemoConfig) -> dict[str, Any]:
    """The figures of one demo (design §5 and the glossary); a figure that cannot be formed is None."""
    plain = {row.prompt_index: row for row in rows if row.arm == PLAIN}
    drafted = {row.prompt_index: row for row in rows if row.arm == SPECULATIVE}
    torch_rows = [row for row in rows if row.arm == TORCH]
    indices = sorted(plain)
    plain_s, drafted_s = ([arm[i].decode_s for i in indices] for arm in (plain, drafted))
    acceptance = metrics.pool(row.acceptance for row in drafted.values())
    outside = metrics.pool(row.outside_repeats for row in drafted.values())
    same = all(plain[i].token_ids == drafted[i].token_ids for i in indices)
    return {
        "identical": same if config.params.is_greedy else None,
        "speedup": sum(_pace(plain[i]) for i in indices) / sum(_pace(drafted[i]) for i in indices),
        "mean_acceptance_length": metrics.mean_acceptance_length(acceptance),
        "acceptance_outside_repeats": metrics.mean_acceptance_length(outside),
        "cycles_outside_repeats": outside.num_cycles,
        "num_cycles": acceptance.num_cycles,
        "acceptance_by_position": metrics.acceptance_by_position(
            acceptance, num_speculative_tokens=config.num_speculative_tokens
        ),
        "num_speculative_tokens": config.num_speculative_tokens,
        "plain_tokens_per_s": metrics.tokens_per_s(num_tokens=_decoded(plain.values()), seconds=sum(plain_s)),
        "speculative_tokens_per_s": metrics.tokens_per_s(num_tokens=_decoded(drafted.values()), seconds=sum(drafted_s)),
        "kernel_gain": kernel_gain(plain, torch_rows),
        "plain_prefill_s": sum(row.prefill_s for row in plain.values()),
        "speculative_prefill_s": sum(row.prefill_s for row in drafted.values()),
        "num_output_tokens": sum(len(row.token_ids) for row in drafted.values()),
        "prompts": len(indices),
        "temperature": config.params.temperature,
        "top_k": config.params.top_k,
        "top_p": config.params.top_p,
    }


def _decoded(rows: Any) -> int:
    """Tokens that decode time paid for: all but the first of each answer."""
    return sum(len(row.token_ids) - 1 for row in rows)


def _pace(row: Row) -> float:
    """Seconds a decoded token; arms are compared a token, since sampled answers may differ in length."""
    return row.decode_s / max(1, len(row.token_ids) - 1)


def kernel_gain(plain: dict[int, Row], torch_rows: Sequence[Row]) -> float | None:
    """Plain decoding a token, torch products ÷ our kernels, over the prompts both ran."""
    if not torch_rows:
        return None
    return sum(_pace(row) for row in torch_rows) / sum(_pace(plain[row.prompt_index]) for row in torch_rows)


def row_as_dict(row: Row) -> dict[str, Any]:
    """For the record."""
    return asdict(row)
