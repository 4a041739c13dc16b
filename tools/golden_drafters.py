"""Make tests/golden/drafters/: random drafters in float32, as their originals publish them and as these run them.

A case is a directory: `drafter/`, config.json and model.safetensors under the original's own names;
golden.safetensors, what goes in (context taps, blocks, the target's embedding where the drafter has none) and the
logits, drafts and confidences that come out; golden.json, which original, which version, every deviation from it.
Where a `target/` lies beside them, the taps are those of that target over `token_ids`.

The originals are run, never copied, in an environment of their own: `pip install -e ".[golden-drafters]"` brings
z-lab's dflash and speculators, with a transformers whose Gemma 4 config DeepSpec understands. Two are no packages:

    --deepspec DIR  git clone https://github.com/deepseek-ai/DeepSpec DIR, commit afdfa7c9382a
    --vllm DIR      pip download --no-deps vllm==0.33.0, and from the wheel, unzipped into DIR,
                    vllm/model_executor/models/qwen3_dflash.py and vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py

The cases of an original that is not there stay as they are, as they do in `make golden`. Tests only read the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from drafter_originals.case import Case


def zlab() -> Iterator[Case]:
    """Two-way in every layer, as z-lab's own first model was, and causal by layer kind, as an unset field means."""
    from drafter_originals.zlab import zlab_case

    yield zlab_case("zlab-dflash", seed=11, is_causal=False)
    yield zlab_case("zlab-dflash-causal", seed=12, is_causal=None)


def deepspec() -> Iterator[Case]:
    """The three Markov heads on Gemma 4 layers, and one on Qwen3 layers."""
    from drafter_originals.deepspec import gemma4_case, qwen3_case

    yield gemma4_case("deepspec-gemma4-vanilla", seed=21, markov_head_type="vanilla")
    yield gemma4_case("deepspec-gemma4-gated", seed=22, markov_head_type="gated", confidence_head_with_markov=False)
    yield gemma4_case("deepspec-gemma4-rnn", seed=23, markov_head_type="rnn")
    yield qwen3_case("deepspec-qwen3", seed=24)


def hybrid() -> Iterator[Case]:
    """Two originals in one."""
    from drafter_originals.zlab import hybrid_case

    yield hybrid_case("hybrid-root", seed=31)


def speculators() -> Iterator[Case]:
    """Reduced vocabularies."""
    from drafter_originals.speculators import dflash_case, dspark_case

    yield dflash_case("speculators-dflash", seed=41, sliding_window_non_causal=False)
    yield dflash_case("speculators-dflash-two-way", seed=42, sliding_window_non_causal=True)
    yield dspark_case("speculators-dspark", seed=43)


def vllm(root: Path) -> Iterator[Case]:
    """vLLM's modelling code on plain torch layers."""
    from drafter_originals.vllm import vllm_case

    yield vllm_case("vllm-dflash-causal", root=root, seed=51)


def made(present: dict[str, Path]) -> Iterator[Case]:
    """The cases whose originals are present."""
    if "dflash" in present:
        yield from zlab()
    if "deepspec" in present:
        yield from deepspec()
    if "dflash" in present and "deepspec" in present:
        yield from hybrid()
    if "speculators" in present:
        yield from speculators()
    if "vllm" in present:
        yield from vllm(present["vllm"])


def originals() -> Iterator[tuple[str, Path]]:
    """The originals that are present and where; says which are not."""
    parser = argparse.ArgumentParser(description="Make tests/golden/drafters/ from the original drafters.")
    parser.add_argument("--deepspec", type=Path, metavar="DIR", help="a clone of deepseek-ai/DeepSpec")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="the unzipped files of the vllm wheel")
    options = parser.parse_args()
    if options.deepspec:
        sys.path.append(str(options.deepspec.resolve()))
    for name in ("dflash", "deepspec", "speculators"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield name, Path(spec.origin)
        else:
            print(f"{name} is not there: its cases stay as they are")
    if options.vllm:
        yield "vllm", options.vllm
    else:
        print("no --vllm: its case stays as it is")


def main() -> None:
    """Write the fixtures whose originals are present."""
    for case in made(dict(originals())):
        case.write()
        print(case.name)


if __name__ == "__main__":
    main()
