"""T-026: a drafter's own config decides how it rotates, whatever the target does; export writes what training used.

Seen red: the target's base for the drafter; another default base; export writing the default base.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.models.config import RopeSpec
from outrider.models.dflash import DFlashDrafter
from outrider.models.draft_layers import BlockRows
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_drafter, load_target
from outrider.training.export import export_drafter
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight
from tests.cases.test_t048_drafter_fits import write_drafter
from tests.models.test_dflash import commit, dense_logits, new_caches, random_taps
from tests.toy import CPU, block_logits, dense_norm, toy_target
from tests.training import tiny

CONTEXT, ANCHOR = 9, 11


def loaded(path: Path) -> DFlashDrafter:
    return load_drafter(path, toy_target(), target_name="toy-target", context_length=64)


def drafted(drafter: DFlashDrafter, taps: Tensor) -> Tensor:
    """Logits [B - 1, Vd] of a block after the taps."""
    caches = new_caches(drafter)
    commit(drafter, caches, taps)
    rows = drafter.config.block_size
    slots = torch.tensor([ANCHOR, *[drafter.config.mask_token_id] * (rows - 1)])
    return block_logits(drafter, BlockRows(slots, torch.tensor([0]), torch.tensor([len(taps)]), rows), caches)[0]


class InterleavedKernels(TorchKernels):
    """Rotates in the other layout: pairs are (2i, 2i + 1)."""

    def head_norm_rope(
        self, heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, *, eps: float
    ) -> Tensor:
        assert weight is not None
        even, odd = dense_norm(heads, weight, eps).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.complex(even, odd) * torch.complex(cos[positions], sin[positions])[:, None]
        return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_t026_the_drafters_own_base(theta: float, tmp_path: Path) -> None:
    drafter = loaded(write_drafter(tmp_path / "drafter", {"rope_theta": theta}))
    taps = random_taps(CONTEXT)
    assert {spec.rope for spec in drafter.config.layers} == {RopeSpec(theta=theta)}
    torch.testing.assert_close(drafted(drafter, taps), dense_logits(drafter, taps, ANCHOR), rtol=0, atol=1e-9)


def test_t026_another_base_or_layout_shows(tmp_path: Path) -> None:
    """Or the agreement above would say nothing."""
    taps = random_taps(CONTEXT)
    drafters = [loaded(write_drafter(tmp_path / str(theta), {"rope_theta": theta})) for theta in (1e4, 1e6)]
    right, other_base = (drafted(drafter, taps) for drafter in drafters)
    assert float((other_base - right).abs().max()) > 1e-5
    drafters[0].kernels = InterleavedKernels(torch.float64)
    assert float((drafted(drafters[0], taps) - right).abs().max()) > 1e-5


def test_t026_a_missing_base_is_a_million(tmp_path: Path) -> None:
    """The target's layers turn with 10,000 and 1,000,000 / 8; neither is taken."""
    path = write_drafter(tmp_path / "drafter", {"rope_theta": None})
    assert {spec.rope for spec in loaded(path).config.layers} == {RopeSpec(theta=1_000_000.0)}
    stored = json.loads((path / "config.json").read_text())
    del stored["rope_theta"]
    (path / "config.json").write_text(json.dumps(stored))
    assert {spec.rope for spec in loaded(path).config.layers} == {RopeSpec(theta=1_000_000.0)}


def exact_tiny_target() -> GemmaTarget:
    weights = {name: DenseWeight(name, values) for name, values in tiny.tensors(norm_offset=1.0).items()}
    checkpoint = Checkpoint(tiny.CONFIG, weights, 1.0, Path("tiny"), source=Path("tiny"), source_sha256="")
    kernels, dtype = TorchKernels(torch.float64), torch.float64
    return load_target(checkpoint, kernels=kernels, dtype=dtype, device=CPU, context_length=64)


def test_t026_export_writes_the_base_of_training(tmp_path: Path) -> None:
    """tests/training/test_export.py joins trainer and engine; here the file's numbers under the recipe's base."""
    theta = 20_000.0
    export_drafter(tiny.trainer(tiny.recipe(drafter={"rope_theta": theta, "sliding_window": 6})), tmp_path, record={})
    drafter = load_drafter(tmp_path, exact_tiny_target(), target_name="tiny", context_length=64)
    assert {spec.rope for spec in drafter.config.layers} == {RopeSpec(theta=theta)}
    taps = random_taps(CONTEXT)[:, :64]
    found = drafted(drafter, taps)
    torch.testing.assert_close(found, dense_logits(drafter, taps, ANCHOR, block_rows=4), rtol=0, atol=1e-10)
