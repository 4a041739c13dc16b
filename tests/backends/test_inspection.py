"""What doctor finds: on the embedded default, on directories of files, and on name plans at full size.

Seen red: a name that `skipped_tensors` lacks, a layer's k_proj not claimed, a window one position longer.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.backends import inspection
from outrider.backends.local import make_engine
from outrider.engine.engine import EngineConfig
from outrider.errors import ConfigError, DrafterMismatchError, LocateError, UnsupportedModelError, WeightsError
from outrider.weights import loader, safetensors_file
from outrider.weights.locate import embedded_drafter
from tests.embedded import embedded_llm
from tests.plans import TARGETS, changed_plan, plan_path
from tests.training import tiny

KIB = 1024


def inspect_target(target: Path | None, *, context_length: int = 4096) -> dict[str, Any]:
    name = None if target is None else str(target)
    return inspection.inspect_target(name, context_length=context_length, progress=lambda _message: None)


def inspect_drafter(drafter: Path | str, *, target: Path | None) -> dict[str, Any]:
    name = None if target is None else str(target)
    return inspection.inspect_drafter(str(drafter), target=name, context_length=4096, progress=lambda _message: None)


def test_kernels_of_a_cpu() -> None:
    found = inspection.inspect_kernels("torch", "cpu")
    assert found == {"kernels": "torch", "device": "cpu", "row_invariant": False}


def test_target_declares_what_it_is() -> None:
    found = inspect_target(None)
    assert found["layers"] == "18 (15 sliding, 3 full)"
    assert found["vocab_size"] == 262144
    assert found["tensors_loaded"] == 236
    assert found["sha256"].startswith("a5fd3b62")
    assert found["packed_weights"] == {"int8 blocks": 127}


def test_drafter_declares_causality_of_each_layer() -> None:
    found = inspect_drafter("auto", target=None)
    assert found["drafter"] == embedded_drafter().name
    assert all(isinstance(causal, bool) for causal in found["causal_layers"])
    assert found["draft_vocab_size"] == 32768
    assert found["held_in_bf16_bytes"] > 2 * 32768 * 640  # rows of the target's head, taken without their ids
    assert inspect_drafter("auto", target=Path("/some/target")) == {"drafter": None}


def test_a_target_without_a_tokenizer_is_a_problem_before_it_is_loaded(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "tiny")
    (path / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(LocateError, match=r"tokenizer\.json does not exist"):
        inspect_target(path, context_length=64)


def test_tables_that_may_be_the_targets_are_told_apart() -> None:
    """DSpark files bring copies of the target's table twice; without numbers nobody can see that they are."""
    found = inspect_drafter(plan_path("dspark_gemma4_12b_block7"), target=plan_path("gemma-4-12B-it"))
    assert found["less_if_tables_are_the_targets_bytes"] == 2 * 262144 * 3840 * 2
    plain = inspect_drafter(plan_path("gemma-4-31B-it-DFlash"), target=plan_path("gemma-4-31B-it"))
    assert "less_if_tables_are_the_targets_bytes" not in plain


def test_a_damaged_drafter_is_named(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((embedded_drafter() / file).read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"model\.safetensors|config\.json"):
        inspect_drafter(tmp_path, target=Path("/some/target"))


def test_probe_drafts_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "load", lambda *_, **__: embedded_llm())
    found = inspection.probe_drafting(None, drafter="auto", kernels="auto", device="cpu")
    assert found["same_text_as_plain"] is True
    assert found["mean_acceptance_length"] > 1.0
    assert make_engine(embedded_llm().engine.target, None, None, EngineConfig()).proposer is None


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="Set OUTRIDER_CACHE to a directory"):
        inspect_target(None)
    with pytest.raises(ConfigError, match="Set OUTRIDER_CACHE to a directory"):
        inspection.inspect_kernels("auto", "cpu")


