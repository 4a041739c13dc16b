"""T-055: a block of zeros has a finite positive scale and comes back as zeros; bad scales are refused by name.

Seen red: quantising without the scale of 1, the loader without its check of scales.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import WeightsError
from outrider.models.gemma import GemmaTarget
from outrider.weights.loader import Checkpoint
from outrider.weights.packed import quantize_int8
from outrider.weights.safetensors_dir import load_safetensors_dir
from tests.cases.common import fresh_caches, text_rows
from tests.toy import CPU, SOURCE, toy_checkpoint, toy_target, toy_target_config
from tests.weights.low_bit_writer import CONFIGS, stored

NAME = "model.layers.0.mlp.up_proj.weight"
WEIGHT = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
ONE_SCALE = "modelopt float8"  # for all of a matrix
GLOBAL_SCALES = {"nvfp4": f"{NAME}_global_scale", "modelopt": f"{NAME}_scale_2"}


@pytest.mark.parametrize(
    "numbers",
    [
        torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, -2.0, 3.0, 4.0]]),
        torch.zeros(3, 8),
        torch.full((2, 8), 1e-40),
    ],
)
def test_t055_zero_blocks_come_back_as_zeros(numbers: torch.Tensor) -> None:
    weight = quantize_int8("w", numbers, group_size=4)
    assert torch.isfinite(weight.scales).all()
    assert (weight.scales > 0).all()
    back = weight.dequantize(torch.float32)
    assert torch.isfinite(back).all()
    assert back[:, :4].tolist() == [[0.0] * 4] * len(numbers)
    assert (back - numbers).abs().max() <= 0.02


def refusal(layout: str, part: str, scales: torch.Tensor, folder: Path) -> str:
    """What the loader says of a finished file with other scales."""
    folder.mkdir()
    save_file(stored(layout, NAME, WEIGHT) | {part: scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CONFIGS[layout]}))
    with pytest.raises(WeightsError) as caught:
        load_safetensors_dir(folder)[1][NAME]
    return str(caught.value)


@pytest.mark.parametrize("layout", [name for name in CONFIGS if name not in (*GLOBAL_SCALES, ONE_SCALE)])
def test_t055_three_bad_scales_are_listed(layout: str, tmp_path: Path) -> None:
    part = f"{NAME}_scale"
    scales = stored(layout, NAME, WEIGHT)[part].clone()
    scales.view(-1)[:5] = torch.tensor([1.0, 0.0, float("nan"), float("inf"), -1.0])
    message = refusal(layout, part, scales, tmp_path / "m")
    assert f"tensor {part} has scales that are not finite and above zero" in message
    assert f"1 zero, 1 negative, 1 NaN, 1 infinite of {scales.numel()}, the first at [1, 2, 3, 4]" in message


@pytest.mark.parametrize(("bad", "kind"), [(0.0, "zero"), (float("nan"), "NaN"), (-1.0, "negative")])
def test_t055_the_one_scale_of_a_matrix(bad: float, kind: str, tmp_path: Path) -> None:
    message = refusal(ONE_SCALE, f"{NAME}_scale", torch.tensor(bad), tmp_path / "m")
    assert f"tensor {NAME}_scale has scales that are not finite and above zero: 1 {kind} of 1" in message


@pytest.mark.parametrize("layout", GLOBAL_SCALES)
@pytest.mark.parametrize(("bad", "kind"), [(0.0, "zero"), (float("nan"), "NaN"), (-1.0, "negative")])
def test_t055_block_scales_of_nvfp4(layout: str, bad: float, kind: str, tmp_path: Path) -> None:
    part = f"{NAME}_scale"
    scales = stored(layout, NAME, WEIGHT)[part].float()
    scales[2, 1] = bad
    message = refusal(layout, part, scales.to(torch.float8_e4m3fn), tmp_path / "m")
    assert f"tensor {part} has scales that are not finite and above zero: 1 {kind} of 32, the first at [9]" in message


@pytest.mark.parametrize("layout", GLOBAL_SCALES)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -2.0])
def test_t055_global_scales_of_nvfp4(layout: str, bad: float, tmp_path: Path) -> None:
    part = GLOBAL_SCALES[layout]
    message = refusal(layout, part, torch.tensor([bad]), tmp_path / "m")
    assert f"tensor {part} has scales that are not finite and above zero: 1 " in message


def test_t055_zero_rows_in_the_embedding_give_finite_logits() -> None:
    config = toy_target_config()
    checkpoint = toy_checkpoint(config)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].dequantize(torch.float64)
    embedding[[3, 7]] = 0.0
    packed = quantize_int8("model.embed_tokens.weight", embedding, group_size=32)
    tensors = {**checkpoint.tensors, packed.name: packed}
    target = GemmaTarget(
        config,
        Checkpoint({}, tensors, config.norm_offset, SOURCE, source=SOURCE, source_sha256=""),
        kernels=toy_target().kernels,
        dtype=torch.float64,
        device=CPU,
        context_length=64,
    )
    output = target.forward(text_rows([3, 7, 3, 20]), fresh_caches(config.layers))
    assert torch.isfinite(target.logits(output.hidden)).all()
