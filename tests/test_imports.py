"""What must import at once, without torch: every command but those that decode starts with these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
LIGHT_MODULES = ("cli.main", "core", "environment", "errors", "metrics", "tokenizer")
HEAVY = {"gguf", "numpy", "safetensors", "scipy", "torch", "transformers", "triton"}
LIMIT_S = 1.0
PROBE = """
import importlib, json, sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
importlib.import_module(sys.argv[2])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def probe(module: str) -> dict[str, object]:
    """Import a module in a fresh interpreter: seconds it took, top-level packages it brought."""
    command = [sys.executable, "-c", PROBE, str(SOURCE), module]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", ["outrider", *(f"outrider.{name}" for name in LIGHT_MODULES)])
def test_imports_quickly_and_without_torch(module: str) -> None:
    first = probe(module)
    assert not HEAVY & set(first["modules"])
    if first["seconds"] >= LIMIT_S:  # the first import may compile byte code or wait for a busy machine
        assert min(probe(module)["seconds"], probe(module)["seconds"]) < LIMIT_S
