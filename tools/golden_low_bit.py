"""Make tests/golden/low_bit/: small matrices that the vendors' own libraries quantised, packed and unpacked again.

Each fixture is a safetensors file: the stored tensors under a checkpoint's names, and `expected.<weight>`, what the
library makes of them. low_bit.json beside them declares each fixture's quantisation and names library and version. Run
by `make golden`; tests only read the result.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "low_bit"
MODULE = "model.layers.0.mlp.gate_proj"
EXPERTS = "model.layers.0.experts.gate_up_proj"
NUM_EXPERTS = 3

INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers in bfloat16; outputs differ in size, so that a scale in the wrong place shows."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.linspace(0.05, 0.4, shape[-2])[:, None]).to(torch.bfloat16)


def blocks(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """A weight [out, in] as [scales over out, scales over in, numbers that share one]; short blocks are padded by 0."""
    rows, columns = weight.shape
    extents = {"group": (1, args.group_size), "tensor_group": (1, args.group_size), "channel": (1, columns)}
    height, width = args.block_structure or extents.get(str(args.strategy), (rows, columns))
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    return tiles.movedim(1, 2).flatten(2)


def compress(weight: Tensor, args: QuantizationArgs, *, layout: str) -> dict[str, Tensor]:
    """What compressed-tensors stores of a weight [out, in], and what it unpacks it to."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor = BaseCompressor.load_from_registry(layout)
    state: dict[str, Tensor] = {"weight": weight}
    if layout == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    tiles = blocks(weight, args)
    scale, zero_point = calculate_qparams(
        tiles.amin(-1), tiles.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    state["weight_scale"] = scale.reshape(-1) if args.strategy == "tensor" else scale
    if not args.symmetric:
        state["weight_zero_point"] = zero_point
    stored = compressor.compress(state, scheme)
    return {**stored, "expected": compressor.decompress(dict(stored), scheme)["weight"]}


def dense(args: dict[str, Any], *, layout: str, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """One Linear."""
    found = compress(numbers(*shape, seed=seed), QuantizationArgs(**args), layout=layout)
    expected = found.pop("expected")
    return {**{f"{MODULE}.{name}": each for name, each in found.items()}, f"expected.{MODULE}.weight": expected}


def fused(args: dict[str, Any], *, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Experts in one tensor: every matrix compressed by itself, the words packed again as a stack."""
    each = [
        compress(numbers(*shape, seed=seed + i), QuantizationArgs(**args), layout="pack-quantized")
        for i in range(NUM_EXPERTS)
    ]
    stacks = {name: torch.stack([found[name] for found in each]) for name in each[0] if name != "weight_shape"}
    values = unpack_from_int32(stacks["weight_packed"], 4, torch.Size((NUM_EXPERTS, *shape)))
    assert torch.equal(pack_to_int32(values, 4), stacks["weight_packed"])
    expected = stacks.pop("expected")
    return {
        **{f"{EXPERTS}_{name.removeprefix('weight_')}": stack for name, stack in stacks.items()},
        f"expected.{EXPERTS}": expected,
    }


def modelopt(*, shape: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """One Linear in ModelOpt's NVFP4."""
    weight = numbers(*shape, seed=seed)
    packed, scale, scale_2 = NVFP4QTensor.quantize(weight, block_size=16)
    expected = packed.dequantize(dtype=torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return {
        f"{MODULE}.weight": packed._quantized_data,
        f"{MODULE}.weight_scale": scale,
        f"{MODULE}.weight_scale_2": scale_2,
        f"{MODULE}.input_scale": torch.tensor(0.01),
        f"expected.{MODULE}.weight": expected,
    }


def declared(layout: str, args: dict[str, Any]) -> dict[str, Any]:
    """A config's quantization_config, as compressed-tensors writes it."""
    weights = {**QuantizationArgs(**args).model_dump(mode="json"), **args}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*vision_tower.*"],
    }


def main() -> None:
    """Write the fixtures."""
    made: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
    for group_size, shape in ((32, (12, 96)), (128, (12, 256))):
        for is_symmetric in (True, False):
            args = {**INT4, "symmetric": is_symmetric, "group_size": group_size}
            name = f"int4_{group_size}_{'symmetric' if is_symmetric else 'asymmetric'}"
            config = declared("pack-quantized", args)
            made[name] = config, dense(args, layout="pack-quantized", shape=shape, seed=1)
            made[f"{name}_fused"] = config, fused(args, shape=shape, seed=2)
    for strategy, more in (("tensor", {}), ("channel", {}), ("block", {"block_structure": [16, 32]})):
        args = {**FLOAT8, "strategy": strategy, **more}
        tensors = dense(args, layout="float-quantized", shape=(24, 80), seed=5)
        made[f"float8_{strategy}"] = declared("float-quantized", args), tensors
    tensors = dense(NVFP4, layout="nvfp4-pack-quantized", shape=(12, 96), seed=6)
    made["nvfp4_compressed_tensors"] = declared("nvfp4-pack-quantized", NVFP4), tensors
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]}
    made["nvfp4_modelopt"] = config, modelopt(shape=(12, 96), seed=7)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (_, tensors) in made.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, FOLDER / f"{name}.safetensors")
    libraries = {name: version(name) for name in ("compressed-tensors", "nvidia-modelopt", "torch")}
    facts = {
        "made_by": "tools/golden_low_bit.py",
        **libraries,
        "quantization_configs": {name: config for name, (config, _) in made.items()},
    }
    (FOLDER / "low_bit.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
