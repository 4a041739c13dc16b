"""Make tests/golden/generate.json: what transformers writes greedily on the embedded default's own numbers.

The weights are the GGUF file's, dequantised to float32 and given to transformers' Gemma3ForCausalLM. Run by
`make golden`; tests only read the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from outrider.benchmarking.workloads import GOLDEN
from outrider.tokenizer import Tokenizer
from outrider.weights.loader import Checkpoint, load_checkpoint
from outrider.weights.locate import locate_target

NUM_TOKENS = 64
FIXTURE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "generate.json"


def reference_model(checkpoint: Checkpoint) -> Any:
    """Transformers' model with the checkpoint's numbers; its norms multiply by (1 + weight)."""
    config = dict(checkpoint.config)
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": config.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")},
    }
    config.pop("rope_scaling", None)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config, rope_parameters=rope)).eval()
    state = {}
    for name, weight in checkpoint.tensors.items():
        values = weight.dequantize(torch.float32)
        state[name] = values - (1.0 - checkpoint.norm_offset) if values.dim() == 1 else values
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]), missing
    assert not missing.unexpected_keys, missing
    model.tie_weights()
    return model


@torch.no_grad()
def main() -> None:
    """Write the fixture."""
    checkpoint = load_checkpoint(locate_target(None))
    tokenizer, model = Tokenizer.from_file(checkpoint.tokenizer_path), reference_model(checkpoint)
    cases = []
    for prompt in GOLDEN.prompts:
        ids = tokenizer.encode(prompt)
        output = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=NUM_TOKENS
        )
        cases.append({"prompt": prompt, "prompt_token_ids": ids, "token_ids": output[0, len(ids) :].tolist()})
    facts = {
        "made_by": "tools/golden_generate.py",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "target_sha256": checkpoint.sha256(),
        "workload_sha256": GOLDEN.sha256,
        "cases": cases,
    }
    FIXTURE.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
