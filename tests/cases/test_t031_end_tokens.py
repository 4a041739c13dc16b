"""T-031: the end tokens of config.json, generation_config.json, tokenizer and request all work, anywhere in a block.

Seen red: read_end_token_ids reading config.json alone; make_engine taking the tokenizer's ids alone.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.backends.local import make_engine
from outrider.core import SamplingParams
from outrider.engine.engine import Engine, EngineConfig
from outrider.errors import WeightsError
from outrider.models.registry import target_config
from outrider.weights.loader import load_checkpoint
from tests.cases.common import ByteTokenizer, TextTarget
from tests.models.test_config import GEMMA3
from tests.scripted import ScriptedProposer

EOS, TURN_END, TOOL_RESPONSE, ASKED = 257, 258, 265, 259
OK, JUNK = [ord("o"), ord("k")], [ord(letter) for letter in "junkjunk"]


def declared_end_ids(folder: Path, *, config: object = None, generation: object = None) -> tuple[int, ...]:
    """What a checkpoint directory's target config says."""
    named = {} if config is None else {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps({**GEMMA3, "model_type": "gemma3_text", **named}), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}), encoding="utf-8")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return target_config(load_checkpoint(folder)).eos_token_ids


def answer_engine(end: int, *, position: int, model_end_ids: tuple[int, ...]) -> tuple[Engine, list[int]]:
    """An engine whose target answers "ok", an end token and junk; the end token is in place `position` of a block."""
    lead = [ord(".")] * (position + 1)  # the first of them comes from the prefill
    text = [2, *lead, *OK, end, *JUNK]
    target = TextTarget(text)
    target.config.eos_token_ids = model_end_ids
    # Two rounds of one token each use up the lead but for `position` tokens of what comes before the end token.
    proposer = ScriptedProposer([text], script=(0,) * (len(lead) + 1 - position) + (4,), vocab_size=272)
    tokenizer: Any = ByteTokenizer((EOS,))
    engine = make_engine(target, None, tokenizer, EngineConfig(context_length=64, max_seats=1))
    engine.proposer = proposer
    return engine, text[1 : len(lead) + 4]


def finish(engine: Engine, params: SamplingParams) -> tuple[str, str | None, list[int], int]:
    """Text, reason, ids, and how many drafts the last chunk had before its end."""
    request = engine.add([2], params)
    while engine.has_work:
        chunks = engine.step()
    return request.text, request.finish_reason, request.output_token_ids, len(chunks[-1].token_ids) - 1


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("end", [EOS, TURN_END, TOOL_RESPONSE, ASKED])
def test_t031_every_end_token_works(end: int, position: int, tmp_path: Path) -> None:
    model_end_ids = declared_end_ids(tmp_path, config=TURN_END, generation=[TURN_END, TOOL_RESPONSE])
    engine, expected = answer_engine(end, position=position, model_end_ids=model_end_ids)
    text, reason, token_ids, slot = finish(engine, SamplingParams(max_tokens=20, stop_token_ids=(ASKED,)))
    assert (text.lstrip("."), reason, token_ids) == ("ok", "stop", expected)
    assert slot == position


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, [1, 106], (1, 106)),
        ([1, 106], None, (1, 106)),
        (None, [1, 106], (1, 106)),
        (1, 106, (1, 106)),
        (None, None, ()),
    ],
)
def test_t031_directories_name_the_union(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert declared_end_ids(tmp_path, config=config, generation=generation) == expected


@pytest.mark.parametrize("declared", ["</s>", [1, None], -1])
def test_t031_what_is_no_token_id_is_refused(declared: object, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"generation_config\.json has eos_token_id"):
        declared_end_ids(tmp_path, generation=declared)


def test_t031_without_a_list_only_the_tokenizers_works(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine, expected = answer_engine(EOS, position=2, model_end_ids=())
    assert "no eos_token_id" in caplog.text
    assert finish(engine, SamplingParams(max_tokens=20))[1:3] == ("stop", expected)
    engine, _ = answer_engine(TURN_END, position=2, model_end_ids=())
    text, reason, _, _ = finish(engine, SamplingParams(max_tokens=12))
    assert reason == "length"
    assert "okjunk" in text


def test_t031_with_a_list_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer_engine(EOS, position=0, model_end_ids=(TURN_END,))
    assert caplog.text == ""
