"""What passes on a GPU compute in, from sizes alone: the largest pass, and what captured cycles keep for themselves.

The formulas follow `models/gemma.py` and `models/dflash.py` line by line, with the kernels of `kernels/gpu.py`; scratch
is asked of the modules that size it. A test counts what those really allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.cache_plan import CachePlan
from outrider.engine.engine import EngineConfig
from outrider.engine.graphs import MAX_LOGITS_BYTES, bucket_of
from outrider.engine.proposer import MAX_CANDIDATES
from outrider.kernels.attention_sizes import AttentionShape, scratch_bytes
from outrider.kernels.matmul_sizes import MAX_GATED_ROWS, Limits, best_bytes, partials_bytes
from outrider.kernels.reference import EXPERT_ROWS
from outrider.models.config import LayerSpec, TargetConfig
from outrider.models.drafter_config import DrafterConfig

BF16, FLOAT32 = 2, 4
INDEX_BYTES = 512  # a row: ids, seats, positions and spans, with what they are made of
SMALL_BYTES = 1 << 20  # tensors that no size of a model makes larger
BLOCK_BYTES = 16 << 20  # a large tensor may get a block that is up to 1 MiB larger
SEGMENT_BYTES = 64 << 20
"""Of a pool of graphs: the allocator takes memory in pieces of 2 and 20 MiB, and their ends stay unused."""
LIBRARY_BYTES = 96 << 20
"""Where torch's own products are used: what the library asks for, 32 MiB on each stream and in the pool of graphs."""
SAMPLER_BYTES = 64 << 10  # a row, at most: parts of searches, sums and choices
LOGIT_COPIES = 3  # of a draft whose logits are stored: the product, and what scaling, capping and sorting make of it

Combine = Callable[[Iterable[int]], int]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What the layers of target and drafter have in common, for passes on one device."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: Sequence[LayerSpec]
    ring_slots: dict[int | None, int]  # positions that caches hold of a seat, by window
    page_size: int
    limits: Limits
    has_low_bits: bool = False

    def row(self, num_rows: int) -> int:
        """Bytes of hidden states [R, N]."""
        return BF16 * num_rows * self.hidden_size

    def kinds(self) -> list[LayerSpec]:
        """Layers that differ."""
        return list(dict.fromkeys(self.layers))

    def heads_bytes(self, spec: LayerSpec, num_rows: int, *, num_fresh: int) -> int:
        """Queries, what attention makes of them, and fresh keys and values: all that is there after attention."""
        queries, fresh = self.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
        return BF16 * num_rows * (2 * queries + (fresh if num_fresh else 0))

    def attention_bytes(self, spec: LayerSpec, num_rows: int, *, num_fresh: int = 0) -> int:
        """The largest of a layer's steps up to the output projection, beside the rows that come in."""
        size, queries = self.hidden_size, self.num_heads * spec.head_dim
        projected = queries + _kv_size(spec)
        heads = self.heads_bytes(spec, num_rows, num_fresh=num_fresh)
        slots = self.ring_slots[spec.window]
        shape = AttentionShape(self.num_heads, spec.num_kv_heads, spec.head_dim, spec.window, slots, self.page_size)
        return max(
            BF16 * num_rows * projected + partials_bytes(num_rows, projected, size),
            BF16 * num_rows * projected + heads - BF16 * num_rows * queries,
            heads + scratch_bytes(num_rows, shape, self.limits, num_fresh=num_fresh),
            heads + self.row(num_rows) + partials_bytes(num_rows, size, queries),
        )

    def mlp_bytes(self, spec: LayerSpec, num_rows: int) -> int:
        """The largest step of an MLP and of the norms after it, beside the rows that come in."""
        inner = self.intermediate_size * spec.mlp_multiple
        gated, has_two_products = BF16 * num_rows * inner, num_rows > MAX_GATED_ROWS or self.has_low_bits
        return max(
            3 * gated if has_two_products else gated,
            gated + self.row(num_rows) + partials_bytes(num_rows, self.hidden_size, inner),
            3 * self.row(num_rows),
        )


