"""Bytes of passes: what models and kernels for CUDA allocate, counted with every launch left out.

Seen red: all layers' outputs kept, a norm's result forgotten, splits of K forgotten, scores of attention forgotten,
one row of a Markov head for each candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from outrider.backends.memory_plan import plan_caches
from outrider.backends.pass_memory import BLOCK_BYTES, SEGMENT_BYTES, SMALL_BYTES, pass_parts
from outrider.engine.engine import EngineConfig
from outrider.engine.graphs import Beginning, DeviceCycle
from outrider.engine.kv_cache import KvCache
from outrider.engine.proposer import DFlashProposer
from outrider.kernels.gpu import GpuKernels
from outrider.kernels.matmul_sizes import device_limits
from outrider.models.attention import Rows
from outrider.models.config import TargetConfig
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import DrafterConfig, MarkovKind, MarkovSpec
from outrider.models.gemma import GemmaTarget
from outrider.weights.packed import DenseWeight
from tests.toy import SOURCE, toy_checkpoint, toy_drafter_config, toy_drafter_tensors, toy_target_config

CPU, BF16 = torch.device("cpu"), torch.bfloat16
VOCAB, CONTEXT_LENGTH, MAX_DRAFTS = 2048, 1024, 7
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8}
ENGINE = EngineConfig(context_length=CONTEXT_LENGTH, max_seats=4, prefill_rows=640, page_size=64)
LIMITS = device_limits(0)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are left out of interpreted runs alone")


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Of all tensors in it."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of new storages that were held at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, tuple[Any, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.held = {key: held for key, held in self.held.items() if not held[0].expired()}
        given = {storage._cdata for storage in storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in given:  # or it is a view, perhaps of weights
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self.held.values()))
        return result


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels do nothing: what lies in tensors is whatever lay there."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *given, **how: None)
    with torch.inference_mode():
        yield


def target_config(*, repeats: int = 1, **changes: Any) -> TargetConfig:
    """Five layers, so many times."""
    small = toy_target_config(VOCAB)
    sliding = replace(small.layers[0], num_kv_heads=4, head_dim=64, window=128)
    full = replace(small.layers[3], num_kv_heads=1, head_dim=128, values_are_keys=True)
    layers = (sliding, sliding, full, sliding, full) * repeats
    return replace(small, layers=layers, norms_values=True, **{**SIZES, **changes})


def drafter_config(**changes: Any) -> DrafterConfig:
    small = toy_drafter_config(block_size=MAX_DRAFTS + 1, vocab_size=VOCAB)
    spec = replace(small.layers[0], num_kv_heads=4, head_dim=64)
    return replace(small, layers=(spec, spec), **{**SIZES, "num_target_layers": 5, **changes})


class Built:
    """Models with the set for CUDA and caches on the CPU, their plan, and what each pass allocates."""

    def __init__(self, target: TargetConfig, drafter: DrafterConfig, config: EngineConfig = ENGINE) -> None:
        kernels = GpuKernels(BF16, CPU)
        shared: dict[str, Any] = {"kernels": kernels, "context_length": CONTEXT_LENGTH}
        self.target = GemmaTarget(target, toy_checkpoint(target), dtype=BF16, device=CPU, **shared)
        tensors = toy_drafter_tensors(drafter)
        if drafter.markov is not None:
            names = (f"markov_head.markov_w{index}.weight" for index in (1, 2))
            tensors |= {name: DenseWeight(name, torch.zeros(VOCAB, drafter.markov.rank)) for name in names}
        self.drafter = DFlashDrafter(drafter, tensors, self.target, source=SOURCE, **shared)
        plan = plan_caches(target.layers, drafter.layers, config, dtype=BF16)
        caches = KvCache.allocate(plan, target.layers, drafter.layers, dtype=BF16, device=CPU)
        self.caches, self.proposer = caches.target_caches, DFlashProposer(self.drafter, caches.drafter_caches)
        self.config = config
        self.said = pass_parts(target, drafter, config, plan, limits=LIMITS)

    def prompt_bytes(self, num_rows: int) -> int:
        rows = Rows(*(torch.zeros(num_rows, dtype=torch.int64) for _ in range(3)))
        with Allocated() as allocated:
            output = self.target.forward(rows, self.caches, tap_layers=self.proposer.tap_layers)
            assert output.taps is not None
            self.proposer.commit(output.taps, rows.seats, rows.positions)
            self.target.best(output.hidden)
        return allocated.peak_bytes

    def cycle_bytes(self, *, is_sampled: bool = False) -> tuple[int, int]:
        """Of drafts for all seats, and of the largest verify pass."""
        seats = self.config.max_seats
        sizes = {"max_seats": seats, "context_length": self.config.context_length, "default_draft_length": MAX_DRAFTS}
        cycle = DeviceCycle(self.target, self.caches, self.proposer, **sizes)
        with Allocated() as drafting:
            cycle._run_beginning(Beginning(seats, MAX_DRAFTS, 0, is_sampled))
        with Allocated() as verifying:
            cycle._run_verify(32, is_sampled=is_sampled)
        return drafting.peak_bytes, verifying.peak_bytes


@pytest.mark.parametrize(("inner", "repeats"), [(512, 2), (16384, 1)])
def test_a_prompts_pass_takes_what_was_said(inner: int, repeats: int) -> None:
    """Where attention takes most, however many layers there are; and where the MLP does."""
    target = target_config(intermediate_size=inner, repeats=repeats)
    built = Built(target, drafter_config(num_target_layers=len(target.layers)))
    counted = built.prompt_bytes(640)
    assert counted <= built.said["a pass"] - BLOCK_BYTES - SMALL_BYTES <= 1.05 * counted


def test_cycles_take_what_was_said() -> None:
    """Graphs take the larger of both halves at least; at most, as if no kind of layer left room for another."""
    built = Built(target_config(), drafter_config(), replace(ENGINE, prefill_rows=8))
    counted = max(built.cycle_bytes())
    assert counted <= built.said["a pass"] - BLOCK_BYTES <= 1.1 * counted + (1 << 20)
    both = sum(built.cycle_bytes(is_sampled=True))
    assert both <= built.said["graphs"] - SEGMENT_BYTES <= 3 * both + (4 << 20)


def test_a_walk_takes_what_was_said() -> None:
    """Two rows of the head for each candidate take most here."""
    config = drafter_config(markov=MarkovSpec(kind=MarkovKind.VANILLA, rank=512))
    built = Built(target_config(), config, replace(ENGINE, prefill_rows=8))
    counted = max(built.cycle_bytes())
    assert counted <= built.said["a pass"] - BLOCK_BYTES <= 1.1 * counted + (1 << 20)


def said(drafter: DrafterConfig | None, *, vocab_size: int = VOCAB, **settings: Any) -> dict[str, int]:
    """The parts for an engine of `target_config`."""
    target, config = target_config(vocab_size=vocab_size), replace(ENGINE, **settings)
    plan = plan_caches(target.layers, drafter.layers if drafter else (), config, dtype=BF16)
    return pass_parts(target, drafter, config, plan, limits=LIMITS)


def test_what_makes_passes_larger() -> None:
    plain, usual = said(None), said(drafter_config())
    assert plain["a pass"] < usual["a pass"] < said(drafter_config(), prefill_rows=1024)["a pass"]
    assert plain["graphs"] < usual["graphs"] < said(drafter_config(), max_seats=8)["graphs"]
    assert said(drafter_config(), cuda_graphs=False)["graphs"] == 0
    # A shorter draft than the longest may be captured first, and leave nothing that serves the longest.
    assert said(drafter_config(), num_speculative_tokens=3)["graphs"] > usual["graphs"]


def test_graphs_hold_the_logits_of_sampled_requests() -> None:
    large = 1 << 18
    more = said(None, vocab_size=large)["graphs"] - said(None)["graphs"]
    assert more >= 4 * 4 * (large - VOCAB)  # an anchor's row for each seat
    drafted = said(drafter_config(), vocab_size=large)["graphs"] - said(drafter_config())["graphs"]
    assert drafted >= 32 * 4 * (large - VOCAB)


def test_heads_of_a_drafter_store_its_logits() -> None:
    """With them for greedy requests, too."""
    heads = drafter_config(markov=MarkovSpec(kind=MarkovKind.VANILLA, rank=64), intermediate_size=64)
    many = {"max_seats": 64, "prefill_rows": 8}
    assert said(heads, **many)["a pass"] > said(drafter_config(intermediate_size=64), **many)["a pass"]
