"""What every case shares: the sizes, the random weights, the blocks that are drafted and the files that are written."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma4TextConfig

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "drafters"

HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 32, 4, 2, 8, 40
VOCAB_SIZE, DRAFT_VOCAB_SIZE, MARKOV_RANK, MASK_TOKEN_ID, SOFTCAP = 96, 64, 8, 4, 5.0
NUM_TARGET_LAYERS, TARGET_LAYER_IDS = 6, [1, 3, 4]
WINDOW = 8
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
NUM_ROWS = 21
ANCHOR_POSITIONS = [1, 5, 8, 13, 21]  # below the window, at its edge and past it
ANCHOR_TOKEN_IDS = [7, 61, 30, 88, 19]

QWEN3_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": len(LAYER_TYPES),
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "layer_types": LAYER_TYPES,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": len(LAYER_TYPES),
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def gemma4_text_config(intermediate_size: int) -> Gemma4TextConfig:
    """A target of six layers as the 31B and 12B are: two head sizes, K=V full layers, partial rotation, soft-cap."""
    sliding, full = "sliding_attention", "full_attention"
    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=intermediate_size,
        num_hidden_layers=NUM_TARGET_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        global_head_dim=2 * HEAD_DIM,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        layer_types=[sliding, sliding, full, sliding, sliding, full],
        rope_parameters={
            sliding: {"rope_type": "default", "rope_theta": 1e4},
            full: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        final_logit_softcapping=SOFTCAP,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )


@dataclass
class Case:
    """One fixture: a drafter as its original publishes it, and what the original computes."""

    name: str
    original: str  # name, version or commit
    how: str  # how it was run
    deviations: list[str]
    seed: int
    save: Callable[[Path], None]  # writes config.json and model.safetensors of the drafter
    golden: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    save_target: Callable[[Path], None] | None = None

    def write(self) -> None:
        """Replace the case's directory."""
        folder = FOLDER / self.name
        shutil.rmtree(folder, ignore_errors=True)
        _keep_published(self.save, folder / "drafter")
        if self.save_target is not None:
            _keep_published(self.save_target, folder / "target")
        save_file({name: tensor.contiguous() for name, tensor in self.golden.items()}, folder / "golden.safetensors")
        facts = {
            "made_by": "tools/golden_drafters.py",
            "original": self.original,
            "run": self.how,
            "deviations": self.deviations,
            "seed": self.seed,
            "torch": version("torch"),
            "transformers": version("transformers"),
            **self.facts,
        }
        (folder / "golden.json").write_text(json.dumps(facts, indent=1) + "\n")


def _keep_published(save: Callable[[Path], None], folder: Path) -> None:
    """Config and weights as `save` writes them, the weights in bfloat16 (they were drawn so that nothing is lost)."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as saved:
        save(Path(saved))
        shutil.copy(Path(saved) / "config.json", folder)
        tensors = load_file(Path(saved) / "model.safetensors")
    stored = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in tensors.items()}
    assert all(torch.equal(stored[name].to(each.dtype), each) for name, each in tensors.items()), "drawn in bfloat16"
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def drawn(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers, float32, of which bfloat16 holds every one."""
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16).float()


@torch.no_grad()
def fill(module: nn.Module, generator: torch.Generator) -> None:
    """Random weights large enough that a wrong one shows: no norm and no layer scalar is 1, logits are wide."""
    scalars = [(name, each) for name, each in module.named_buffers() if name.endswith("layer_scalar")]
    for name, weight in sorted([*module.named_parameters(), *scalars]):
        shape = tuple(weight.shape)
        if name.endswith(("norm.weight", "layer_scalar", "layernorm.weight")):
            weight.copy_((1.0 + 0.3 * drawn(generator, *shape)).to(torch.bfloat16))
        elif name.endswith("bias"):
            weight.copy_(drawn(generator, *shape, scale=0.3))
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "markov_w1.weight")):
            weight.copy_(drawn(generator, *shape, scale=0.5))
        else:
            weight.copy_(drawn(generator, *shape, scale=1.3 * shape[-1] ** -0.5))


def generator_of(seed: int) -> torch.Generator:
    """What every random number of a case comes from."""
    return torch.Generator().manual_seed(seed)


def anchors() -> dict[str, Tensor]:
    """The blocks every case drafts: block i follows the context rows 0 .. anchor_positions[i] - 1."""
    return {"anchor_token_ids": torch.tensor(ANCHOR_TOKEN_IDS), "anchor_positions": torch.tensor(ANCHOR_POSITIONS)}


def block_ids(anchor: int, num_slots: int) -> Tensor:
    """int64 [1, num_slots]: the anchor, then masks."""
    return torch.tensor([[anchor] + [MASK_TOKEN_ID] * (num_slots - 1)])


def walk(
    base_logits: Tensor,
    corrected: Callable[[Tensor], Tensor],
    *,
    anchor: int,
    target_ids: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> tuple[Tensor, Tensor, Tensor]:
    """Greedy drafts left to right: base logits [K, Vd] -> (previous token ids [K], corrected logits [K, Vd], drafts).

    `corrected` maps previous token ids [K] to logits [K, Vd] in which row k depends on ids 0 .. k only, as every Markov
    head has it; `target_ids` maps draft ids to the target's.
    """
    previous = torch.full((len(base_logits),), anchor)
    for slot in range(len(base_logits) - 1):
        previous[slot + 1] = target_ids(corrected(previous)[slot].argmax())
    logits = corrected(previous)
    return previous, logits, target_ids(logits.argmax(-1))


def stacked(blocks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One tensor a name, blocks first."""
    return {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}
