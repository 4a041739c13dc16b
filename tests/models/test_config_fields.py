"""Every field of both configs, given what it cannot be: the error names the file and the field.

Seen red: reading the fields as they stand. Most of these end in a traceback or are taken silently.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import DrafterMismatchError, UnsupportedModelError, WeightsError
from outrider.models.registry import drafter_config, target_config
from tests.models.test_config import GEMMA3
from tests.models.test_drafter_config import DRAFTER
from tests.toy import toy_checkpoint, toy_target_config

NAN, INF = float("nan"), float("inf")
NO_SIZE = [0, -1, 2.5, NAN, "x", "", [], [1], {}, True, False, 10**30]
NO_NUMBER = [0, -1, NAN, INF, 1e300, "x", "", [], [1], {}, True, False]
NO_FLAG = [0, 1, "x", [], {}]
NO_TEXT = [1, [], {}, True]
NO_TABLE = [1, "x", [1], True]
NO_TEXTS = [1, True, "x", [1], {}]

NO_ROPE: list[Any] = [
    *NO_TABLE,
    {"rope_type": 1},
    {"rope_type": "linear"},
    *({"rope_type": "linear", "factor": factor} for factor in (None, 0, "x", NAN)),
    {"rope_theta": -1},
]
SHARED: dict[str, list[Any]] = {
    "hidden_size": [None, *NO_SIZE],
    "intermediate_size": [None, *NO_SIZE],
    "num_hidden_layers": [None, *NO_SIZE, 10**6],
    "num_attention_heads": [None, *NO_SIZE],
    "vocab_size": [None, *NO_SIZE],
    "head_dim": NO_SIZE,
    "num_key_value_heads": NO_SIZE,
    "sliding_window": NO_SIZE,
    "layer_types": NO_TEXTS,
    "rms_norm_eps": [None, *NO_NUMBER, 2.0],
    "rope_theta": NO_NUMBER,
    "rope_scaling": NO_ROPE,
    "final_logit_softcapping": NO_NUMBER,
}
TARGET: dict[str, list[Any]] = SHARED | {
    "model_type": NO_TEXT,
    "sliding_window": [None, *NO_SIZE],
    "sliding_window_pattern": [None, *NO_SIZE],
    "max_position_embeddings": [None, *NO_SIZE],
    "query_pre_attn_scalar": [None, *NO_NUMBER],
    "rope_local_base_freq": [None, *NO_NUMBER],
    "attn_logit_softcapping": NO_NUMBER,
    "hidden_activation": NO_TEXT,
    "use_bidirectional_attention": NO_FLAG,
    "tie_word_embeddings": [None, *NO_FLAG],
    "eos_token_id": ["x", 2.5, True, -1, {}, ["1"], [True]],
    "rope_parameters": [*NO_TABLE, {"full_attention": {}, "sliding_attention": None}],
}
DFLASH: dict[str, list[Any]] = {
    "block_size": [None, *NO_SIZE, 1, 10**12],
    "mask_token_id": [None, -1, 2.5, NAN, "4", [], [1], {}, True, 10**30],
    "target_layer_ids": [None, 5, True, "x", ["1"], [1.0], [True], {}],
    "num_speculative_tokens": [*NO_SIZE, 5],
    "num_target_layers": NO_SIZE,
    "draft_vocab_size": [*NO_SIZE, 97],
    "swa_window_size": NO_SIZE,
    "scale_block_embeddings": NO_FLAG,
}
FLAT: dict[str, list[Any]] = SHARED | {
    "architectures": [1, True, "DFlashDraftModel", [1], {}],
    "dflash_config": NO_TABLE,
    "rope_parameters": NO_ROPE,
    "hidden_act": NO_TEXT,
    "use_sliding_window": NO_FLAG,
    "is_causal": NO_FLAG,
}


def cases(fields: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}-{i}-{value!r:.20}")
        for field, values in fields.items()
        for i, value in enumerate(values)
    ]


def read_target(**changes: Any) -> None:
    config = {**GEMMA3, "model_type": "gemma3_text", **changes}
    target_config(replace(toy_checkpoint(toy_target_config()), config=config, source=Path("a-target")))


def read_drafter(**changes: Any) -> None:
    drafter_config({**DRAFTER, "architectures": ["DFlashDraftModel"], **changes}, source=Path("a-drafter"))


def test_what_the_cases_start_from_is_sound() -> None:
    read_target()
    read_drafter()


@pytest.mark.parametrize(("field", "value"), cases(TARGET))
def test_a_targets_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(WeightsError, match=f"^a-target (has|lacks) {field}.*; expected "):
        read_target(**{field: value})


@pytest.mark.parametrize(("field", "value"), cases(FLAT))
def test_a_drafters_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(DrafterMismatchError, match=rf"^a-drafter/config\.json (has|lacks) {field}.*; expected "):
        read_drafter(**{field: value})


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("field", "value"), cases(DFLASH))
def test_a_drafters_own_field_is_refused_wherever_it_stands(field: str, value: Any, nested: bool) -> None:
    """A null in `dflash_config` leaves the field to the top level, which has none but block_size."""
    flat = {key: each for key, each in {**DRAFTER, **DRAFTER["dflash_config"]}.items() if key != "dflash_config"}
    del flat[field if field in flat else "num_target_layers"]
    changes = {"dflash_config": {field: value}} if nested else {field: value}
    with pytest.raises(DrafterMismatchError, match=rf"^a-drafter/config\.json (has|lacks) {field}.*; expected "):
        drafter_config({**flat, "architectures": ["DFlashDraftModel"], **changes}, source=Path("a-drafter"))


@pytest.mark.parametrize("causal", NO_FLAG)
def test_nested_causality_is_named_in_full(causal: Any) -> None:
    with pytest.raises(DrafterMismatchError, match=r"dflash_config\.causal"):
        read_drafter(dflash_config={**DRAFTER["dflash_config"], "causal": causal})


def test_t054_a_head_of_its_own_is_refused() -> None:
    """T-054: an untied head that nobody reads must not be taken for the embedding."""
    with pytest.raises(UnsupportedModelError, match=r"a-target has tie_word_embeddings=False.*lm_head\.weight"):
        read_target(tie_word_embeddings=False)