# (tensors loaded, weights packed, sliding and full layers, KiB a token that grow)
FULL_SIZES: dict[str, tuple[int, int, str, int]] = {
    "gemma-4-31B-it": (832, 0, "60 (50 sliding, 10 full)", 80),
    "gemma-4-26B-A4B-it": (657, 0, "30 (25 sliding, 5 full)", 20),
    "gemma-4-12B-it": (666, 0, "48 (40 sliding, 8 full)", 16),
    "gemma-4-E4B-it": (665, 0, "42 (35 sliding, 7 full)", 16),
    "gemma-4-E2B-it": (540, 0, "35 (28 sliding, 7 full)", 6),
    "gemma-4-31B-it-qat-w4a16-ct": (1652, 410, "60 (50 sliding, 10 full)", 80),
    "gemma-4-12B-it-qat-w4a16-ct": (1322, 328, "48 (40 sliding, 8 full)", 16),
    "gemma-4-E4B-it-qat-w4a16-ct": (1351, 343, "42 (35 sliding, 7 full)", 16),
    "gemma-4-E2B-it-qat-w4a16-ct": (1092, 276, "35 (28 sliding, 7 full)", 6),
    "gemma-4-26B-A4B-it-AWQ-4bit": (1127, 265, "30 (25 sliding, 5 full)", 20),
    "Gemma-4-31B-IT-NVFP4": (1192, 180, "60 (50 sliding, 10 full)", 80),
    "Gemma-4-26B-A4B-NVFP4": (35157, 11520, "30 (25 sliding, 5 full)", 20),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_full_size_target_loads_each_tensor_once(name: str) -> None:
    num_loaded, num_packed, layers, kib_per_token = FULL_SIZES[name]
    found = inspect_target(plan_path(name))
    assert found["evidence"] == "derived: names are derived, not read from the real checkpoint"
    assert (found["tensors_loaded"], found["layers"]) == (num_loaded, layers)
    assert sum(found["packed_weights"].values()) == num_packed
    assert found["cache_bytes_per_token"] == kib_per_token * KIB  # formats.md §1.2
    groups = set(found["tensors_skipped"])
    assert "model.embed_vision.*" in groups
    assert groups <= {
        "model.vision_tower.*",
        "model.embed_vision.*",
        "model.audio_tower.*",
        "model.embed_audio.*",
        "*.input_scale",
        *(f"model.language_model.layers.*.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm")),
    }


def test_memory_of_a_full_size_target() -> None:
    found = inspect_target(plan_path("gemma-4-31B-it"))
    window = 800 * KIB * (1024 + EngineConfig().max_rows)  # formats.md §1.2
    assert found["cache_window_bytes"] == window
    assert found["cache_bytes"] == window + 80 * KIB * 4096
    assert found["one_request_bytes"] == found["held_in_bf16_bytes"] + found["cache_bytes"]
    assert abs(found["held_in_bf16_bytes"] / found["stored_bytes"] - 1) < 0.001  # norms in float32, rotary tables
    assert found["tensors_skipped"] == {"model.embed_vision.*": 1, "model.vision_tower.*": 355}


@pytest.mark.parametrize(
    ("drafter", "target", "num_tensors", "heads"),
    [
        ("gemma-4-31B-it-DFlash", "gemma-4-31B-it", 58, None),
        ("gemma-4-31B-it-DFlash", "Gemma-4-31B-IT-NVFP4", 58, None),
        ("gemma-4-26B-A4B-it-DFlash", "gemma-4-26B-A4B-it-AWQ-4bit", 58, None),
        ("DSpark-Gemma-4-31B-draft", "Gemma-4-31B-IT-NVFP4", 60, "vanilla Markov of rank 256"),
        ("DSpark-Gemma-4-31B-draft-backbone-only", "gemma-4-31B-it", 58, None),
    ],
)
def test_a_full_size_drafter(drafter: str, target: str, num_tensors: int, heads: str | None) -> None:
    found = inspect_drafter(plan_path(drafter), target=plan_path(target))
    assert found["layers"] == "5 (4 sliding causal, 1 full bidirectional)"
    assert (found["block"], found["heads"]) == ("16 slots, 15 drafts: same position", heads)
    assert (found["tensors_loaded"], found["tensors_skipped"]) == (num_tensors, {})
    assert found["cache_bytes_per_token"] == 2 * 8 * 128 * 2
    of_target = inspect_target(plan_path(target))
    own = found["held_in_bf16_bytes"] + found["cache_bytes"]
    assert abs(found["held_in_bf16_bytes"] / found["stored_bytes"] - 1) < 0.01  # norms in float32, rotary tables
    assert found["one_request_with_target_bytes"] == of_target["one_request_bytes"] + own
    is_read = not drafter.startswith("DSpark")
    assert found["evidence"].startswith("read: " if is_read else "derived: names are derived")


def test_a_full_size_dspark_drafter() -> None:
    found = inspect_drafter(plan_path("dspark_gemma4_12b_block7"), target=plan_path("gemma-4-12B-it"))
    assert found["layers"] == "5 (5 full bidirectional)"
    assert (found["block"], found["heads"]) == (
        "7 slots, 7 drafts: next position",
        "vanilla Markov of rank 256, confidence",
    )
    assert (found["tensors_loaded"], found["tensors_skipped"]) == (74, {})
    assert found["evidence"].startswith("read: ")
    assert found["cache_bytes_per_token"] == 5 * 2 * 512 * 2


def test_a_drafter_of_another_target_is_refused() -> None:
    with pytest.raises(DrafterMismatchError, match=r"hidden_size is 5376, the target's is 2816"):
        inspect_drafter(plan_path("gemma-4-31B-it-DFlash"), target=plan_path("gemma-4-26B-A4B-it"))