def _kv_size(spec: LayerSpec) -> int:
    """Outputs of the projections to keys and values that a layer has."""
    if spec.cache_source is not None:
        return 0
    return (1 if spec.values_are_keys else 2) * spec.num_kv_heads * spec.head_dim


def pass_parts(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    caches: CachePlan,
    *,
    limits: Limits,
    has_low_bits: bool = False,
) -> dict[str, int]:
    """Bytes of "a pass", the largest that is launched eagerly, and of the "graphs" of cycles: their pool.

    Logits of sampled requests are among the second, not among the first. `has_low_bits` says that the drafter's
    matrices are quantised.
    """
    passes = _Passes(target, drafter, config, caches, limits, has_low_bits=has_low_bits)
    seats, longest = config.max_seats, drafter.max_draft_length if drafter else 0
    usual = drafter.num_speculative_tokens if drafter else 0
    usual = usual if config.num_speculative_tokens is None else min(config.num_speculative_tokens, longest)
    prefill_rows = max(min(config.rows_per_step, config.context_length), config.rows_per_pass or 0)
    cycles = [(passes.rows_of(length), seats if length else 0, length) for length in sorted({usual, longest})]
    largest = BLOCK_BYTES + max(
        passes.target_bytes(prefill_rows, max), *(passes.cycle_bytes(*cycle, max) for cycle in cycles)
    )
    if not config.cuda_graphs:
        return {"a pass": largest, "graphs": 0}
    # What is captured first leaves room for what is smaller, but not for a longer draft that is captured later.
    graphs = sum(passes.cycle_bytes(*cycle, sum, are_sampled=True) for cycle in cycles)
    return {"a pass": largest, "graphs": SEGMENT_BYTES + graphs}


