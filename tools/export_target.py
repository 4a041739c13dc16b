"""Write a target as a directory that transformers, vLLM and other engines load: the embedded default if none is named.

    python tools/export_target.py /tmp/gemma-3-270m --dtype bfloat16

Weights are dequantised, in `model.safetensors`; beside them config.json, tokenizer.json, tokenizer_config.json and, as
chat_template.jinja, the dialogue that `outrider serve` uses for a target that was taught no chat.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import ConfigError, UnsupportedModelError
from outrider.weights.loader import Checkpoint, load_checkpoint
from outrider.weights.locate import locate_target

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HUB_NORM_OFFSET = 1.0  # transformers and vLLM multiply a Gemma 3 norm by (1 + weight)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
}
# As outrider.server.chat.render_plain; begun with the begin token, since engines add none to a rendered chat.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{- 'User: ' -}}{%- elif message.role == 'assistant' -%}{{- 'Assistant: ' -}}
    {%- elif message.role != 'system' -%}{{- raise_exception('this model was taught no tools') -}}{%- endif -%}
    {{- (message.content | trim) + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""


def export_target(checkpoint: Checkpoint, directory: Path, *, dtype: torch.dtype) -> None:
    """Fill a new directory with a Gemma 3 checkpoint; its norms may be stored with either offset.

    ConfigError where the directory exists, UnsupportedModelError for another kind of model.
    """
    if checkpoint.config["model_type"] != "gemma3_text":
        kind = checkpoint.config["model_type"]
        raise UnsupportedModelError(f"{checkpoint.source} is {kind!r}; only gemma3_text targets are exported.")
    if directory.exists():
        raise ConfigError(f"{directory} exists. Name a new directory.")
    directory.mkdir(parents=True)
    save_file(hub_tensors(checkpoint, dtype=dtype), directory / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "dtype": str(dtype).removeprefix("torch.")}
    for name, content in (("config.json", config), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    shutil.copyfile(checkpoint.tokenizer_path, directory / "tokenizer.json")


def hub_tensors(checkpoint: Checkpoint, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights as plain numbers by Hugging Face name; norms less what transformers adds to them."""
    shift = checkpoint.norm_offset - HUB_NORM_OFFSET
    tensors = {}
    for name, weight in checkpoint.tensors.items():
        values = weight.dequantize(torch.float32)
        tensors[name] = (values + shift if values.dim() == 1 else values).to(dtype).contiguous()
    return tensors


def main() -> None:
    """Read the command line and export."""
    parser = argparse.ArgumentParser(description="Write a target as other engines load it.")
    parser.add_argument("directory", type=Path, help="a new one")
    parser.add_argument("--target", help="as elsewhere; the embedded default if left out")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    asked: Any = parser.parse_args()
    export_target(load_checkpoint(locate_target(asked.target)), asked.directory, dtype=DTYPES[asked.dtype])


if __name__ == "__main__":
    main()
