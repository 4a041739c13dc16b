"""What a drafter is worth on held-out prompts: in the real cycle, and offline on the very text that cycle wrote.

The real cycle is the engine's. Offline, the target runs over the finished text in large passes and the drafter walks
from anchor to anchor, as a trainer can do without an engine (T-073); the two must tell the same story.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.backends.local import LLM
from outrider.core import AcceptanceStats, Generation, SamplingParams
from outrider.engine.batch import Anchors
from outrider.engine.proposer import DFlashProposer
from outrider.errors import ConfigError
from outrider.models.attention import LayerCaches, Rows, allocate_caches
from outrider.models.dflash import DFlashDrafter

PIECE_TOKENS = 64  # rows of a pass over finished text
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class HeldOutPrompt:
    """A prompt that no drafter was trained on."""

    domain: str
    index: int
    """Of the prompt within its domain: what pairs the answers of several drafters."""
    text: str
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """How prompts are answered."""

    temperatures: tuple[float, ...]
    max_tokens: int
    num_rounds: int = 1
    """Answers to each prompt at a temperature above 0; greedy ones are given once."""
    seed: int | None = None
    """With it sampled text is the same whatever the drafter (match sampling), and a round more is a seed more."""
    num_speculative_tokens: int | None = None
    with_offline: bool = True
    """Also walk offline over greedy answers."""


def measure_drafter(
    llm: LLM, drafter: str, prompts: Sequence[HeldOutPrompt], options: MeasureOptions, *, progress: Progress
) -> list[dict[str, Any]]:
    """A row an answer: counts of its cycles and, of greedy ones, of the offline walk over it (None where not walked).

    ConfigError for prompts that do not fit the context, before anything is answered.
    """
    _check_lengths(llm, prompts, options)
    rows: list[dict[str, Any]] = []
    for temperature in options.temperatures:
        for round_index in range(1 if temperature == 0 else options.num_rounds):
            for domain, asked in _by_domain(prompts):
                progress(f"{drafter}: {domain} at temperature {temperature:g}")
                params = _params(asked[0], temperature, round_index, options)
                answers = llm.generate([each.text for each in asked], params)
                about = {"drafter": drafter, "temperature": temperature, "round_index": round_index}
                found = [{**about, **_row(each, answer)} for each, answer in zip(asked, answers, strict=True)]
                if temperature == 0 and options.with_offline:
                    _add_offline(llm, found, asked, answers, options)
                rows += found
    return rows


def _check_lengths(llm: LLM, prompts: Sequence[HeldOutPrompt], options: MeasureOptions) -> None:
    context_length = llm.engine.config.context_length
    for each in prompts:
        needed = len(llm.encode(each.text)) + options.max_tokens
        if needed > context_length:
            raise ConfigError(
                f"prompt {each.index + 1} of {each.domain} and its answer take {needed} tokens, the context holds "
                f"{context_length}. Raise --context-length, or lower --max-tokens."
            )


def _by_domain(prompts: Sequence[HeldOutPrompt]) -> Iterator[tuple[str, list[HeldOutPrompt]]]:
    for domain in dict.fromkeys(each.domain for each in prompts):
        yield domain, [each for each in prompts if each.domain == domain]


def _params(first: HeldOutPrompt, temperature: float, round_index: int, options: MeasureOptions) -> SamplingParams:
    """Prompts of a domain share a template, and so what ends an answer."""
    seed = None if options.seed is None or temperature == 0 else options.seed + round_index
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=temperature,
        seed=seed,
        stop_strings=first.stop_strings,
        stop_token_ids=first.stop_token_ids,
        num_speculative_tokens=options.num_speculative_tokens,
    )


def _row(prompt: HeldOutPrompt, answer: Generation) -> dict[str, Any]:
    counts, ids = answer.acceptance, ",".join(map(str, answer.token_ids))
    return {
        "domain": prompt.domain,
        "prompt_index": prompt.index,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_output_tokens": len(answer.token_ids),
        "output_sha256": hashlib.sha256(ids.encode()).hexdigest(),
        "num_cycles": counts.num_cycles,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "offline_num_cycles": None,
        "offline_num_accepted_tokens": None,
    }


def _add_offline(
    llm: LLM,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[HeldOutPrompt],
    answers: Sequence[Generation],
    options: MeasureOptions,
) -> None:
    drafter = drafter_of(llm)
    walker = OfflineWalk(drafter, context_length=llm.engine.config.context_length)
    draft_length = options.num_speculative_tokens or llm.num_speculative_tokens
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        counts = walker.walk(llm.encode(prompt.text), answer.token_ids, draft_length=draft_length)
        row["offline_num_cycles"], row["offline_num_accepted_tokens"] = counts.num_cycles, counts.num_accepted_tokens


def drafter_of(llm: LLM) -> DFlashDrafter:
    """The block drafter of an engine that has one."""
    proposer = llm.engine.proposer
    inner = getattr(proposer, "inner", proposer)
    if not isinstance(inner, DFlashProposer):
        raise ConfigError(
            f"{llm.drafter_name or 'decoding without a drafter'} cannot be walked offline; give a drafter."
        )
    return inner.drafter


class OfflineWalk:
    """Greedy cycles over text that is there already; caches for one text at a time."""

    def __init__(self, drafter: DFlashDrafter, *, context_length: int) -> None:
        self.drafter, self.target = drafter, drafter.target
        self._caches = self._allocate(self.target.config.layers, context_length, max_rows=PIECE_TOKENS)
        # Every position stays: an anchor may be anywhere once the whole text is written.
        context = self._allocate(drafter.config.layers, context_length, max_rows=context_length)
        self.proposer = DFlashProposer(drafter, context)

    def _allocate(self, layers: Any, context_length: int, *, max_rows: int) -> LayerCaches:
        target = self.target
        return allocate_caches(
            layers,
            num_seats=1,
            context_length=context_length + PIECE_TOKENS,
            max_rows=max_rows + PIECE_TOKENS,
            dtype=target.dtype,
            device=target.device,
        )

    @torch.no_grad()
    def walk(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], *, draft_length: int) -> AcceptanceStats:
        """Jump from anchor to anchor, the answer's first token being the first, and count whole blocks only."""
        ids = torch.tensor([*prompt_ids, *answer_ids], device=self.target.device)
        self._read(ids)
        counts, anchor, text = AcceptanceStats(), len(prompt_ids), ids.tolist()
        while anchor + draft_length + 1 < len(text):  # where serving drafts less, to end in time, nothing is counted
            drafts = self._drafts(ids, anchor, draft_length)
            later = text[anchor + 1 : anchor + 1 + draft_length]
            num_accepted = next((k for k in range(draft_length) if drafts[k] != later[k]), draft_length)
            counts.record_cycle(draft_length=draft_length, num_accepted_tokens=num_accepted)
            anchor += num_accepted + 1
        return counts

    def _read(self, ids: Tensor) -> None:
        """Run the target over the text in passes of one size, and give the drafter the taps of all of it."""
        for start in range(0, len(ids), PIECE_TOKENS):
            piece = ids[start : start + PIECE_TOKENS]
            num_spare = PIECE_TOKENS - len(piece)
            seats = functional.pad(torch.zeros_like(piece), (0, num_spare), value=-1)
            positions = functional.pad(torch.arange(len(piece), device=ids.device) + start, (0, num_spare))
            rows = Rows(functional.pad(piece, (0, num_spare)), seats, positions)
            output = self.target.forward(rows, self._caches, tap_layers=self.proposer.tap_layers)
            assert output.taps is not None
            self.proposer.commit(output.taps, seats, positions)

    def _drafts(self, ids: Tensor, anchor: int, draft_length: int) -> list[int]:
        one = torch.zeros(1, dtype=torch.int64, device=ids.device)
        anchors = Anchors(
            seats=one,
            anchor_token_ids=ids[anchor : anchor + 1],
            anchor_positions=one + anchor,
            draft_lengths=one + draft_length,
        )
        drafts: list[int] = self.proposer.propose_on_device(anchors, draft_length).token_ids[0].tolist()
        return drafts