LAYER = "model.language_model.layers"
ALL_31B = "{0-59}"
EXPERTS = f"{LAYER}.{{0-29}}.experts.{{0-127}}"
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "missing": (
        "gemma-4-31B-it",
        {f"{LAYER}.{ALL_31B}.layer_scalar": None},
        rf"tensor {LAYER}\.0\.layer_scalar is missing",
    ),
    "superfluous": (
        "gemma-4-31B-it",
        {f"{LAYER}.5.self_attn.v_proj.weight": ["BF16", [2048, 5376]]},
        rf"tensors that this model does not use: {LAYER}\.5\.self_attn\.v_proj\.weight",
    ),
    "a head of its own": (
        "gemma-4-12B-it",
        {"lm_head.weight": ["BF16", [262144, 3840]]},
        r"tensors that this model does not use: lm_head\.weight",
    ),
    "mis-shaped": (
        "gemma-4-31B-it",
        {f"{LAYER}.{ALL_31B}.mlp.down_proj.weight": ["BF16", [21504, 5376]]},
        rf"tensor {LAYER}\.0\.mlp\.down_proj\.weight of .* has shape \(21504, 5376\), but its config needs",
    ),
    "scale of another group": (
        "gemma-4-12B-it-qat-w4a16-ct",
        {f"{LAYER}.{{0-47}}.mlp.up_proj.weight_scale": ["BF16", [15360, 30]]},
        rf"tensor {LAYER}\.0\.mlp\.up_proj\.weight_scale has shape \(15360, 30\), but .* in groups of 32",
    ),
    "scale missing": (
        "Gemma-4-31B-IT-NVFP4",
        {f"{LAYER}.{ALL_31B}.mlp.down_proj.weight_scale_2": None},
        rf"tensor {LAYER}\.0\.mlp\.down_proj\.weight is uint8, but \S+\.0\.mlp\.down_proj\.weight_scale_2 is missing",
    ),
    "an expert missing": (
        "Gemma-4-26B-A4B-NVFP4",
        {f"{EXPERTS}.up_proj.{part}": None for part in ("weight", "weight_scale", "weight_scale_2")},
        rf"tensor {LAYER}\.0\.experts\.0\.up_proj\.weight is missing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_does_not_fit_its_config_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, tensors, message = CASES[case]
    with pytest.raises(WeightsError, match=message):
        inspect_target(changed_plan(name, tmp_path / "plan", tensors=tensors))


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("name", "declared", "message"),
    [
        ("gemma-4-12B-it-qat-w4a16-ct", None, r"tensor \S+_packed .*no quantization_config"),
        ("gemma-4-12B-it", {**MODELOPT, "quant_algo": "FP8"}, r"declares FP8 weights, but has no tensor"),
        (
            "Gemma-4-31B-IT-NVFP4",
            {**MODELOPT, "ignore": ["*.mlp.up_proj"]},
            rf"tensor {LAYER}\.0\.mlp\.up_proj\.weight is packed, but the configuration lists its module",
        ),
    ],
)
def test_a_plan_whose_layout_is_not_the_declared_one_is_refused_by_name(
    name: str, declared: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    plan = changed_plan(name, tmp_path / "plan", config={"quantization_config": declared})
    with pytest.raises(WeightsError, match=message):
        inspect_target(plan)


def test_a_context_beyond_the_targets_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context_length=262145, but the target knows 262144 positions"):
        inspect_target(plan_path("gemma-4-31B-it"), context_length=262145)


def test_a_directory_is_neither_read_nor_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tensor was read")

    path = tiny.write_target(tmp_path / "tiny")
    monkeypatch.setattr(safetensors_file, "safe_open", refuse)
    monkeypatch.setattr(loader, "file_sha256", refuse)
    found = inspect_target(path, context_length=64)
    assert found["evidence"] == "read: from the files themselves"
    assert found["tensors_loaded"] == 2 + 13 * tiny.NUM_LAYERS
    assert "sha256" not in found


def test_drafting_is_probed_only_where_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(inspection, "MAX_PROBED_BYTES", 1000)
    small = tiny.write_target(tmp_path / "tiny")
    plan = plan_path("gemma-4-31B-it-DFlash")
    for target, drafter, reason in (
        (plan_path("gemma-4-31B-it"), "auto", "gemma-4-31B-it: a name plan has no numbers"),
        (small, str(plan), "gemma-4-31B-it-DFlash: a name plan has no numbers"),
        (small, "auto", "tiny has 0.0 GiB of weights; loading them would take more than seconds"),
    ):
        found = inspection.probe_drafting(str(target), drafter=drafter, kernels="auto", device="cpu")
        assert found == {"not_probed": reason}


def test_a_model_type_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    plan = changed_plan("gemma-4-31B-it", tmp_path / "plan", config={"model_type": "llama"})
    with pytest.raises(UnsupportedModelError, match=r"model_type 'llama'"):
        inspect_target(plan)


def test_a_plan_copied_beside_files_is_not_one(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "tiny")
    shutil.copy(plan_path("gemma-4-31B-it") / "tensors.json", path)
    assert inspect_target(path, context_length=64)["evidence"] == "read: from the files themselves"
