"""Training that goes on from a drafter that is there: z-lab's, DeepSpec's or our own, whatever the loaders read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.errors import DrafterMismatchError
from outrider.models.dflash import read_vocabulary
from outrider.models.drafter_config import DrafterConfig, check_drafter
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import drafter_config
from outrider.weights.loader import TensorClaims, load_safetensors_dir
from outrider.weights.packed import PackedWeight

# A recipe may change these: blocks grow, heads come and go. Everything else decides what the weights mean.
_FREE = ("name", "block_size", "num_speculative_tokens", "num_target_layers", "markov", "confidence", "skipped_tensors")
_HEADS = ("markov_head.", "confidence_head.")
_TABLES = ("embed_tokens.weight", "lm_head.weight")  # copies of the target's, as DeepSpec writes them
_COMPARED_ROWS = 64  # every so many rows of such a table are compared
_SAME_TABLE = 0.05  # the largest share of its size that quantisation may have moved a table by


@dataclass(frozen=True)
class WarmStart:
    """A drafter's numbers, on the CPU."""

    source: Path
    tensors: Mapping[str, Tensor]  # float32, by the names of the file
    draft_to_target: Tensor | None  # int64 [Vd]; None: the full vocabulary

    def give(self, model: nn.Module, draft_to_target: Tensor) -> Tensor:
        """Put the numbers into a fresh model; heads that the drafter lacks stay new, heads that it has may be left.

        Returns the draft vocabulary they go with, int64 [Vd]: the drafter's own, or `draft_to_target` if it is full.
        """
        state = model.state_dict()
        for name, there in state.items():
            found = self.tensors.get(name)
            if found is not None and found.shape == there.shape:
                there.copy_(found)
            elif found is not None or not name.startswith(_HEADS):
                what = "lacks it" if found is None else f"has it as {list(found.shape)}"
                raise DrafterMismatchError(
                    f"warm start {self.source.name}: the recipe needs {name} {list(there.shape)}, the drafter {what}. "
                    "Write its shape into [drafter]."
                )
        spare = [name for name in self.tensors if name not in state and not name.startswith(_HEADS)]
        if spare:
            raise DrafterMismatchError(
                f"warm start {self.source.name}: {len(spare)} tensors have no place in the recipe's drafter, the first "
                f"is {spare[0]}. Write its shape into [drafter]."
            )
        return draft_to_target if self.draft_to_target is None else self.draft_to_target.to(draft_to_target.device)


def load_warm_start(path: Path, wanted: DrafterConfig, target: GemmaTarget) -> WarmStart:
    """Read a drafter to go on from; DrafterMismatchError names what the recipe's [drafter] says differently."""
    config, packed = load_safetensors_dir(path)
    declared = drafter_config(config, source=path)
    check_drafter(declared, target.config, target_name="of this run")
    differences = list(_differences(declared, wanted))
    if differences:
        raise DrafterMismatchError(
            f"warm start {path.name} is another drafter than the recipe's: {'; '.join(differences)}. Write its values "
            "into [drafter], or start without it."
        )
    claims = TensorClaims(packed, source=path)
    vocabulary = read_vocabulary(claims, declared, path, torch.device("cpu"))
    numbers = {
        name: stored.dequantize(torch.float32, torch.device("cpu"))
        for name, stored in packed.items()
        if name not in (*_TABLES, "d2t", "t2d")
    }
    for name in _TABLES:
        if name in packed and vocabulary is None:
            _check_table(packed[name], target, f"{path.name}: {name}")
    return WarmStart(path, numbers, vocabulary)


def _differences(there: DrafterConfig, here: DrafterConfig) -> Iterator[str]:
    for each in fields(DrafterConfig):
        one, two = getattr(there, each.name), getattr(here, each.name)
        if each.name not in _FREE and one != two:
            yield f"{each.name} is {one!r} there, {two!r} here"


def _check_table(stored: PackedWeight, target: GemmaTarget, what: str) -> None:
    """Training keeps the target's embedding and head; a drafter with others would not be what it was."""
    cpu = torch.device("cpu")
    own, targets = (each.dequantize(torch.float32, cpu)[::_COMPARED_ROWS] for each in (stored, target.stored_embedding))
    if own.shape != targets.shape or (own - targets).norm() > _SAME_TABLE * targets.norm():
        raise DrafterMismatchError(
            f"warm start {what} is not the target's own table, and training would put the target's in its place. "
            "Start from a drafter of this target."
        )
