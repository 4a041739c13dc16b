"""Gemma 4 from a directory as transformers saves it, in shards: on both kernel sets the text that transformers writes.

Seen red: Gemma 3's norm offset for Gemma 4.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedModel

from outrider.backends.local import load
from outrider.core import SamplingParams
from outrider.engine.engine import EngineConfig
from outrider.errors import RequestError
from tests.models.test_gemma_gemma4 import BASE, SHAPES, shrunken_model
from tests.training import tiny

PROMPTS = [[2, 40, 41, 42], [2, 77, 12, 60, 9, 33, 34, 35, 36, 37]]
NUM_TOKENS = 16
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[int, ...]:
    """By transformers, the whole text anew for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "scaled rotation"])
def test_writes_what_transformers_writes(shape: str, tmp_path: Path) -> None:
    assert BASE["sliding_window"] < len(PROMPTS[0]) + NUM_TOKENS  # texts pass the window's edge
    model = shrunken_model(shape, torch.float32)
    model.save_pretrained(tmp_path / "target", max_shard_size="100KB")
    tiny.tokenizer().save(str(tmp_path / "target" / "tokenizer.json"))
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({token_id for answer in expected for token_id in answer}) > 4
    for kernels in ("torch", "cpu"):
        config = EngineConfig(max_seats=2, context_length=64)
        llm = load(str(tmp_path / "target"), kernels=kernels, device="cpu", config=config, drafter=None)
        assert [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)] == expected, kernels


def test_an_image_in_a_prompt_is_refused_as_text_and_as_ids(tmp_path: Path) -> None:
    """A multimodal checkpoint as it is released: the text decoder inside, placeholders declared beside it."""
    model, image_id = shrunken_model("31B", torch.float32), tiny.VOCAB
    model.save_pretrained(tmp_path)
    text_config = json.loads((tmp_path / "config.json").read_text())
    whole_config = {"model_type": "gemma4", "text_config": text_config, "image_token_id": image_id}
    (tmp_path / "config.json").write_text(json.dumps(whole_config))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = load(str(tmp_path), device="cpu", config=EngineConfig(context_length=64), drafter=None)
    for prompt, position in (("ab<|image|>c", 3), ([2, image_id, 40], 1)):
        with pytest.raises(RequestError, match=rf"<\|image\|> \(token id {image_id}\) at position {position}, "):
            llm.generate(["abc", prompt], PARAMS)  # type: ignore[list-item]
    assert [generation.token_ids for generation in llm.generate(PROMPTS, PARAMS)] == [greedy(model, p) for p in PROMPTS]