class _Passes:
    """The passes of one engine. `combine` is max, or sum where no step's memory serves another: segments of a pool
    that are too small for a later tensor stay, so that each kind of layer is counted.
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        config: EngineConfig,
        caches: CachePlan,
        limits: Limits,
        *,
        has_low_bits: bool,
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.num_taps = len(drafter.target_layer_ids) if drafter else 0

        def model(declared: TargetConfig | DrafterConfig, owner: str, *, low: bool) -> _Model:
            return _Model(
                hidden_size=declared.hidden_size,
                intermediate_size=declared.intermediate_size,
                num_heads=declared.num_heads,
                layers=declared.layers,
                ring_slots={g.window: g.width * caches.page_size for g in caches.groups if g.owner == owner},
                page_size=caches.page_size,
                limits=limits,
                has_low_bits=low,
            )

        self.target_model = model(target, "target", low=False)
        self.drafter_model = model(drafter, "drafter", low=has_low_bits) if drafter else None

    def rows_of(self, draft_length: int) -> int:
        """Rows of the largest cycle with so many drafts a request."""
        seats = self.config.max_seats
        rows = max(seats, min(seats * (draft_length + 1), self.config.row_budget))
        return self.config.rows_per_pass or bucket_of(rows)

    def cycle_bytes(
        self, num_rows: int, num_requests: int, draft_length: int, combine: Combine, *, are_sampled: bool = False
    ) -> int:
        """Of the larger half of a cycle, or of both; with the logits that sampled requests need, or without."""
        logits = 0
        if are_sampled:
            row_bytes = FLOAT32 * self.target.vocab_size
            logits = SAMPLER_BYTES * num_rows + min(row_bytes * num_rows, MAX_LOGITS_BYTES)
        drafting = self.draft_bytes(num_requests, draft_length, combine, are_sampled=are_sampled)
        return combine([self.target_bytes(num_rows, combine) + logits, drafting])

    def target_bytes(self, num_rows: int, combine: Combine) -> int:
        """A pass of the target over so many rows, with what is decided and committed after it."""
        model, target = self.target_model, self.target
        row, per_layer = model.row(num_rows), target.per_layer.size if target.per_layer else 0
        own_inputs = BF16 * num_rows * len(target.layers) * per_layer
        # Into attention go embeddings, hidden states, their norm and what attention gave before; into an MLP two more.
        kept, taps = own_inputs + num_rows * INDEX_BYTES + SMALL_BYTES, self.num_taps * row
        layers = [
            taps
            + max(
                4 * row + model.attention_bytes(spec, num_rows),
                6 * row
                + model.mlp_bytes(spec, num_rows)
                + self._experts_bytes(num_rows)
                + (2 * row + 2 * BF16 * num_rows * per_layer if per_layer else 0),
            )
            for spec in model.kinds()
        ]
        ends = [2 * row + best_bytes(num_rows, target.vocab_size) + taps, 2 * row + 2 * taps, 4 * own_inputs + row]
        if self.drafter_model is not None:
            ends.append(row + taps + self._commit_bytes(num_rows, self.drafter_model))
        return kept + (0 if target.experts is None else LIBRARY_BYTES) + combine([*layers, max(ends)])

    def _experts_bytes(self, num_rows: int) -> int:
        """Matrices of the experts that some rows chose, gathered, and their sums."""
        experts = self.target.experts
        if experts is None:
            return 0
        matrix = experts.intermediate_size * self.target.hidden_size
        scores = FLOAT32 * num_rows * 4 * experts.num_experts
        return 2 * BF16 * min(num_rows, EXPERT_ROWS) * matrix + 8 * self.target_model.row(num_rows) + scores

    def _commit_bytes(self, num_rows: int, model: _Model) -> int:
        """Taps to features, and those to keys and values."""
        size, row = model.hidden_size, model.row(num_rows)
        sizes = [2 * spec.num_kv_heads * spec.head_dim for spec in model.kinds()]
        return row + max(
            row + partials_bytes(num_rows, size, self.num_taps * self.target.hidden_size),
            *(BF16 * num_rows * each + partials_bytes(num_rows, each, size) for each in sizes),
        )

    def draft_bytes(self, num_requests: int, draft_length: int, combine: Combine, *, are_sampled: bool = False) -> int:
        """A block pass with so many drafts for each request, and the choice of them."""
        model, drafter = self.drafter_model, self.drafter
        if model is None or drafter is None or not draft_length:
            return 0
        num_rows = num_requests * drafter.layout.num_slots(draft_length)
        row = model.row(num_rows)
        layers = [
            max(
                3 * row + model.attention_bytes(spec, num_rows, num_fresh=num_rows),
                6 * row + model.heads_bytes(spec, num_rows, num_fresh=num_rows) + model.mlp_bytes(spec, num_rows),
            )
            for spec in model.kinds()
        ]
        head = 4 * row + best_bytes(num_rows, drafter.draft_vocab_size)
        if are_sampled or drafter.markov or drafter.confidence or drafter.output_multiplier != 1.0:
            head += self._draft_logits_bytes(drafter, num_requests * draft_length, has_low_bits=model.has_low_bits)
        return num_rows * INDEX_BYTES + SMALL_BYTES + combine([*layers, head])

    def _draft_logits_bytes(self, drafter: DrafterConfig, num_drafts: int, *, has_low_bits: bool) -> int:
        """Logits of all slots with the candidates of each, where the best id of each is not enough.

        Of a Markov head candidates have two rows each; one of few bits is unpacked in float32.
        """
        rank = drafter.markov.rank if drafter.markov else 0
        candidates = num_drafts * MAX_CANDIDATES * (12 + (3 * FLOAT32 if has_low_bits else 2 * BF16) * rank)
        return LOGIT_COPIES * FLOAT32 * num_drafts * drafter.draft_vocab_size + candidates
