"""A drafter from one published layout to another: whatever our loaders read, written so that others read it too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError, WeightsError
from outrider.models.dflash import select_rows
from outrider.models.drafter_config import DrafterConfig, check_drafter
from outrider.models.registry import drafter_config, target_config
from outrider.training.drafter_layouts import About, Layout, Tables, find_layout, layout_config
from outrider.training.files import write_folder
from outrider.training.model_card import CardFacts, model_card
from outrider.weights.file_head import json_object
from outrider.weights.loader import Checkpoint, directory_sha256, load_checkpoint, load_safetensors_dir
from outrider.weights.packed import DenseWeight, PackedWeight
from outrider.weights.quantization import MODELOPT_NAME
from outrider.weights.safetensors_dir import check_files

EMBEDDING, HEAD, MARKOV_ROWS = "embed_tokens.weight", "lm_head.weight", "markov_head.markov_w1.weight"
VOCABULARY = ("d2t", "t2d")
TRAINING_RECORD = "training_record.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What to make of a drafter."""

    layout: str
    target: Path | None = None
    """The target's weights, where the layout's files bring the target's tables."""
    target_name: str | None = None
    """What others know the target by, such as a hub's owner/name."""
    dtype: str | None = None
    """One of DTYPES to round the numbers to; None keeps them, and packed ones become float32, which is exact."""
    licence: str | None = None
    """For the card, as the model hub spells it."""
    selection: Mapping[str, Any] | None = None
    """A record of `train select` that measured this drafter, for the card."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written."""

    layout: str
    num_tensors: int
    num_bytes: int
    borrowed: tuple[str, ...]
    """Tables that the reader takes from the target (T-074)."""


@dataclass(frozen=True)
class Source:
    """A drafter as it lies on disk."""

    path: Path
    config: dict[str, Any]
    declared: DrafterConfig
    weights: Mapping[str, PackedWeight]


def read_source(path: Path) -> Source:
    """Read and check a drafter's config and the headers of its weights."""
    config, weights = load_safetensors_dir(path)
    return Source(path, config, drafter_config(config, source=path), weights)


def convert_drafter(path: Path, out: Path, options: ConvertOptions) -> Converted:
    """Write the drafter `path` to the new folder `out` in another layout, with a model card.

    ConfigError, before anything is written, for what the layout cannot say; where writing fails nothing is left. What
    was written is read back and compared, number by number, before it takes its place.
    """
    layout, source = find_layout(options.layout), read_source(path)
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not known. Use one of {', '.join(DTYPES)}.")
    if out.exists():
        raise ConfigError(f"{out} exists, and a drafter is never overwritten. Name a new folder.")
    target = None if options.target is None else load_checkpoint(options.target)
    if target is not None:
        check_drafter(source.declared, target_config(target), target_name=target.source.name)
    config = layout_config(layout, source.declared, _about(source, target, options))
    tensors = dict(_tensors(source, layout, target, options))
    borrowed = tuple(name for name in (EMBEDDING, HEAD) if name not in tensors)
    config |= _storage(source, tensors, borrowed, layout, options)
    card = model_card(source.declared, _card_facts(source, options))
    texts = {"README.md": card, "config.json": json.dumps(config, indent=2) + "\n"}
    beside = path / TRAINING_RECORD
    if beside.is_file():  # what is known of the training goes where the drafter goes
        texts[TRAINING_RECORD] = beside.read_text(encoding="utf-8")

    def fill(folder: Path) -> None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        _check_written(folder, tensors)

    write_folder(out, fill, what="drafter")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return Converted(layout=layout.name, num_tensors=len(tensors), num_bytes=num_bytes, borrowed=borrowed)


def _about(source: Source, target: Checkpoint | None, options: ConvertOptions) -> About:
    positions = source.config.get("max_position_embeddings")
    nested = source.config.get("transformer_layer_config")
    if positions is None and isinstance(nested, dict):
        positions = nested.get("max_position_embeddings")
    architectures = () if target is None else tuple(target.config.get("architectures") or ())
    about = About(target_name=options.target_name, target_architectures=architectures)
    return replace(about, max_positions=positions) if type(positions) is int else about


def _card_facts(source: Source, options: ConvertOptions) -> CardFacts:
    beside = source.path / TRAINING_RECORD
    return CardFacts(
        layout=options.layout,
        licence=options.licence,
        target_name=options.target_name,
        training=json_object(beside.read_bytes(), what=str(beside)) if beside.is_file() else None,
        selection=options.selection,
        sha256=directory_sha256(source.path),
    )


def _is_verbatim(source: Source, layout: Layout, options: ConvertOptions) -> bool:
    """Whether tensors are copied as they are stored, quantised ones too."""
    return layout.keeps_stored and options.dtype is None and not (source.path / MODELOPT_NAME).is_file()


