"""vLLM on the same work: a script for an interpreter that has vLLM, and what starts it. Imports nothing of ours.

The script makes dummy weights of a config directory, imposes acceptance (`rejection_sample_method: synthetic`), and
takes prefill, timed as answers of one token, off the time of whole answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from itertools import product
from typing import Any

NUM_WARMUPS = 2
LOWEST_ID, HIGHEST_ID = 1000, 200_000
COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The script's own command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="file for the results, one JSON a line")
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--acceptance-length", type=float, default=1.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args(arguments)


def engine_options(asked: argparse.Namespace) -> dict[str, Any]:
    """What vLLM's LLM is made with."""
    options: dict[str, Any] = {
        "model": asked.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": asked.context_length,
        "max_num_seqs": max(4, *asked.batches),
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # or it counts no drafts
    }
    if asked.num_speculative_tokens:
        options["speculative_config"] = {
            "method": "dflash",
            "model": asked.drafter,
            "num_speculative_tokens": asked.num_speculative_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": asked.acceptance_length,
        }
    return options


def counters(llm: Any) -> dict[str, float]:
    """Drafts and accepted tokens so far."""
    return {COUNTERS[each.name]: each.value for each in llm.get_metrics() if each.name in COUNTERS}


def run_once(llm: Any, sampling: Any, asked: argparse.Namespace, *, batch: int, prompt_tokens: int) -> dict[str, Any]:
    """Answers of one token, then whole ones, to the same prompts."""
    chosen = random.Random(f"{batch}")
    prompts = [
        {
            "prompt_token_ids": [
                2,
                *(chosen.randrange(LOWEST_ID, HIGHEST_ID) % asked.vocab_size for _ in range(prompt_tokens - 1)),
            ]
        }
        for _ in range(batch)
    ]
    started = time.perf_counter()
    llm.generate(prompts, sampling(1), use_tqdm=False)
    prefill_s = time.perf_counter() - started
    before = counters(llm)
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling(asked.max_tokens), use_tqdm=False)
    decode_s = time.perf_counter() - started - prefill_s
    grown = {name: value - before.get(name, 0) for name, value in counters(llm).items()}
    num_drafts = grown.get("num_drafts", 0)
    return {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "num_decoded_tokens": sum(len(answer.outputs[0].token_ids) for answer in answers) - batch,
        "num_cycles": num_drafts / batch if num_drafts else asked.max_tokens - 1,
        "acceptance_length": 1 + grown["num_accepted_tokens"] / num_drafts if num_drafts else None,
    }


def time_cell(llm: Any, sampling: Any, asked: argparse.Namespace, *, batch: int, prompt_tokens: int) -> dict[str, Any]:
    """Figures of one batch size and prompt length: medians of its runs, after some that do not count."""
    work = {"batch": batch, "prompt_tokens": prompt_tokens}
    rows = [run_once(llm, sampling, asked, **work) for _ in range(NUM_WARMUPS + asked.runs)][NUM_WARMUPS:]
    return {
        "num_speculative_tokens": asked.num_speculative_tokens,
        **work,
        "acceptance_length": asked.acceptance_length,
        "tokens_per_s": statistics.median(row["num_decoded_tokens"] / row["decode_s"] for row in rows),
        "ms_per_cycle": statistics.median(1e3 * row["decode_s"] / row["num_cycles"] for row in rows),
        "prefill_s": statistics.median(row["prefill_s"] for row in rows),
        "rows": rows,
    }


def main(arguments: Sequence[str]) -> None:
    """Time all batch sizes and prompt lengths on one engine and write the results."""
    asked = parse(arguments)
    with open(os.path.join(asked.model, "config.json")) as file:  # noqa: PTH118, PTH123 - as plain as can be
        asked.vocab_size = json.load(file)["vocab_size"]
    from vllm import LLM, SamplingParams

    def sampling(max_tokens: int) -> Any:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    started = time.perf_counter()
    llm = LLM(**engine_options(asked))
    boot_s = time.perf_counter() - started
    packages = {name: metadata.version(name) for name in ("vllm", "torch", "triton") if _is_installed(name)}
    with open(asked.out, "w") as file:  # noqa: PTH123
        for batch, prompt_tokens in product(asked.batches, asked.prompt_tokens):
            found = time_cell(llm, sampling, asked, batch=batch, prompt_tokens=prompt_tokens)
            file.write(json.dumps({**found, "boot_s": boot_s, "packages": packages}) + "\n")
            file.flush()  # or it is lost where a later one fails


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


if __name__ == "__main__":
    main(sys.argv[1:])
