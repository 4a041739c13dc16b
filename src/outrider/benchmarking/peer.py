"""Start the peer in a process of its own and read its results."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.backends.dummy_configs import dummy_target_config, write_dummy_configs
from outrider.benchmarking import peer_vllm
from outrider.benchmarking.decode import CellKey, CellPlan
from outrider.errors import ConfigError, EngineFault

PEERS = ("vllm",)
# Folders inside a site that hold packages of their own.
_NESTED_SITES = ("nvidia_cutlass_dsl/dsl_packages",)
_UNIFORM_ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}  # a router of noise prefers some experts


def check_peer(name: str, site: Path | None, cells: Sequence[CellPlan]) -> None:
    """ConfigError where the peer is not known or not there, or where both sides would accept what they like."""
    if name not in PEERS:
        raise ConfigError(f"--peer {name!r} is not known; choose one of {', '.join(PEERS)}.")
    if site is not None and not (site / name).is_dir():
        raise ConfigError(f"--peer-site {site} has no folder {name}. Give the directory that {name} is installed in.")
    if site is None and importlib.util.find_spec(name) is None:
        raise ConfigError(f"{name} is not installed here. Install it, or give --peer-site the directory that has it.")
    if any(cell.num_speculative_tokens and cell.acceptance_length is None for cell in cells):
        raise ConfigError(
            "--peer compares time at one acceptance, which dummy weights have not. Give --acceptance-length."
        )


def run_peer(
    target: str,
    cells: Sequence[CellPlan],
    *,
    site: Path | None,
    folder: Path,
    work: dict[str, Any],
    timeout_s: float,
) -> dict[CellKey, dict[str, Any]]:
    """The peer's figures by cell, a process for each draft length; EngineFault with its last words where one fails.

    `work` has prompt_tokens, max_tokens, context_length and runs; configs and logs are written to `folder`.
    """
    model, drafter = write_dummy_configs(target, folder)
    found: dict[CellKey, dict[str, Any]] = {}
    for length in sorted({cell.num_speculative_tokens for cell in cells}):
        of_length = [cell for cell in cells if cell.num_speculative_tokens == length]
        arguments = ["--model", str(model), "--num-speculative-tokens", str(length)]
        if length:
            arguments += ["--drafter", str(drafter), "--acceptance-length", str(of_length[0].acceptance_length)]
        arguments += ["--batches", *(str(cell.batch) for cell in of_length)]
        for name, value in work.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        for result in _run_script(arguments, target, site, folder / f"vllm-n{length}.log", timeout_s):
            found[result["num_speculative_tokens"], result["batch"]] = result
    return found


def _run_script(
    arguments: Sequence[str], target: str, site: Path | None, log: Path, timeout_s: float
) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", str(Path(peer_vllm.__file__).resolve()), *arguments]
    with log.open("w") as file:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=_environment(target, site),
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineFault(f"the peer took longer than {timeout_s:.0f} s. Raise --peer-timeout-s.") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(peer_vllm.RESULT)]
    if done.returncode or not lines:
        last = " ".join(log.read_text(errors="replace").split()[-60:])
        raise EngineFault(f"the peer failed with exit code {done.returncode}: {last}")
    return [json.loads(line.removeprefix(peer_vllm.RESULT)) for line in lines]


def _environment(target: str, site: Path | None) -> dict[str, str]:
    """Ours, with the peer's packages in place of our own path, and experts chosen evenly."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if site is not None:
        variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (site, *(site / sub for sub in _NESTED_SITES)))
    return variables | (_UNIFORM_ROUTING if dummy_target_config(target)["enable_moe_block"] else {})
