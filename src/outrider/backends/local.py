"""The library API: prompts of text in, text out, on an engine in this process."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.backends.memory_plan import MemoryPlan, plan_caches, plan_engine_memory, usable_bytes
from outrider.core import Chunk, Generation, Prompt, SamplingParams
from outrider.engine.cache_space import PagedSpace
from outrider.engine.engine import Engine, EngineConfig
from outrider.engine.kv_cache import KvCache
from outrider.engine.proposer import DFlashProposer, FencedProposer
from outrider.engine.state import RequestState
from outrider.errors import ConfigError, EngineFault, RequestError
from outrider.kernels.ops import Kernels, select_kernels
from outrider.models.config import TargetConfig
from outrider.models.dflash import DFlashDrafter
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_drafter, load_target, target_config
from outrider.tokenizer import Tokenizer
from outrider.weights.load_quantization import check_quantization
from outrider.weights.loader import load_checkpoint
from outrider.weights.locate import EMBEDDED_NAME, embedded_drafter, locate_drafter, locate_target

CUDA_ROWS_PER_PASS = 16
CUDA_PAGE_SIZE = 64  # a tile of keys lies in one page, so that its place is one entry of the page table
CUDA_PREFILL_ROWS = 2048  # products are bound by arithmetic then, and a step still lasts a fraction of a second

logger = logging.getLogger(__name__)


class LLM:
    """A target, perhaps with a drafter, ready to write. Make one with `outrider.load`; use it from one thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._unread: dict[int, deque[Chunk]] = {}  # of open streams: any of them may run the cycle that serves all

    @property
    def drafter_name(self) -> str | None:
        """The drafter's name; None where decoding is plain."""
        return self.engine.proposer.name if self.engine.proposer else None

    @property
    def num_speculative_tokens(self) -> int:
        """Draft length of a request that asks for none."""
        return self.engine.default_draft_length

    @property
    def kernels_name(self) -> str:
        """The kernel set the target runs on."""
        return self.engine.target.kernels.name

    def without_drafter(self) -> LLM:
        """A second LLM on the same weights, with caches of its own and no drafter."""
        engine = self.engine
        return LLM(make_engine(engine.target, None, self.tokenizer, engine.config), self.tokenizer)

    def with_drafter(self, path: Path, *, target_name: str) -> LLM:
        """A second LLM on the same target, with caches of its own and the drafter of a directory."""
        engine = self.engine
        length = engine.config.context_length
        drafter = load_drafter(path, engine.target, target_name=target_name, context_length=length)
        return LLM(make_engine(engine.target, drafter, self.tokenizer, engine.config), self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text gets a begin token if it has none, ids are taken as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if prompt else []
        is_ids = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not is_ids or any(type(token_id) is not int for token_id in prompt):
            raise RequestError(f"a prompt is text or a list of token ids, not {prompt!r:.60}.")
        return list(prompt)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield what each cycle adds; leaving the loop early drops the request. Several streams may be read in turn."""
        request = self.engine.add(self.encode(prompt), params or SamplingParams())
        unread = self._unread[request.index] = deque()
        try:
            while unread or request.finish_reason is None:
                if not unread:
                    self._step()
                while unread:
                    yield unread.popleft()
        finally:
            del self._unread[request.index]
            if request.finish_reason is None:
                self.engine.abort(request)
        self._raise_if_failed([request])

    def _step(self) -> list[Chunk]:
        chunks = self.engine.step()
        for chunk in chunks:
            if chunk.request_index in self._unread:
                self._unread[chunk.request_index].append(chunk)
        return chunks

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Generation]:
        """Answer every prompt, several at a time; results in the order of the prompts."""
        if isinstance(prompts, str):
            raise ConfigError("generate takes a list of prompts; put one prompt in a list.")
        encoded = [self.encode(prompt) for prompt in prompts]
        requests: list[RequestState] = []
        try:
            for ids in encoded:
                requests.append(self.engine.add(ids, params or SamplingParams()))
            clock = _Clock(requests)
            while any(request.finish_reason is None for request in requests):
                clock.note(self._step())
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.engine.abort(request)
        self._raise_if_failed(requests)
        return [clock.generation(request) for request in requests]

    @staticmethod
    def _raise_if_failed(requests: Sequence[RequestState]) -> None:
        failed = [request.index for request in requests if request.finish_reason == "error"]
        if failed:
            raise EngineFault(f"requests {failed}: the target's logits were not finite; nothing more was emitted.")


class _Clock:
    """Times of each request's first and last token."""

    def __init__(self, requests: Sequence[RequestState]) -> None:
        self.started = time.perf_counter()
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.indices = {request.index for request in requests}

    def note(self, chunks: Sequence[Chunk]) -> None:
        """Stamp the chunks of one step."""
        now = time.perf_counter()
        for chunk in chunks:
            if chunk.request_index in self.indices:
                self.first.setdefault(chunk.request_index, now)
                self.last[chunk.request_index] = now

    def generation(self, request: RequestState) -> Generation:
        """The finished answer."""
        assert request.finish_reason is not None
        first = self.first[request.index]
        return Generation(
            text=request.text,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            acceptance=request.acceptance,
            prefill_s=first - self.started,
            decode_s=self.last[request.index] - first,
            logprobs=tuple(request.logprobs),
            synthetic=request.is_synthetic,
        )


def resolve_device(name: str) -> torch.device:
    """'auto' is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise ConfigError(f"device={name!r} is not known. Use 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    device = torch.device(name)
    num_devices = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_devices:
        raise ConfigError(f"device={name!r}, but torch sees {num_devices or 'no'} CUDA devices. Use device='cpu'.")
    return device


def are_rows_exact(kernels: Kernels, target: TargetConfig) -> bool:
    """True where a row of this target is the same bits in any pass. Experts run on torch's products on a GPU."""
    return kernels.row_invariant and (target.experts is None or kernels.name != "gpu")


def resolve_config(
    config: EngineConfig, *, device: torch.device, max_positions: int, row_invariant: bool = False
) -> EngineConfig:
    """Fit a config to the device and its kernels.

    CUDA is exact through kernels that are row-invariant, or else through constant shapes, one request at a time.
    """
    if config.context_length > max_positions:
        raise ConfigError(
            f"context_length={config.context_length}, but the target knows {max_positions} positions. Lower it."
        )
    if device.type == "cuda" and row_invariant:
        return replace(
            config,
            prefill_rows=config.prefill_rows or min(CUDA_PREFILL_ROWS, config.context_length),
            page_size=config.page_size or CUDA_PAGE_SIZE,
        )
    if device.type == "cuda":
        return replace(config, max_seats=1, rows_per_pass=CUDA_ROWS_PER_PASS, prefill_rows=CUDA_ROWS_PER_PASS)
    return config


def load(
    target: str | None = None,
    *,
    drafter: str | None = "auto",
    drafter_quantization: str | None = None,
    config: EngineConfig | None = None,
    device: str = "auto",
    kernels: str = "auto",
    progress: Callable[[str], None] | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
) -> LLM:
    """Load a target and its drafter. No arguments: the embedded default, Gemma 3 270M with the drafter shipped for it.

    Both are paths, or "owner/name" on the model hub. `drafter` may also be "auto" (the shipped one for the embedded
    default, none otherwise) or None for plain decoding. `drafter_quantization`, "int8" or "int4", rounds the
    drafter's matrices, and on a GPU a copy of the head it shares with the target: the text stays the same, drafts are
    quicker and may be accepted less often. `kernels` is "auto", "cpu" or "torch". `on_plan` hears
    how memory is shared out before caches are allocated; ConfigError where it does not suffice.
    """
    place = resolve_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    chosen_kernels = select_kernels(kernels, dtype=dtype, device=place)
    path = drafter_path(drafter, target=target)
    check_drafter_quantization(drafter_quantization, has_drafter=path is not None)
    checkpoint = load_checkpoint(locate_target(target), progress=progress)
    declared = target_config(checkpoint)
    engine_config = resolve_config(
        config or EngineConfig(),
        device=place,
        max_positions=declared.max_positions,
        row_invariant=are_rows_exact(chosen_kernels, declared),
    )
    model = load_target(
        checkpoint,
        kernels=chosen_kernels,
        dtype=dtype,
        device=place,
        context_length=engine_config.context_length,
    )
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_path)
    drafter_model = None
    if path is not None:
        length, name = engine_config.context_length, checkpoint.source.name
        drafter_model = load_drafter(
            path, model, target_name=name, context_length=length, quantization=drafter_quantization
        )
    plan = plan_engine_memory(model, drafter_model, engine_config, available_bytes=usable_bytes(place))
    if on_plan is not None:
        on_plan(plan)
    return LLM(make_engine(model, drafter_model, tokenizer, engine_config), tokenizer)