def _storage(
    source: Source, tensors: Mapping[str, Tensor], borrowed: tuple[str, ...], layout: Layout, options: ConvertOptions
) -> dict[str, Any]:
    """What a config says of its numbers: their type, their quantisation, and what is not among them."""
    matrix, norm = tensors["fc.weight"], tensors["norm.weight"]
    dtype = matrix.dtype if matrix.is_floating_point() else norm.dtype
    found: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if borrowed:
        found["borrowed_tensors"] = list(borrowed)
    if _is_verbatim(source, layout, options) and source.config.get("quantization_config") is not None:
        found["quantization_config"] = source.config["quantization_config"]
    return found


def _tensors(
    source: Source, layout: Layout, target: Checkpoint | None, options: ConvertOptions
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the new file, by name."""
    declared, tables = source.declared, layout.tables(source.declared)
    for name, tensor in _stored(source) if _is_verbatim(source, layout, options) else _plain(source, options.dtype):
        if name in (EMBEDDING, HEAD, *declared.skipped_tensors):
            continue
        is_compact = name == MARKOV_ROWS and len(tensor) != declared.vocab_size
        yield name, _all_markov_rows(tensor, source) if is_compact and not layout.keeps_stored else tensor
    if tables is Tables.OWN_HEAD and declared.draft_vocab_size < declared.vocab_size:
        yield "t2d", _known(source)
    yield from _tables(source, layout, target, options)


def _stored(source: Source) -> Iterator[tuple[str, Tensor]]:
    for name, file in check_files(source.path).items():
        yield name, file.tensor(name)


def _plain(source: Source, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    for name in source.weights:
        if name == "d2t":
            yield name, _plain_values(source.weights[name], None).to(torch.int64)
        elif name not in VOCABULARY and name not in (EMBEDDING, HEAD):
            yield name, _plain_values(source.weights[name], dtype)


def _plain_values(weight: PackedWeight, dtype: str | None) -> Tensor:
    """The numbers as they are, or rounded to `dtype`; packed ones in float32, where both factors' product is exact."""
    values = weight.values if type(weight) is DenseWeight else weight.dequantize(torch.float32)
    return (values if dtype is None else values.to(DTYPES[dtype])).contiguous()


def _draft_ids(source: Source) -> Tensor:
    """The target id of each draft id, int64 [Vd]."""
    offsets = _plain_values(source.weights["d2t"], None).to(torch.int64)
    return offsets + torch.arange(len(offsets))


def _known(source: Source) -> Tensor:
    """Which target ids have a draft id, bool [V]."""
    known = torch.zeros(source.declared.vocab_size, dtype=torch.bool)
    known[_draft_ids(source)] = True
    return known


def _all_markov_rows(rows: Tensor, source: Source) -> Tensor:
    """w1 by draft id, its last row for all other tokens, [Vd + 1, r] -> by target id, [V, r]: the same numbers."""
    ids = _draft_ids(source)
    places = torch.full((source.declared.vocab_size,), len(ids))
    places[ids] = torch.arange(len(ids))
    return rows[places]


def _tables(
    source: Source, layout: Layout, target: Checkpoint | None, options: ConvertOptions
) -> Iterator[tuple[str, Tensor]]:
    """Embedding and head, where the layout's files bring them: the drafter's own, else the target's real numbers."""
    wanted = {Tables.BORROWED: (), Tables.OWN_HEAD: (HEAD,), Tables.OWN_BOTH: (EMBEDDING, HEAD)}
    for name in (EMBEDDING, HEAD):
        own = source.weights.get(name)
        if name in wanted[layout.tables(source.declared)]:
            yield name, _plain_values(own or _targets_rows(source, target, name, options), options.dtype)
        elif own is None or (target is not None and _is_targets(own, _targets_rows(source, target, name, options))):
            continue  # the reader borrows it
        elif not layout.takes_own_tables:
            found = "is not known to be the target's: give --target" if target is None else "is not the target's"
            raise ConfigError(
                f"drafter {source.declared.name} brings {name}, readers of layout {layout.name} take the target's, and "
                f"this one {found}. Layout 'outrider' keeps it."
            )
        else:
            yield name, _plain_values(own, options.dtype)


def _targets_rows(source: Source, target: Checkpoint | None, name: str, options: ConvertOptions) -> PackedWeight:
    if target is None:
        raise ConfigError(
            f"drafter {source.declared.name} borrows {name} of its target, and files of layout {options.layout} bring "
            "it. Give the target's weights with --target."
        )
    table = target.tensors[f"{target_config(target).tensor_prefix}.embed_tokens.weight"]
    is_reduced_head = name == HEAD and source.declared.draft_vocab_size < source.declared.vocab_size
    return select_rows(table, _draft_ids(source)) if is_reduced_head else table


def _is_targets(own: PackedWeight, targets: PackedWeight) -> bool:
    ours, theirs = _plain_values(own, "float32"), _plain_values(targets, "float32")
    return torch.equal(ours, theirs)


def _check_written(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read back what was written, config and all, and compare every number."""
    read_source(folder)
    files = check_files(folder)
    for name, tensor in tensors.items():
        there = files[name].tensor(name)
        if there.dtype != tensor.dtype or not torch.equal(there, tensor):
            raise WeightsError(f"tensor {name} of {folder} is not what was written. Check the disk, and export again.")
