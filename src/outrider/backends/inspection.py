"""What `doctor` looks at: kernels, target, drafter, and a few drafted tokens.

Target and drafter are built as loading builds them, but on the meta device: every tensor is claimed or refused, none is
read. A name plan (weights/name_plan.py) does as well as a checkpoint, except for drafting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider import metrics
from outrider.backends.account import account_caches, account_weights, held_bytes
from outrider.backends.local import drafter_path, load, resolve_config, resolve_device
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.kernels.ops import Kernels, select_kernels
from outrider.kernels.reference import TorchKernels
from outrider.models.dflash import DFlashDrafter
from outrider.models.drafter_config import DrafterConfig
from outrider.models.gemma import GemmaTarget
from outrider.models.registry import load_drafter, load_target, target_config
from outrider.tokenizer import Tokenizer
from outrider.weights.loader import Checkpoint, load_checkpoint, load_safetensors_dir
from outrider.weights.locate import is_name_plan, locate_target
from outrider.weights.name_plan import EVIDENCE, read_name_plan

PROBE_PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
PROBE_TOKENS = 32
MAX_PROBED_BYTES = 4 << 30  # a larger target takes longer to load than a check may take
_META = torch.device("meta")
_DTYPE = torch.bfloat16  # of weights and caches on a GPU


def inspect_kernels(kind: str, device: str) -> dict[str, Any]:
    """Which kernel set this machine gets."""
    place = resolve_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    chosen = select_kernels(kind, dtype=dtype, device=place)
    return {"kernels": chosen.name, "device": str(place), "row_invariant": chosen.row_invariant}


def inspect_target(target: str | None, *, context_length: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """What the target declares, which of its tensors load, and what it takes in bfloat16."""
    checkpoint, model = outlined_target(target, context_length=context_length, progress=progress)
    if not is_name_plan(checkpoint.source):
        Tokenizer.from_file(checkpoint.tokenizer_path)  # LocateError or WeightsError now, not when it is loaded
    config = model.config
    kinds = [layer.kind.value.removesuffix("_attention") for layer in config.layers]
    caches = account_caches(config.layers, context_length=context_length, dtype=_DTYPE)
    held = held_bytes(model)
    return {
        "source": checkpoint.source.name,
        **_evidence(checkpoint.source),
        **({"sha256": checkpoint.source_sha256} if checkpoint.source_sha256 else {}),
        "model_type": config.model_type,
        "layers": f"{len(kinds)} ({kinds.count('sliding')} sliding, {kinds.count('full')} full)",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        **account_weights(checkpoint.tensors, model.skipped_tensors, patterns=config.skipped_tensors),
        "held_in_bf16_bytes": held,
        "context_length": context_length,
        **caches,
        "one_request_bytes": held + caches["cache_bytes"],
    }


def inspect_drafter(
    drafter: str, *, target: str | None, context_length: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """What the drafter declares, causality of each layer included, whether it fits, and what both take together."""
    path = drafter_path(drafter, target=target)
    if path is None:
        return {"drafter": None}
    _, tensors = load_safetensors_dir(path, without_numbers=True)  # what is damaged here is not the target's fault
    checkpoint, model = outlined_target(target, context_length=context_length, progress=progress)
    built = load_drafter(path, model, target_name=checkpoint.source.name, context_length=context_length)
    config = built.config
    caches = account_caches(config.layers, context_length=context_length, dtype=_DTYPE)
    of_target = account_caches(model.config.layers, context_length=context_length, dtype=_DTYPE)
    target_bytes, both_bytes = held_bytes(model), held_bytes(model, built)
    return {
        "drafter": config.name,
        **_evidence(path),
        "block_size": config.block_size,
        "block": f"{config.block_size} slots, {config.max_draft_length} drafts: {config.layout.value}",
        "num_speculative_tokens": config.num_speculative_tokens,
        "target_layer_ids": list(config.target_layer_ids),
        "draft_vocab_size": config.draft_vocab_size,
        "causal_layers": list(config.layer_is_causal),
        "layers": _layers_in_words([layer.kind.value for layer in config.layers], list(config.layer_is_causal)),
        "heads": _heads_in_words(config),
        **account_weights(tensors, built.skipped_tensors, patterns=config.skipped_tensors),
        "held_in_bf16_bytes": both_bytes - target_bytes,
        **_shareable(built, model),
        "context_length": context_length,
        **caches,
        "one_request_with_target_bytes": both_bytes + caches["cache_bytes"] + of_target["cache_bytes"],
    }


def outlined_target(
    target: str | None, *, context_length: int, progress: Callable[[str], None], kernels: Kernels | None = None
) -> tuple[Checkpoint, GemmaTarget]:
    """The target's checkpoint and the model made of it, without numbers; packed as torch does, or `kernels`."""
    checkpoint = load_checkpoint(locate_target(target), progress=progress, without_numbers=True)
    max_positions = target_config(checkpoint).max_positions
    resolve_config(EngineConfig(context_length=context_length), device=_META, max_positions=max_positions)
    chosen = kernels or TorchKernels(_DTYPE, _META)
    model = load_target(checkpoint, kernels=chosen, dtype=_DTYPE, device=_META, context_length=context_length)
    return checkpoint, model


def _evidence(path: Path) -> dict[str, Any]:
    """How names and shapes are known."""
    if not is_name_plan(path):
        return {"evidence": "read: from the files themselves"}
    plan = read_name_plan(path)
    return {"checkpoint": plan.checkpoint, "evidence": f"{plan.evidence}: {EVIDENCE[plan.evidence]}"}


def _shareable(drafter: DFlashDrafter, model: GemmaTarget) -> dict[str, int]:
    """Bytes of tables that loading shares if they are copies of the target's, which only their numbers can tell."""
    own = [table for table in (drafter.embedding, drafter.head) if table is not model.embedding]
    copies = [table.nbytes for table in own if table.shape == model.embedding.shape]
    return {"less_if_tables_are_the_targets_bytes": sum(copies)} if copies else {}


def _layers_in_words(kinds: list[str], is_causal: list[bool]) -> str:
    """For example "5 (4 sliding causal, 1 full bidirectional)"."""
    words = [
        f"{kind.removesuffix('_attention')} {'causal' if causal else 'bidirectional'}"
        for kind, causal in zip(kinds, is_causal, strict=True)
    ]
    counted = ", ".join(f"{number} {word}" for word, number in Counter(words).items())
    return f"{len(words)} ({counted})"


def _heads_in_words(config: DrafterConfig) -> str | None:
    """For example "vanilla Markov of rank 256, confidence"."""
    markov = f"{config.markov.kind.value} Markov of rank {config.markov.rank}" if config.markov else None
    confidence = "confidence" if config.confidence else None
    return ", ".join(head for head in (markov, confidence) if head) or None


def probe_drafting(target: str | None, *, drafter: str, kernels: str, device: str) -> dict[str, Any]:
    """Load both and draft: the acceptance of a text that any drafter can guess."""
    reason = _why_not_probed(locate_target(target), drafter_path(drafter, target=target))
    if reason:
        return {"not_probed": reason}
    llm = load(
        target, drafter=drafter, kernels=kernels, device=device, config=EngineConfig(max_seats=1, context_length=256)
    )
    params = SamplingParams(max_tokens=PROBE_TOKENS)
    result = llm.generate([PROBE_PROMPT], params)[0]
    is_same = llm.without_drafter().generate([PROBE_PROMPT], params)[0].token_ids == result.token_ids
    return {
        "drafter": llm.drafter_name,
        "mean_acceptance_length": metrics.mean_acceptance_length(result.acceptance),
        "same_text_as_plain": is_same,
    }


def _why_not_probed(target: Path, drafter: Path | None) -> str | None:
    plans = [path.name for path in (target, drafter) if path is not None and is_name_plan(path)]
    if plans:
        return f"{' and '.join(plans)}: a name plan has no numbers"
    files = target.glob("*.safetensors") if target.is_dir() else [target]
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > MAX_PROBED_BYTES:
        return f"{target.name} has {num_bytes / 2**30:.1f} GiB of weights; loading them would take more than seconds"
    return None
