"""Every published layout, written from every other that can say the same: equal numbers, equal drafts (T-074, T-075).

Sources are the golden drafters, which their originals' own code saved and ran; so a layout is not only read by the
rule that wrote it: a file of z-lab's, DeepSpec's or speculators' must still draft what the original drafted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError, DrafterMismatchError
from outrider.models.registry import load_drafter, load_target
from outrider.training import convert, files
from outrider.training.convert import ConvertOptions, convert_drafter, read_source
from outrider.training.drafter_layouts import LAYOUTS, forward_pass
from outrider.training.export import export_drafter
from outrider.weights.loader import directory_sha256, load_checkpoint
from tests.models import test_registry_goldens as goldens
from tests.models.test_registry_goldens import CONTEXT_LENGTH, GOLDEN, TOLERANCE
from tests.training import tiny

TARGET = GOLDEN / "zlab-dflash" / "target"
SAYS = {
    "zlab-dflash": {"outrider", "z-lab"},
    "zlab-dflash-causal": {"outrider", "z-lab"},
    "hybrid-root": {"outrider"},
    "deepspec-gemma4-vanilla": {"outrider", "deepspec", "vllm"},
    "deepspec-gemma4-gated": {"outrider", "deepspec"},
    "deepspec-gemma4-rnn": {"outrider", "deepspec"},
    "deepspec-qwen3": {"outrider", "deepspec", "speculators", "vllm"},
    "speculators-dflash": {"speculators"},
    "speculators-dspark": {"speculators"},
}
PAIRS = [(case, layout) for case, layouts in SAYS.items() for layout in sorted(layouts)]


def source_of(case: str) -> Path:
    return GOLDEN / case / "drafter"


def exported(case: str, layout: str, out: Path, **options: Any) -> Path:
    convert_drafter(source_of(case), out, ConvertOptions(layout=layout, **options))
    return out


def target_like(case: str, directory: Path) -> Path | None:
    """A target with the embedding that the case's drafter has a copy of; None where it has none."""
    embedding = load_file(source_of(case) / "model.safetensors").get("embed_tokens.weight")
    if embedding is None:
        return None
    shutil.copytree(TARGET, directory)
    stored = load_file(directory / "model.safetensors")
    (name,) = (name for name in stored if name.endswith("embed_tokens.weight"))
    save_file({**stored, name: embedding}, directory / "model.safetensors")
    return directory


def numbers(directory: Path) -> dict[str, Tensor]:
    return {name: weight.dequantize(torch.float64) for name, weight in read_source(directory).weights.items()}


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_a_layout_that_can_say_it_drafts_what_the_original_drafts(case: str, layout: str, tmp_path: Path) -> None:
    like = target_like(case, tmp_path / "target")
    found = exported(case, layout, tmp_path / "out", target=like)
    before, after = numbers(source_of(case)), numbers(found)
    assert all(torch.equal(after[name], before[name]) for name in before.keys() & after.keys())
    assert before.keys() - after.keys() <= {*read_source(found).config.get("borrowed_tensors", [])}
    options: dict[str, Any] = {"kernels": goldens.KERNELS, "dtype": torch.float64, "device": torch.device("cpu")}
    target = goldens.target_of(case)
    if like is not None:
        target = load_target(load_checkpoint(like), **options, context_length=CONTEXT_LENGTH)
    loaded = load_drafter(found, target, target_name="target", context_length=CONTEXT_LENGTH)
    assert goldens.base_error(loaded, case) < TOLERANCE
    if case in goldens.MARKOV_CASES:
        assert goldens.corrected_error(loaded, case) < TOLERANCE
    assert forward_pass(loaded.config) == forward_pass(goldens.drafter_of(case).config)


@pytest.mark.parametrize("case", SAYS)
def test_what_a_layout_cannot_say_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    for layout in LAYOUTS.keys() - SAYS[case]:
        with pytest.raises(ConfigError, match=f"layout {layout} cannot say"):
            exported(case, layout, tmp_path / "out", target=TARGET)
    assert not list(tmp_path.iterdir())


