"""A random target of a few thousand weights, its tokenizer, and recipes and texts to go with it."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers.models import BPE
from torch import Tensor

from outrider.kernels.reference import TorchKernels
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_target
from outrider.training.capture import GridKernels, GridRunner, Taps
from outrider.training.config import DrafterShape, GenerateConfig, OptimizeConfig, Recipe
from outrider.training.generate import TextBatch, TextKind
from outrider.training.losses import BlockLoss
from outrider.training.parallel import ALONE
from outrider.training.trainer import Trainer
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import DenseWeight

HIDDEN, VOCAB, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 100, 3, 4, 2, 16, 64
PAD_ID, EOS_ID, BOS_ID, UNK_ID, MASK_ID = range(5)
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "query_pre_attn_scalar": HEAD_DIM,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 40,
    "eos_token_id": EOS_ID,
}


def tensors(*, norm_offset: float) -> dict[str, Tensor]:
    """Random weights by Hugging Face name; norms multiply by about 1 whatever the offset."""
    generator = torch.Generator().manual_seed(3)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1.0 - norm_offset + 0.2 * torch.randn(size, generator=generator)

    found = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": norm(HIDDEN)}
    for index in range(NUM_LAYERS):
        layer = f"model.layers.{index}"
        found[f"{layer}.self_attn.q_proj.weight"] = matrix(NUM_HEADS * HEAD_DIM, HIDDEN)
        found[f"{layer}.self_attn.k_proj.weight"] = matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        found[f"{layer}.self_attn.v_proj.weight"] = matrix(NUM_KV_HEADS * HEAD_DIM, HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, NUM_HEADS * HEAD_DIM)
        found[f"{layer}.self_attn.q_norm.weight"] = norm(HEAD_DIM)
        found[f"{layer}.self_attn.k_norm.weight"] = norm(HEAD_DIM)
        found[f"{layer}.mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        found[f"{layer}.mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        found[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{layer}.{place}_layernorm.weight"] = norm(HIDDEN)
    return found


def target(*, kernels: TorchKernels | None = None, norm_offset: float = 0.0) -> GemmaTarget:
    """The target in float32, for training (GridKernels) unless other kernels are given."""
    weights = {name: DenseWeight(name, values) for name, values in tensors(norm_offset=norm_offset).items()}
    nowhere = Path("tiny")
    return load_target(
        Checkpoint(CONFIG, weights, norm_offset, nowhere, source=nowhere, source_sha256="0" * 64),
        kernels=kernels or GridKernels(torch.float32, "cpu"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        context_length=64,
    )


def tokenizer() -> JsonTokenizer:
    """One token a printable ASCII character, after the control tokens."""
    controls = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate([*controls, *characters])}
    backend = JsonTokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    assert backend.get_vocab_size() == VOCAB
    assert set(string.ascii_letters) <= set(vocabulary)
    return backend


def write_target(directory: Path) -> Path:
    """The target as a directory of safetensors, with its tokenizer."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(norm_offset=1.0), directory / "model.safetensors")
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


GENERATE = GenerateConfig(
    seed=1,
    sequence_tokens=24,
    batch_sequences=8,
    num_greedy_batches=2,
    num_sampled_batches=1,
    num_filtered_batches=1,
    filtered_top_k=10,
    filtered_top_p=0.9,
    max_sampled_prefix_tokens=4,
    max_opening_tokens=6,
    num_soft_candidates=8,
    keep_taps=False,
)
SHAPE = DrafterShape(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    block_size=4,
    mask_token_id=MASK_ID,
    target_layer_ids=(0, 2),
    sliding_window=8,
    is_causal=True,
    draft_vocab_size=64,
    rope_theta=10_000.0,
)
OPTIMIZE = OptimizeConfig(
    seed=1,
    num_steps=3,
    batch_sequences=4,
    max_anchors=5,
    repeat_anchor_weight=0.25,
    optimizer="adamw",
    learning_rate=1e-2,
    warmup_fraction=0.0,
    clip_norm=1.0,
    position_decay=3.0,
    cross_entropy_weight=0.3,
    distillation_weight=0.0,
    total_variation_weight=1.0,
    num_held_out_sequences=3,
    num_short_slots=3,
    full_block_every_steps=1,
)


def recipe(
    *, name: str = "tiny", drafter: dict[str, Any] | None = None, optimize: dict[str, Any] | None = None
) -> Recipe:
    """A recipe that fits the target; `drafter` and `optimize` replace fields."""
    return Recipe(
        name=name,
        num_speculative_tokens=3,
        generate=GENERATE,
        drafter=replace(SHAPE, **(drafter or {})),
        optimize=replace(OPTIMIZE, **(optimize or {})),
    )


def trainer(chosen: Recipe, *, on: GemmaTarget | None = None) -> Trainer:
    """A trainer whose drafter has weights large enough to matter; every other token is a frequent one."""
    made = Trainer(chosen, on or target(), torch.arange(VOCAB) % 2)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1.0 + 0.2 * noise)
    return made


def dspark_recipe(
    kind: str = "vanilla", *, drafter: dict[str, Any] | None = None, optimize: dict[str, Any] | None = None
) -> Recipe:
    """DSpark with both heads and the losses of DeepSpec (formats.md §3.2)."""
    shape = {"sample_from_anchor": True, "markov_head_type": kind, "markov_rank": 32}
    shape |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    losses = {"cross_entropy_weight": 0.1, "total_variation_weight": 0.0, "probability_l1_weight": 0.9}
    return recipe(
        drafter={**shape, **(drafter or {})}, optimize={**losses, "confidence_weight": 1.0, **(optimize or {})}
    )


def step(trainer: Trainer, text: TextBatch, *, number: int = 0) -> BlockLoss:
    """One step on a text, as step `number` would draw its anchors."""
    layers = trainer.recipe.tap_layers(NUM_LAYERS)
    runner = GridRunner(trainer.target, num_sequences=len(text.token_ids), num_positions=text.token_ids.shape[1])
    batch = trainer.blocks(text, number)
    total = trainer.slot_weights(batch).sum()
    result = trainer.accumulate(Taps(runner.taps(text.token_ids, layers), layers), batch, total_weight=total)
    trainer.update(result, ALONE)
    return result


def text(
    num_sequences: int = 4, *, kind: TextKind = TextKind.GREEDY, num_positions: int = 20, seed: int = 0
) -> TextBatch:
    """Random text, supervised from position 5 to the end; soft candidates are the token itself with 0.6, others 0.1."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(5, VOCAB - 3, (num_sequences, num_positions), generator=generator, dtype=torch.int32)
    ids = probs = None
    if kind is not TextKind.GREEDY:
        ids = token_ids[..., None] + torch.arange(3, dtype=torch.int32)
        probs = torch.tensor([0.6, 0.1, 0.1], dtype=torch.float16).expand(ids.shape).contiguous()
    ends = torch.full((num_sequences,), num_positions, dtype=torch.int32)
    return TextBatch(kind, token_ids, torch.full_like(ends, 5), ends, ids, probs)
