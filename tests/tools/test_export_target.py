"""A target as other engines load it. Seen red: norms left as they are, a second begin token, a word of the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core import SamplingParams
from outrider.errors import ConfigError, UnsupportedModelError
from outrider.server.chat import PLAIN, find_template
from outrider.tokenizer import Tokenizer
from outrider.weights.loader import Checkpoint, load_checkpoint
from outrider.weights.locate import locate_target
from outrider.weights.packed import DenseWeight
from tests.embedded import plain_llm
from tests.training import tiny
from tools.export_target import export_target

CHAT = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": " Why?"},
]
PROMPT = "The river rises in the hills and"
NUM_TOKENS = 24


def small(tmp_path: Path, *, norm_offset: float) -> Checkpoint:
    tokenizer = tmp_path / "tokenizer.json"
    tiny.tokenizer().save(str(tokenizer))
    weights = {name: DenseWeight(name, values) for name, values in tiny.tensors(norm_offset=norm_offset).items()}
    return Checkpoint(tiny.CONFIG, weights, norm_offset, tokenizer, source=tmp_path, source_sha256=None)


@pytest.mark.parametrize("norm_offset", [0.0, 1.0])
def test_an_export_loads_as_what_it_was(tmp_path: Path, norm_offset: float) -> None:
    checkpoint = small(tmp_path, norm_offset=norm_offset)
    export_target(checkpoint, tmp_path / "out", dtype=torch.float32)
    found = load_checkpoint(tmp_path / "out")
    assert found.norm_offset == 1.0
    assert {name: found.config[name] for name in tiny.CONFIG} == {**tiny.CONFIG, "eos_token_id": [tiny.EOS_ID]}
    assert set(found.tensors) == set(checkpoint.tensors)
    for name, weight in checkpoint.tensors.items():
        values, wanted = found.tensors[name].dequantize(torch.float32), weight.dequantize(torch.float32)
        shift = norm_offset - 1.0 if wanted.dim() == 1 else 0.0
        assert torch.equal(values, wanted + shift), name


def test_chats_are_rendered_as_the_server_does(tmp_path: Path) -> None:
    export_target(small(tmp_path, norm_offset=1.0), tmp_path / "out", dtype=torch.bfloat16)
    tokenizer = Tokenizer.from_file(tmp_path / "out" / "tokenizer.json")
    template = find_template(tmp_path / "out", tokenizer)
    assert template.name.endswith("chat_template.jinja")
    for chat in (CHAT, CHAT[:2], CHAT[1:]):
        for add in (True, False):
            options: dict[str, Any] = {"enable_thinking": False, "add_generation_prompt": add}
            assert template.render_chat(chat, **options).text == PLAIN.render_chat(chat, **options).text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    checkpoint = small(tmp_path, norm_offset=1.0)
    with pytest.raises(ConfigError, match="exists"):
        export_target(checkpoint, tmp_path, dtype=torch.float32)
    other = Checkpoint({"model_type": "gemma4_text"}, {}, 0.0, tmp_path, source=tmp_path, source_sha256=None)
    with pytest.raises(UnsupportedModelError, match="gemma4_text"):
        export_target(other, tmp_path / "out", dtype=torch.float32)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_transformers_writes_the_text_that_we_write(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_target(load_checkpoint(locate_target(None)), tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    llm = plain_llm()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == llm.encode(PROMPT)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert ids == llm.encode(PLAIN.render_chat(CHAT, enable_thinking=False).text)
    written = model.generate(**inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
    (ours,) = llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert written[0, inputs["input_ids"].shape[1] :].tolist() == list(ours.token_ids)
