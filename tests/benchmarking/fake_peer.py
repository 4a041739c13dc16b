"""A package that calls itself vllm and takes half a millisecond a token, for tests of what starts it."""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import json, os, subprocess, sys, time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **settings):
        self.max_tokens = settings["max_tokens"]

class LLM:
    def __init__(self, **options):
        print("vllm talks on stdout as well")
        if os.environ.get("FAKE_VLLM") == "broken":
            print("RuntimeError: no memory, says its engine")
            for number in range(9):
                print("and more", number)
            sys.stderr.write("start failed, says vllm")
            sys.exit(3)
        if os.environ.get("FAKE_VLLM") == "hanging":
            print("the engine starts", flush=True)
            engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            with open(os.environ["FAKE_VLLM_LOG"], "w") as file:
                file.write(str(engine.pid))
            time.sleep(60)
        if log := os.environ.get("FAKE_VLLM_LOG"):
            with open(log, "a") as file:
                routing = os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY")
                file.write(json.dumps({**options, "routing": routing}) + "\\n")
        self.options, self.num_drafts = options, 0

    def generate(self, prompts, sampling, use_tqdm):
        if "speculative_config" in self.options:
            self.num_drafts += len(prompts) * (sampling.max_tokens - 1) // 2
        time.sleep(0.0005 * sampling.max_tokens)
        answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * sampling.max_tokens)])
        return [answer for _ in prompts]

    def get_metrics(self):
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.num_drafts),
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.num_drafts),
            SimpleNamespace(name="vllm:something_else", value=7),
        ]
"""


def write_site(folder: Path) -> Path:
    """A directory with the package in it."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(SOURCE)
    return folder