def check_drafter_quantization(kind: str | None, *, has_drafter: bool) -> None:
    """ConfigError where a drafter is to be quantised in a way that is not known, or there is none."""
    check_quantization(kind)
    if kind is not None and not has_drafter:
        raise ConfigError(f"drafter_quantization={kind!r}, but there is no drafter. Name one, or leave it out.")


def drafter_path(drafter: str | None, *, target: str | None) -> Path | None:
    """The directory of a drafter asked for by path, hub name, "auto" or None, for a target as `load` takes it."""
    if drafter is None:
        return None
    if drafter != "auto":
        return locate_drafter(drafter)
    return embedded_drafter() if target in (None, EMBEDDED_NAME) else None


def make_engine(
    model: GemmaTarget, drafter: DFlashDrafter | None, tokenizer: Tokenizer | None, config: EngineConfig
) -> Engine:
    """An engine with empty caches, warmed up; end tokens are the union of the model's and the tokenizer's."""
    drafter_layers = drafter.config.layers if drafter is not None else ()
    plan = plan_caches(model.config.layers, drafter_layers, config, dtype=model.dtype)
    kv_cache = KvCache.allocate(plan, model.config.layers, drafter_layers, dtype=model.dtype, device=model.device)
    proposer = None if drafter is None else FencedProposer(DFlashProposer(drafter, kv_cache.drafter_caches))
    if tokenizer is not None and not model.config.eos_token_ids:
        logger.warning("The model declares no eos_token_id; only the tokenizer's %s end an answer.", tokenizer.eos_ids)
    ends = frozenset(model.config.eos_token_ids) | frozenset(tokenizer.eos_ids if tokenizer else ())
    space = PagedSpace(kv_cache, context_length=config.context_length)
    engine = Engine(model, kv_cache.target_caches, proposer, tokenizer, config, ends, space)
    engine.warm_up()
    return engine
