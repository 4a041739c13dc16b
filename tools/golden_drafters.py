"""Make tests/golden/drafters/: random drafters in float32, as their originals publish them and as these run them.

A case is a directory: config.json and model.safetensors of the drafter under the original's own names;
golden.safetensors, what goes in (context taps, blocks, the target's embedding where the drafter has none) and the
logits, drafts and confidences that come out; golden.json, which original, which version, every deviation from it.
Where `target/` lies beside them, the taps are those of that target over `token_ids`.

The originals are run, never copied. Each is a directory that an option names; the cases of one that is not named stay
as they are (`hybrid-root` needs the first two):

    --dflash DIR       python -m pip install --no-deps --target DIR dflash==0.1.0
    --deepspec DIR     git clone https://github.com/deepseek-ai/DeepSpec DIR, commit afdfa7c9382a
    --speculators DIR  python -m pip install --no-deps --target DIR speculators==0.9.0; its imports need openai,
                       datasets, loguru, pydantic-settings, aiohttp and hs-connectors in the environment
    --vllm DIR         python -m pip download --no-deps vllm==0.33.0, and unzip -d DIR the wheel's
                       vllm/model_executor/models/qwen3_dflash.py and
                       vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py

`make golden` calls it without any, unless ORIGINALS holds options. Tests only read the result.
"""

from __future__ import annotations

import argparse
import os
import shlex
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


def made(options: argparse.Namespace) -> Iterator[Case]:
    """The cases whose originals are at hand."""
    if options.dflash:
        yield from zlab()
    if options.deepspec:
        yield from deepspec()
    if options.dflash and options.deepspec:
        yield from hybrid()
    if options.speculators:
        yield from speculators()
    if options.vllm:
        yield from vllm(options.vllm)


def main() -> None:
    """Write the fixtures whose originals are named."""
    parser = argparse.ArgumentParser(description="Make tests/golden/drafters/ from the originals.")
    originals = ("dflash", "deepspec", "speculators", "vllm")
    for name in originals:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"directory of the original {name}")
    options = parser.parse_args(sys.argv[1:] or shlex.split(os.environ.get("ORIGINALS", "")))
    for name in originals:
        folder = getattr(options, name)
        if folder is None:
            print(f"no --{name}: the cases that need it stay as they are")
        elif name != "vllm":  # a whole vLLM is never imported
            sys.path.append(str(folder.resolve()))
    for case in made(options):
        case.write()
        print(case.name)


if __name__ == "__main__":
    main()
