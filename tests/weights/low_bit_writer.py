"""Write weights in the low-bit layouts, by the book: what a checkpoint's own tools would store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def int4_config(group_size: int = 32, *, symmetric: bool = True) -> dict[str, Any]:
    """pack-quantized."""
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": symmetric}
    return compressed_tensors("pack-quantized", **args)


def float8_config(strategy: str = "channel", **more: Any) -> dict[str, Any]:
    """float-quantized."""
    return compressed_tensors("float-quantized", num_bits=8, type="float", strategy=strategy, symmetric=True, **more)


CONFIGS: dict[str, dict[str, Any]] = {
    "int4": int4_config(),
    "int4 asymmetric": int4_config(symmetric=False),
    "float8": float8_config(),
    "nvfp4": compressed_tensors("nvfp4-pack-quantized", **NVFP4_ARGS),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "modelopt float8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
}


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Whole numbers from 0 to 15 [out, in] -> int32 [out, ceil(in / 8)], the first in the lowest bits."""
    words = torch.zeros(numbers.shape[0], -(-numbers.shape[1] // 8), dtype=torch.int64)
    for i in range(numbers.shape[1]):
        words[:, i // 8] |= numbers[:, i].long() << 4 * (i % 8)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def stored(layout: str, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of one weight `name` [out, in] in a layout of CONFIGS."""
    rows, columns = weight.shape
    if layout.startswith("int4"):
        grouped = weight.float().view(rows, -1, 32)
        zeros = torch.randint(-3, 4, grouped.shape[:2], generator=torch.Generator().manual_seed(9))
        zeros = zeros if layout == "int4 asymmetric" else torch.zeros_like(zeros)
        scales = (grouped.abs().amax(-1) / 4).to(torch.bfloat16)
        q = (grouped / scales[..., None].float()).round().long() + zeros[..., None]
        found = {"packed": pack_nibbles((q.clamp(-8, 7) + 8).view(rows, columns)), "scale": scales}
        if layout == "int4 asymmetric":
            found["zero_point"] = pack_nibbles((zeros + 8).T).T.contiguous()
        return {f"{name}_{part}": each for part, each in found.items()} | {
            f"{name}_shape": torch.tensor([rows, columns])
        }
    if layout == "float8":
        scales = (weight.float().abs().amax(-1, keepdim=True) / 448).to(torch.bfloat16)
        return {name: (weight.float() / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
    if layout == "modelopt float8":
        scale = weight.float().abs().max() / 448
        return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    grouped = weight.float().view(rows, -1, 16)
    global_scale = weight.float().abs().max() / (6 * 448)
    scales = (grouped.abs().amax(-1) / (6 * global_scale)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    ratios = grouped / (scales.float() * global_scale)[..., None]
    nibbles = (ratios.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (ratios < 0)
    nibbles = nibbles.view(rows, columns)
    packed = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    if layout == "modelopt":
        return {name: packed, f"{name}_scale": scales, f"{name}_scale_2": global_scale}
    return {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_global_scale": 1 / global_scale.view(1)}


def write_low_bit_target(layout: str, source: Path, directory: Path) -> Path:
    """A target's directory with every `*_proj.weight` in a layout of CONFIGS; the rest as it was."""
    shutil.copytree(source, directory)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors |= stored(layout, name, weight) if name.endswith("_proj.weight") else {name: weight}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[layout]}))
    return directory
