"""The embedded default, loaded once for all tests that need it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import outrider
from outrider.weights.loader import load_safetensors_dir
from outrider.weights.locate import embedded_drafter


@functools.cache
def embedded_llm() -> outrider.LLM:
    """Gemma 3 270M with its shipped drafter, two seats."""
    return outrider.load(config=outrider.EngineConfig(max_seats=2, context_length=512))


@functools.cache
def plain_llm() -> outrider.LLM:
    """The same weights without a drafter."""
    return embedded_llm().without_drafter()


def unpacked_drafter(folder: Path) -> Path:
    """A copy of the shipped drafter with plain numbers, bfloat16 as most are published."""
    config, tensors = load_safetensors_dir(embedded_drafter())
    folder.mkdir()
    plain = {
        name: tensor.values.clone() if name == "d2t" else tensor.dequantize(torch.bfloat16)  # type: ignore[union-attr]
        for name, tensor in tensors.items()
    }
    save_file(plain, folder / "model.safetensors")
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder
