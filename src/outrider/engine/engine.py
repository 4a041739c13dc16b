"""The engine: requests in, chunks out. Seats, prefill and cycles; text is cut where a request ends."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.core import Chunk, SamplingParams
from outrider.engine.adjustments import make_adjustments
from outrider.engine.batch import CycleBatch
from outrider.engine.cycle import CycleResult, accept, run_cycle
from outrider.engine.grammar import make_constraint
from outrider.engine.proposer import Proposer
from outrider.engine.rejection import ACCEPTANCE_RULES, point_mass_block
from outrider.engine.state import RequestState
from outrider.errors import ConfigError, RequestError
from outrider.models.attention import GivenRows, LayerCaches, Rows
from outrider.models.gemma import GemmaTarget
from outrider.models.multimodal import PromptRows, refuse_placeholders
from outrider.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs; every default is here."""

    context_length: int = 2048
    """Most tokens of prompt and answer together."""
    max_seats: int = 4
    """Requests decoded at the same time."""
    num_speculative_tokens: int | None = None
    """Draft length; None takes the drafter's own, 0 decodes plainly."""
    seed: int = 0
    """Noise of sampled requests that bring no seed of their own derives from it."""
    prefill_rows: int = 64
    """Prompt tokens a pass."""
    rows_per_pass: int | None = None
    """Pad every pass to this many rows, so that a row is always computed in the same shape (CUDA, design §4.2)."""
    acceptance: str = "rejection"
    """Rule for drafts of sampled requests without a seed: "rejection", or "block" (block verification)."""

    def __post_init__(self) -> None:
        """Refuse sizes that no request fits in."""
        lows = {"context_length": 2, "max_seats": 1, "prefill_rows": 1, "num_speculative_tokens": 0, "rows_per_pass": 1}
        for name, low in lows.items():
            value, may_be_none = getattr(self, name), name in ("num_speculative_tokens", "rows_per_pass")
            if (value is None and may_be_none) or (type(value) is int and value >= low):
                continue
            none = ", or None" if may_be_none else ""
            raise ConfigError(f"{name}={value!r} is not a whole number of at least {low}{none}.")
        if type(self.seed) is not int:
            raise ConfigError(f"seed={self.seed!r} is not a whole number.")
        if self.acceptance not in tuple(ACCEPTANCE_RULES):
            raise ConfigError(f"acceptance={self.acceptance!r} is not known. Use one of {', '.join(ACCEPTANCE_RULES)}.")

    @property
    def max_rows(self) -> int:
        """Most rows one request has in one pass."""
        return max(self.prefill_rows, self.rows_per_pass or 0)