def test_packed_weights_stay_packed_in_our_layout_and_become_exact_numbers_in_others(tmp_path: Path) -> None:
    trained = trained_drafter(tmp_path, draft_vocab_size=tiny.VOCAB)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    convert_drafter(trained, ours, ConvertOptions(layout="outrider"))
    convert_drafter(trained, theirs, ConvertOptions(layout="z-lab"))
    first, second = load_file(trained / "model.safetensors"), load_file(ours / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_source(ours).config["quantization_config"] == read_source(trained).config["quantization_config"]
    plain = load_file(theirs / "model.safetensors")
    assert plain["fc.weight"].dtype == torch.float32
    assert "quantization_config" not in read_source(theirs).config
    expected = first["fc.weight"].view(32, -1, 32).double() * first["fc.weight_scale"].double()[..., None]
    assert torch.equal(plain["fc.weight"].double(), expected.view(32, 64))
    rounded = tmp_path / "rounded"
    convert_drafter(trained, rounded, ConvertOptions(layout="z-lab", dtype="bfloat16"))
    assert load_file(rounded / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert read_source(rounded).config["dtype"] == "bfloat16"


def trained_drafter(tmp_path: Path, **shape: Any) -> Path:
    """What `train run` leaves of the tiny recipe."""
    export_drafter(tiny.trainer(tiny.recipe(drafter=shape)), tmp_path / "trained", record={"schema": 1})
    return tmp_path / "trained"


def unscaled(trained: Path, **changes: Any) -> Path:
    """The same drafter, said to read unscaled embeddings."""
    path = trained / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["scale_block_embeddings"] = False
    path.write_text(json.dumps({**config, **changes}))
    return trained


def test_a_reduced_vocabulary_takes_its_head_from_the_target(tmp_path: Path) -> None:
    """T-074: borrowed rows are the target's real numbers; speculators and vLLM want them in the file."""
    target = tiny.write_target(tmp_path / "target")
    trained = unscaled(trained_drafter(tmp_path), layer_types=["full_attention"] * 2, is_causal=False)
    with pytest.raises(ConfigError, match=r"borrows lm_head.weight of its target.*--target"):
        convert_drafter(trained, tmp_path / "none", ConvertOptions(layout="speculators"))
    table = tiny.tensors(norm_offset=1.0)["model.embed_tokens.weight"]
    for layout, id_type in (("speculators", torch.int64), ("vllm", torch.int64)):
        found = convert_drafter(trained, tmp_path / layout, ConvertOptions(layout=layout, target=target))
        tensors = load_file(tmp_path / layout / "model.safetensors")
        ids = tensors["d2t"] + torch.arange(64)
        assert tensors["d2t"].dtype == id_type
        assert torch.equal(tensors["t2d"].nonzero().squeeze(1), ids.sort().values)
        assert torch.equal(tensors["lm_head.weight"], table[ids])
        assert found.borrowed == ("embed_tokens.weight",)
        assert read_source(tmp_path / layout).config["borrowed_tensors"] == ["embed_tokens.weight"]
        assert read_source(tmp_path / layout).config["draft_vocab_size"] == 64


def test_scaled_embeddings_are_named_where_readers_feed_raw_ones(tmp_path: Path) -> None:
    trained = trained_drafter(tmp_path)
    for layout in ("speculators", "vllm"):
        with pytest.raises(ConfigError, match=r"block embeddings are scaled.*train it with unscaled"):
            convert_drafter(trained, tmp_path / "out", ConvertOptions(layout=layout))


def test_a_copy_of_the_targets_tables_is_left_out_and_another_table_is_kept_or_refused(tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(source_of("zlab-dflash"), copied)
    tensors = load_file(copied / "model.safetensors")
    table = load_file(TARGET / "model.safetensors")
    (embedding,) = (values for name, values in table.items() if name.endswith("embed_tokens.weight"))
    save_file({**tensors, "embed_tokens.weight": embedding}, copied / "model.safetensors")
    left = convert_drafter(copied, tmp_path / "left", ConvertOptions(layout="z-lab", target=TARGET))
    assert left.borrowed == ("embed_tokens.weight", "lm_head.weight")
    with pytest.raises(ConfigError, match="not known to be the target's: give --target"):
        convert_drafter(copied, tmp_path / "out", ConvertOptions(layout="z-lab"))
    save_file({**tensors, "embed_tokens.weight": embedding * 2}, copied / "model.safetensors")
    with pytest.raises(ConfigError, match="this one is not the target's"):
        convert_drafter(copied, tmp_path / "out", ConvertOptions(layout="z-lab", target=TARGET))
    kept = convert_drafter(copied, tmp_path / "kept", ConvertOptions(layout="outrider", target=TARGET))
    assert kept.borrowed == ("lm_head.weight",)
    assert torch.equal(load_file(tmp_path / "kept" / "model.safetensors")["embed_tokens.weight"], embedding * 2)


def test_markov_rows_by_draft_id_become_rows_by_target_id(tmp_path: Path) -> None:
    """Design §4.5: our w1 may have one row for all tokens outside the vocabulary; others read one a token."""
    small = tmp_path / "small"
    shutil.copytree(source_of("speculators-dspark"), small)
    tensors = load_file(small / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(64)
    w1 = torch.randn(65, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({**tensors, "markov_head.markov_w1.weight": w1}, small / "model.safetensors")
    convert_drafter(small, tmp_path / "out", ConvertOptions(layout="speculators"))
    rows = load_file(tmp_path / "out" / "model.safetensors")["markov_head.markov_w1.weight"]
    assert torch.equal(rows[ids], w1[:64])
    outside = torch.ones(96, dtype=torch.bool)
    outside[ids] = False
    assert torch.equal(rows[outside], w1[64].expand(32, 8))
    drafters = [
        load_drafter(path, goldens.target_of("speculators-dspark"), target_name="t", context_length=CONTEXT_LENGTH)
        for path in (small, tmp_path / "out")
    ]
    latent = [drafter.markov.embed(torch.arange(96)) for drafter in drafters if drafter.markov is not None]
    assert torch.equal(*latent)


def test_wrong_words_folders_and_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout 'dflash' is not known. Use one of outrider, z-lab"):
        exported("zlab-dflash", "dflash", tmp_path / "out")
    with pytest.raises(ConfigError, match="dtype 'int8' is not known"):
        exported("zlab-dflash", "z-lab", tmp_path / "out", dtype="int8")
    with pytest.raises(ConfigError, match="exists, and a drafter is never overwritten"):
        exported("zlab-dflash", "z-lab", tmp_path)
    other = tiny.write_target(tmp_path / "target")
    with pytest.raises(DrafterMismatchError, match="does not fit target target"):
        exported("zlab-dflash", "z-lab", tmp_path / "out", target=other)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "save_file", full)
    with pytest.raises(ConfigError, match=r"drafter .*out could not be written: .*No space left.*make room"):
        exported("zlab-dflash", "z-lab", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_the_disk_made_of_it_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        save_file({**tensors, "fc.weight": tensors["fc.weight"] * 2}, path, **options)

    monkeypatch.setattr(convert, "save_file", wrong)
    with pytest.raises(convert.WeightsError, match=r"tensor fc.weight of .* is not what was written"):
        exported("zlab-dflash", "z-lab", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert files.write_folder is convert.write_folder


def test_a_card_lies_beside_the_weights(tmp_path: Path) -> None:
    found = exported("zlab-dflash", "z-lab", tmp_path / "out", licence="gemma")
    assert sorted(path.name for path in found.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (found / "README.md").read_text(encoding="utf-8")
    assert 'license: "gemma"' in card
    assert directory_sha256(source_of("zlab-dflash")) in card
    assert "Not recorded: no training_record.json" in card
    convert_drafter(trained_drafter(tmp_path), tmp_path / "ours", ConvertOptions(layout="outrider"))
    assert "The recipe:" in (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "ours" / "training_record.json").read_text()) == {"schema": 1}


def test_the_result_says_what_was_written(tmp_path: Path) -> None:
    options = ConvertOptions(layout="deepspec")
    found = asdict(convert_drafter(source_of("deepspec-qwen3"), tmp_path / "out", options))
    assert found["layout"] == "deepspec"
    assert found["borrowed"] == ()
    assert found["num_tensors"] == len(load_file(tmp_path / "out" / "model.safetensors"))
