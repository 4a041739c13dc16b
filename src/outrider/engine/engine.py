"""The engine: requests in, chunks out. A step is a cycle of all that run and a piece of one prompt.

On CUDA a cycle of requests that ask for temperature and filters at most is launched in one step and its tokens are
taken in the next: text is spelled, prefixes are published and callers are served while the device works.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor

from outrider.core import Chunk, SamplingParams
from outrider.engine.adjustments import make_adjustments
from outrider.engine.batch import CycleBatch
from outrider.engine.cache_space import CacheSpace, SeatSpace
from outrider.engine.cycle import Decided, run_cycle
from outrider.engine.draft_length import plan_draft_lengths
from outrider.engine.grammar import make_constraint
from outrider.engine.graphs import DeviceCycle
from outrider.engine.prefill import first_token, num_chunk_rows, prefill_chunk
from outrider.engine.proposer import Proposer, is_replayable
from outrider.engine.rejection import ACCEPTANCE_RULES
from outrider.engine.scheduler import Scheduler
from outrider.engine.state import NOT_FINITE, RequestState, Taken
from outrider.engine.synthetic import check_synthetic, kept_counts, synthetic_rates
from outrider.errors import ConfigError, DrafterFault, RequestError
from outrider.models.attention import GivenRows, LayerCaches
from outrider.models.gemma import GemmaTarget
from outrider.models.multimodal import PromptRows, refuse_placeholders
from outrider.tokenizer import IncrementalDecoder, Tokenizer

DEFAULT_ROWS = 64  # of prompts a step
MAX_BLOCK_ROWS = 64  # of one request in a cycle: what windows keep room for beside a prompt's rows

logger = logging.getLogger(__name__)


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
    prefill_rows: int | None = None
    """Prompt tokens a pass, and a step: those that run wait no longer than that for a prompt. None is DEFAULT_ROWS, or
    on CUDA with row-invariant kernels more (`backends/local.py`)."""
    row_budget: int = 64
    """Rows of a cycle, anchors included: with many requests running, each has fewer drafts verified, down to none."""
    max_waiting: int = 256
    """Requests that may wait for a seat when the engine serves; more are told to come back later."""
    cache_bytes: int | None = None
    """Most bytes of keys and values, the drafter's and cached prefixes included; None is enough for all seats."""
    page_size: int | None = None
    """Positions a page of the caches; prefixes are found in whole pages. None is PAGE_SIZE, or on CUDA more."""
    rows_per_pass: int | None = None
    """Pad every pass to this many rows, so that a row is always computed in the same shape (CUDA, design §4.2)."""
    acceptance: str = "rejection"
    """Rule for drafts of sampled requests without a seed: "rejection", or "block" (block verification)."""
    cuda_graphs: bool = True
    """On CUDA, replay captured cycles; without, each of their kernels is launched anew. Penalties, bias, bans,
    grammars, log-probabilities and `acceptance="block"` run without in any case, and whatever shares their batch."""
    synthetic_acceptance_length: float | None = None
    """For timing: cycles are worth so many tokens on average, 1 to draft length + 1. The text is not the target's."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """For timing: the share of cycles that keep draft i, for each of a draft's tokens; it never rises."""

    def __post_init__(self) -> None:
        """Refuse sizes that no request fits in."""
        lows = {"context_length": 2, "max_seats": 1, "row_budget": 1, "max_waiting": 0}
        sizes = ("prefill_rows", "page_size", "rows_per_pass", "cache_bytes")
        optional = {"num_speculative_tokens": 0, **dict.fromkeys(sizes, 1)}
        for name, low in (lows | optional).items():
            value, may_be_none = getattr(self, name), name in optional
            if (value is None and may_be_none) or (type(value) is int and value >= low):
                continue
            none = ", or None" if may_be_none else ""
            raise ConfigError(f"{name}={value!r} is not a whole number of at least {low}{none}.")
        if type(self.seed) is not int:
            raise ConfigError(f"seed={self.seed!r} is not a whole number.")
        if self.acceptance not in tuple(ACCEPTANCE_RULES):
            raise ConfigError(f"acceptance={self.acceptance!r} is not known. Use one of {', '.join(ACCEPTANCE_RULES)}.")
        if type(self.cuda_graphs) is not bool:
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r} is neither True nor False.")
        check_synthetic(self.synthetic_acceptance_length, self.synthetic_acceptance_rates)

    @property
    def rows_per_step(self) -> int:
        """Most rows of prompts a step."""
        return DEFAULT_ROWS if self.prefill_rows is None else self.prefill_rows

    @property
    def max_rows(self) -> int:
        """Most rows one request has in one pass."""
        return max(self.rows_per_step, self.rows_per_pass or 0)

    @property
    def max_block_rows(self) -> int:
        """Most rows one request has in a cycle, anchor included; only one at a time has a prompt's."""
        return min(self.max_rows, MAX_BLOCK_ROWS)