@dataclass
class Engine:
    """One target, perhaps a proposer, and the requests that run on them."""

    target: GemmaTarget
    caches: LayerCaches
    proposer: Proposer | None
    tokenizer: Tokenizer | None
    config: EngineConfig
    end_token_ids: frozenset[int]
    waiting: deque[RequestState] = field(default_factory=deque)
    running: list[RequestState] = field(default_factory=list)
    num_added: int = 0

    def __post_init__(self) -> None:
        """Check what only engine and proposer together can get wrong."""
        limit = self.proposer.max_draft_length if self.proposer else 0
        asked = self.config.num_speculative_tokens
        if asked is not None and asked > limit and self.proposer is not None:
            raise ConfigError(
                f"num_speculative_tokens={asked}, but drafter {self.proposer.name} drafts at most {limit}. Lower it."
            )
        if self.proposer is not None and limit + 1 > self.config.max_rows:
            raise ConfigError(
                f"prefill_rows={self.config.prefill_rows}, but a block of {self.proposer.name} has {limit + 1} rows, "
                "and windows keep room for prefill_rows only. Raise it."
            )
        if self.config.rows_per_pass is not None and self.config.max_seats != 1:
            raise ConfigError("rows_per_pass needs max_seats=1: constant shapes are exact for one request at a time.")
        if self.config.rows_per_pass is not None and limit + 1 > self.config.rows_per_pass:
            raise ConfigError(f"rows_per_pass={self.config.rows_per_pass} is less than a block of {limit + 1} rows.")

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestState:
        """Queue a request; RequestError if it can never run."""
        return self._queue(tuple(prompt_token_ids), params, None)

    def add_rows(self, prompt: PromptRows, params: SamplingParams) -> RequestState:
        """Queue a request whose prompt brings some embeddings [R, N] itself; RequestError if it can never run.

        What is built on top of targets that read more than text comes in here; `LLM` does not offer it.
        """
        size, found = self.target.config.hidden_size, prompt.given.embeddings.shape[1:]
        if found != (size,):
            raise RequestError(f"an embedding of the prompt has shape {tuple(found)}, but the target takes {(size,)}.")
        device = self.target.device
        given = GivenRows(
            prompt.given.is_given.to(device), prompt.given.embeddings.to(device=device, dtype=self.target.dtype)
        )
        return self._queue(tuple(prompt.token_ids.tolist()), params, given)

    def _queue(self, prompt: tuple[int, ...], params: SamplingParams, given: GivenRows | None) -> RequestState:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is one SamplingParams for all prompts, not {type(params).__name__}.")
        self._check_prompt(prompt, [False] * len(prompt) if given is None else given.is_given.tolist())
        room = self.config.context_length - len(prompt)
        noise_seed = params.seed if params.seed is not None else self._derived_seed()
        stop_token_ids = self._stop_token_ids(params)
        request = RequestState(
            index=self.num_added,
            prompt_token_ids=prompt,
            given=given,
            params=params,
            noise_seed=noise_seed,
            draft_length=self._draft_length(params),
            num_tokens_left=room if params.max_tokens is None else min(room, params.max_tokens),
            stop_token_ids=stop_token_ids,
            decoder=IncrementalDecoder(self.tokenizer, shown_ids=params.shown_token_ids) if self.tokenizer else None,
            adjustments=make_adjustments(
                params,
                prompt,
                end_token_ids=stop_token_ids,
                vocab_size=self.target.config.vocab_size,
                tokenizer=self.tokenizer,
                device=self.target.device,
            ),
            constraint=make_constraint(params, self.tokenizer, self.target.config.vocab_size, stop_token_ids),
        )
        self.num_added += 1
        self.waiting.append(request)
        return request

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        asked = frozenset(params.stop_token_ids)
        return asked if params.ignore_eos else asked | self.end_token_ids

    def _check_prompt(self, prompt: tuple[int, ...], is_given: list[bool]) -> None:
        if not prompt:
            raise RequestError("the prompt is empty. Give at least one token of text.")
        if len(prompt) >= self.config.context_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.config.context_length} with at "
                "least one for the answer. Shorten it, or raise context_length."
            )
        vocab_size = self.target.config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise RequestError(f"the prompt has a token id outside 0..{vocab_size - 1}.")
        refuse_placeholders(prompt, is_given, self.target.config.placeholders)

    def _derived_seed(self) -> int:
        return random.Random(f"{self.config.seed}/{self.num_added}").getrandbits(63)

    @property
    def default_draft_length(self) -> int:
        """Drafts a cycle for a request that asks for none: the engine's setting, else the drafter's own."""
        if self.proposer is None:
            return 0
        asked = self.config.num_speculative_tokens
        return self.proposer.default_draft_length if asked is None else asked

    def _draft_length(self, params: SamplingParams) -> int:
        asked = params.num_speculative_tokens
        if self.proposer is None or asked is None:
            return self.default_draft_length
        if asked > self.proposer.max_draft_length:
            raise RequestError(
                f"num_speculative_tokens={asked}, but drafter {self.proposer.name} drafts at most "
                f"{self.proposer.max_draft_length}. Lower it."
            )
        return asked

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Prefill one waiting request if a seat is free, else advance all running ones by a cycle.

        A request whose logits are not finite ends with finish reason "error"; the others go on.
        """
        if not self.has_work:
            return []
        has_seat = len(self.running) < self.config.max_seats
        with self.target.kernels.own_threads():
            chunks = [self._prefill(self.waiting.popleft())] if self.waiting and has_seat else self._decode()
        self.running = [request for request in self.running if request.finish_reason is None]
        return chunks

    def abort(self, request: RequestState) -> None:
        """Drop a request wherever it is; its seat is free at once."""
        request.finish_reason = "abort"
        self.running = [other for other in self.running if other is not request]
        self.waiting = deque(other for other in self.waiting if other is not request)

    def _prefill(self, request: RequestState) -> Chunk:
        taken = {other.seat for other in self.running}
        request.seat = next(seat for seat in range(self.config.max_seats) if seat not in taken)
        hidden, last_row = self._run_prompt(request)
        batch = CycleBatch.at_prompt_end(request, self.target.device)
        nothing = point_mass_block(batch.seats.new_empty(1, 0), hidden.dtype)
        judged = accept(batch, nothing, self.target, hidden, batch.seats.new_full((1, 1), last_row))
        if not bool(judged.is_finite):
            return request.fail()
        self.running.append(request)
        token_ids = judged.verdict.target_token_ids.tolist()
        return request.append(token_ids, num_accepted_tokens=0, logprobs=judged.logprobs[0])

    def _run_prompt(self, request: RequestState) -> tuple[Tensor, int]:
        """Fill the caches with the prompt, chunk borders at fixed positions.

        Returns hidden states [R, N] for the head and which of them is the prompt's last row.
        """
        step = self.config.rows_per_pass or self.config.prefill_rows
        tap_layers = self.proposer.tap_layers if self.proposer else ()
        prompt = torch.tensor(request.prompt_token_ids, device=self.target.device)
        for start in range(0, len(prompt), step):
            rows = self._prompt_rows(prompt[start : start + step], start, request)
            output = self.target.forward(rows, self.caches, tap_layers=tap_layers)
            if self.proposer is not None and output.taps is not None:
                self.proposer.commit(output.taps, rows.seats, rows.positions)
        last_row = (len(prompt) - 1) % step
        if self.config.rows_per_pass:  # with constant shapes the head, too, always sees the same number of rows
            return output.hidden, last_row
        return output.hidden[last_row : last_row + 1], 0

    def _prompt_rows(self, token_ids: Tensor, start: int, request: RequestState) -> Rows:
        count, num_spare = len(token_ids), max(0, (self.config.rows_per_pass or 0) - len(token_ids))
        positions = torch.arange(start, start + count, device=token_ids.device)
        spare = positions.new_zeros(num_spare)
        seats = torch.cat([torch.full_like(positions, request.seat), spare - 1])
        given = request.given.cut(start, len(seats)) if request.given is not None else None
        return Rows(torch.cat([token_ids, spare]), seats, torch.cat([positions, spare]), given)

    def _decode(self) -> list[Chunk]:
        batch = CycleBatch.of(self.running, self.target.device)
        result = run_cycle(
            batch,
            target=self.target,
            caches=self.caches,
            proposer=self.proposer,
            rows_per_pass=self.config.rows_per_pass,
            acceptance=self.config.acceptance,
        )
        return self._emit(result.batch, result)

    def _emit(self, batch: CycleBatch, result: CycleResult) -> list[Chunk]:
        """The one read-back of a cycle: tokens to requests, in order."""
        verdict, is_finite, logprobs = result.judged
        num_accepted = verdict.num_accepted_tokens.tolist()
        targets, drafts, finite = verdict.target_token_ids.tolist(), result.draft.token_ids.tolist(), is_finite.tolist()
        chunks = []
        for i, request in enumerate(self.running):
            if not finite[i]:
                chunks.append(request.fail())
                continue
            accepted, drafted = num_accepted[i], batch.host_lengths[i]
            if drafted > 0:
                request.acceptance.record_cycle(draft_length=drafted, num_accepted_tokens=accepted)
            tokens = [*drafts[i][:accepted], targets[i]]
            chunk = request.append(tokens, num_accepted_tokens=accepted, num_draft_tokens=drafted, logprobs=logprobs[i])
            chunks.append(chunk)
        return chunks