@dataclass
class Engine:
    """One target, perhaps a proposer, and the requests that run on them."""

    target: GemmaTarget
    caches: LayerCaches
    proposer: Proposer | None
    tokenizer: Tokenizer | None
    config: EngineConfig
    end_token_ids: frozenset[int]
    space: InitVar[CacheSpace | None] = None
    """Room in the caches; None where every seat owns its own."""
    scheduler: Scheduler = field(init=False)
    num_added: int = 0
    drafter_fault: str | None = None
    """Why drafting was given up; the engine decodes plainly from then on."""
    device_cycle: DeviceCycle | None = field(init=False, default=None)
    """Runs cycles on CUDA, of those requests that it takes."""
    _under_way: list[RequestState] = field(init=False, default_factory=list)  # of the device's cycle
    _synthetic_rates: tuple[float, ...] | None = field(init=False, default=None)

    def __post_init__(self, space: CacheSpace | None) -> None:
        """Check what only engine and proposer together can get wrong."""
        seats, context = self.config.max_seats, self.config.context_length
        own_space = SeatSpace(num_seats=seats, context_length=context)
        self.scheduler = Scheduler(seats, own_space if space is None else space)
        limit = self.proposer.max_draft_length if self.proposer else 0
        asked = self.config.num_speculative_tokens
        if asked is not None and asked > limit and self.proposer is not None:
            raise ConfigError(
                f"num_speculative_tokens={asked}, but drafter {self.proposer.name} drafts at most {limit}. Lower it."
            )
        if self.proposer is not None and limit + 1 > self.config.max_block_rows:
            raise ConfigError(
                f"prefill_rows={self.config.rows_per_step}, but a block of {self.proposer.name} has {limit + 1} rows, "
                f"and windows keep room for {self.config.max_block_rows} only. Raise it."
            )
        if self.config.rows_per_pass is not None and self.config.max_seats != 1:
            raise ConfigError("rows_per_pass needs max_seats=1: constant shapes are exact for one request at a time.")
        if self.config.rows_per_pass is not None and limit + 1 > self.config.rows_per_pass:
            raise ConfigError(f"rows_per_pass={self.config.rows_per_pass} is less than a block of {limit + 1} rows.")
        if self.proposer is not None:
            self._synthetic_rates = synthetic_rates(
                self.config.synthetic_acceptance_length,
                self.config.synthetic_acceptance_rates,
                draft_length=self.default_draft_length,
            )
        if self.config.cuda_graphs and self.target.device.type == "cuda":
            self.use_device_cycle()

    def use_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer, or with none, from the next cycle on."""
        self.proposer = proposer
        if self.device_cycle is not None:
            self.use_device_cycle()

    def use_device_cycle(self) -> None:
        """Run cycles as functions of tensors, if the proposer's drafts are one."""
        self.device_cycle = None
        if not is_replayable(self.proposer):
            return
        self.device_cycle = DeviceCycle(
            self.target,
            self.caches,
            self.proposer,
            max_seats=self.config.max_seats,
            context_length=self.config.context_length,
            rows_per_pass=self.config.rows_per_pass,
            default_draft_length=self.default_draft_length,
            acceptance=self.config.acceptance,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture cycles before the first request; nothing where none are captured."""
        if self.device_cycle is None:
            return
        most = self.config.max_seats * (self.default_draft_length + 1)
        try:
            self.device_cycle.warm_up(max(self.config.max_seats, min(most, self.config.row_budget)))
        except DrafterFault as fault:
            self._give_up_drafting(fault)
            self.warm_up()

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, boundaries: Sequence[int] = ()
    ) -> RequestState:
        """Queue a request; RequestError if it can never run.

        `boundaries` are numbers of prompt tokens (ends of turns) at which later prompts may go on differently.
        """
        request = self.make_request(prompt_token_ids, params, boundaries=boundaries)
        self.queue(request)
        return request

    def make_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, boundaries: Sequence[int] = ()
    ) -> RequestState:
        """A request that is not queued yet; RequestError if it can never run. Other threads may make them."""
        request = self._make_request(tuple(prompt_token_ids), params, None)
        request.boundaries = tuple(boundaries)
        return request

    def queue(self, request: RequestState) -> None:
        """Let a request wait for its turn."""
        self.scheduler.waiting.append(request)

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
        request = self._make_request(tuple(prompt.token_ids.tolist()), params, given)
        self.queue(request)
        return request

    def _make_request(self, prompt: tuple[int, ...], params: SamplingParams, given: GivenRows | None) -> RequestState:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is one SamplingParams for all prompts, not {type(params).__name__}.")
        self._check_prompt(prompt, [False] * len(prompt) if given is None else given.is_given.tolist())
        room = self.config.context_length - len(prompt)
        num_tokens_left = room if params.max_tokens is None else min(room, params.max_tokens)
        self._check_space(len(prompt) + num_tokens_left)
        noise_seed = params.seed if params.seed is not None else self._derived_seed()
        stop_token_ids = self._stop_token_ids(params)
        request = RequestState(
            index=self.num_added,
            prompt_token_ids=prompt,
            given=given,
            params=params,
            noise_seed=noise_seed,
            draft_length=self._draft_length(params),
            num_tokens_left=num_tokens_left,
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
            planned_counts=self._planned_counts(params, noise_seed, len(prompt), num_tokens_left),
        )
        self.num_added += 1
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

    def _check_space(self, num_positions: int) -> None:
        most = self.scheduler.space.max_positions
        if num_positions > most:
            raise RequestError(
                f"prompt and max_tokens come to {num_positions} tokens, but the caches hold {most} for one request. "
                "Lower max_tokens, or raise cache_bytes."
            )

    def _derived_seed(self) -> int:
        return random.Random(f"{self.config.seed}/{self.num_added}").getrandbits(63)

    def _planned_counts(
        self, params: SamplingParams, seed: int, first_position: int, num_positions: int
    ) -> Sequence[int]:
        """Drafts to keep after each token that a request may write; none where acceptance is real."""
        if self._synthetic_rates is None or params.num_speculative_tokens == 0:
            return ()
        if not params.is_greedy:
            raise RequestError(
                f"temperature={params.temperature}, but synthetic acceptance is for greedy requests. Set it to 0."
            )
        return kept_counts(self._synthetic_rates, seed=seed, first_position=first_position, num_positions=num_positions)

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
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Advance all running requests by a cycle, then run at most `prefill_rows` rows of prompts.

        A request whose logits are not finite ends with finish reason "error"; the others go on.
        """
        if not self.has_work:
            return []
        with self.target.kernels.own_threads():
            self._settle_ended()  # left by a step that was broken off
            taken = [*self._collect(), *self._decode()]
            chunks = [*map(self._told, taken), *self._prefill()]
            if self._under_way:
                self.scheduler.space.flush()
                self._launch_ahead()
            return chunks

    @torch.inference_mode()
    def prefill(self) -> list[Chunk]:
        """The second half of a step alone: prompts advance and nobody decodes, so that cycles can be timed apart."""
        with self.target.kernels.own_threads():
            return self._prefill()

    def abort(self, request: RequestState) -> None:
        """Drop a request wherever it is, between steps; its seat and pages are free at once."""
        request.finish_reason = "abort"
        self.scheduler.remove(request)

    def _collect(self) -> list[Taken]:
        """What the cycle has decided that the last step left to the device."""
        requests, self._under_way = self._under_way, []
        if not requests or self.device_cycle is None:
            return []
        return self._take(requests, self.device_cycle.wait())

    def _decode(self) -> list[Taken]:
        requests, lengths = self._plan_cycle()
        if not requests:
            return []
        self.scheduler.space.flush()
        try:
            return self._run_cycle(requests, lengths)
        except DrafterFault as fault:
            self._give_up_drafting(fault)
            return self._run_cycle(requests, [0] * len(requests))

    def _run_cycle(self, requests: list[RequestState], lengths: Sequence[int]) -> list[Taken]:
        """One cycle, here and now; or under way on the device, and nothing taken yet."""
        if self.device_cycle is not None and self.device_cycle.takes(requests, lengths):
            self.device_cycle.launch(requests, lengths)
            self._under_way = requests
            return []
        result = run_cycle(
            CycleBatch.of(requests, lengths, self.target.device),
            target=self.target,
            caches=self.caches,
            proposer=self.proposer,
            rows_per_pass=self.config.rows_per_pass,
            acceptance=self.config.acceptance,
        )
        return self._take(requests, result.read())

    def _launch_ahead(self) -> None:
        """The device goes on by itself where nobody joins: with the next position, where there is room for it."""
        under_way = {request.index for request in self._under_way}
        has_joined = any(request.index not in under_way for request in self.scheduler.running)
        has_room = all(
            self.scheduler.space.is_reserved(request.seat, num_committed=request.anchor_position, num_rows=2)
            for request in self._under_way
        )
        if self.device_cycle is not None and has_room and not has_joined:
            self.device_cycle.launch_ahead()

    def _give_up_drafting(self, fault: DrafterFault) -> None:
        """Plain decoding from here on. What the failed pass wrote is written again by the next one."""
        logger.exception("Decoding goes on without drafts.")
        self.drafter_fault = str(fault)
        self.use_proposer(None)

    def _plan_cycle(self) -> tuple[list[RequestState], list[int]]:
        """Who takes part, oldest first, and with how many drafts; whoever finds no room has lost its seat."""
        running, space = [each for each in self.scheduler.running if each.finish_reason is None], self.scheduler.space
        limits = [request.max_draft_length if self.proposer else 0 for request in running]
        lengths = plan_draft_lengths(limits, row_budget=self.config.row_budget)
        for request, length in zip(running, lengths, strict=True):
            num_committed, num_rows = request.anchor_position, length + 1
            if request.seat < 0 or space.is_reserved(request.seat, num_committed=num_committed, num_rows=num_rows):
                continue
            self._settle_ended()  # before anyone gives way
            self.scheduler.make_room(request, num_committed=num_committed, num_rows=num_rows)
        seated = [(request, n) for request, n in zip(running, lengths, strict=True) if request.seat >= 0]
        return [request for request, _ in seated], [length for _, length in seated]

    def _take(self, requests: Sequence[RequestState], decided: Decided) -> list[Taken]:
        """Tokens to requests, in order. All else can wait for the next cycle's launch: a device may be idle."""
        taken = []
        for request, accepted, target_id, is_finite, drafts, drafted, logprobs in zip(requests, *decided, strict=True):
            if request.finish_reason is not None:
                continue  # aborted while the device was at work
            if not is_finite:
                taken.append(self._fail(request))
            elif accepted < 0:
                taken.append(self._fail(request, "a cycle brought no token"))
            else:
                token_ids = [*drafts[:accepted], target_id]
                taken.append(
                    request.take(token_ids, num_accepted_tokens=accepted, num_draft_tokens=drafted, logprobs=logprobs)
                )
        return taken

    def _told(self, taken: Taken) -> Chunk:
        """The chunk of what was taken, and all that a launch does not wait for."""
        request = taken.request
        if request.seat >= 0:
            self._settle(request)
        if request.seat >= 0 and self._under_way:  # for the cycle under way and the one after it
            num_rows = min(2 * (request.draft_length + 1), self.config.max_block_rows)
            num_committed = request.anchor_position
            self.scheduler.space.reserve_ahead(request.seat, num_committed=num_committed, num_rows=num_rows)
        return request.spell(taken)

    def _prefill(self) -> list[Chunk]:
        """Pieces of prompts in order of arrival, until one does not fit into what is left of `prefill_rows`."""
        chunks, rows_left = [], self.config.rows_per_step
        rows_per_chunk = self.config.rows_per_pass or self.config.rows_per_step
        while (request := self.scheduler.next_to_prefill()) is not None:
            num_rows = num_chunk_rows(request, rows_per_chunk)
            is_first = rows_left == self.config.rows_per_step
            if num_rows > rows_left and not is_first:
                break
            if not self.scheduler.make_room(request, num_committed=request.num_computed_tokens, num_rows=num_rows):
                break
            chunks += self._run_chunk(request, num_rows)
            rows_left -= num_rows
        return chunks

    def _run_chunk(self, request: RequestState, num_rows: int) -> list[Chunk]:
        """A piece of a prompt; after its last, a new request has its first token, and one begun before goes on."""
        try:
            hidden = self._prefill_rows(request, num_rows)
        except DrafterFault as fault:
            self._give_up_drafting(fault)
            hidden = self._prefill_rows(request, num_rows)
        self._publish(request, request.num_computed_tokens)
        if request.num_computed_tokens < request.num_prefill_tokens:
            return []
        self.scheduler.start(request)
        if request.output_token_ids:
            return []
        is_padded = self.config.rows_per_pass is not None
        judged = first_token(request, hidden, num_rows, target=self.target, is_padded=is_padded)
        if not bool(judged.is_finite):
            return [request.spell(self._fail(request))]
        token_ids = judged.verdict.target_token_ids.tolist()
        chunk = request.append(token_ids, num_accepted_tokens=0, logprobs=judged.logprobs[0])
        self._settle(request)
        return [chunk]

    def _prefill_rows(self, request: RequestState, num_rows: int) -> Tensor:
        self.scheduler.space.flush()
        return prefill_chunk(
            request,
            num_rows,
            target=self.target,
            caches=self.caches,
            proposer=self.proposer,
            rows_per_pass=self.config.rows_per_pass,
        )

    def _fail(self, request: RequestState, error: str = NOT_FINITE) -> Taken:
        taken = request.fail(error)
        self.scheduler.space.withdraw(request.seat)  # or every later request with this text would fail, too
        self.scheduler.remove(request)
        return taken

    def _settle(self, request: RequestState) -> None:
        """After a cycle: what it committed can be shared, before a window gives it up; whoever is done leaves."""
        self._publish(request, request.num_prefill_tokens)
        if request.finish_reason is not None:
            self.scheduler.remove(request)

    def _settle_ended(self) -> None:
        """Let those leave that have ended, and have not been told yet."""
        for request in self.scheduler.running:
            if request.finish_reason is not None:
                self._settle(request)

    def _publish(self, request: RequestState, num_tokens: int) -> None:
        """Offer the first tokens to later requests. Their rows are in the caches for certain: the anchor's is not.

        To put a long text together takes as long as much of a cycle: only where there is something to offer.
        """
        if request.given is None and not self.scheduler.space.is_published(request.seat, num_tokens=num_tokens):
            token_ids = request.prefill_token_ids
            boundaries = sorted({*request.boundaries, len(request.prompt_token_ids), len(token_ids)})
            self.scheduler.space.publish(request.seat, token_ids[:num_tokens], boundaries)
