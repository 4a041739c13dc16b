"""Start the peer in a process of its own and read its results."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.backends.dummy_configs import dummy_target_config, write_dummy_configs
from outrider.benchmarking import peer_vllm
from outrider.benchmarking.decode import CellKey, CellPlan, cell_key
from outrider.errors import ConfigError, EngineFault

PEERS = ("vllm",)
# Folders inside a site that hold packages of their own.
_NESTED_SITES = ("nvidia_cutlass_dsl/dsl_packages",)
# Nothing is to be fetched or sent while it is timed.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_GONE_AFTER_S = 15.0
_POLL_S = 0.5
_NUM_LAST_LINES, _MAX_LINE_CHARACTERS = 4, 300
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
    keep: Callable[[dict[str, Any]], None] = lambda _result: None,
) -> dict[CellKey, dict[str, Any]]:
    """The peer's figures by cell, a process for each draft length; EngineFault with its own words where one fails.

    `work` has max_tokens, context_length and runs; configs, results and logs are written to `folder`. `keep` hears each
    cell's figures as they come, those before a failure too.
    """
    model, drafter = write_dummy_configs(target, folder)
    found: dict[CellKey, dict[str, Any]] = {}
    for length in sorted({cell.num_speculative_tokens for cell in cells}):
        of_length = [cell for cell in cells if cell.num_speculative_tokens == length]
        arguments = ["--model", str(model), "--num-speculative-tokens", str(length)]
        if length:
            arguments += ["--drafter", str(drafter), "--acceptance-length", str(of_length[0].acceptance_length)]
        arguments += ["--batches", *_different(cell.batch for cell in of_length)]
        arguments += ["--prompt-tokens", *_different(cell.prompt_tokens for cell in of_length)]
        for name, value in work.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        for result in _run_script(arguments, target, site, folder / f"vllm-n{length}", timeout_s, keep):
            found[cell_key(result)] = result
    return found


def _different(numbers: Iterable[int]) -> list[str]:
    return [str(number) for number in dict.fromkeys(numbers)]


def _run_script(
    arguments: Sequence[str],
    target: str,
    site: Path | None,
    stem: Path,
    timeout_s: float,
    keep: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """The script's results, from STEM.jsonl; all that it and its own processes say goes to STEM.log."""
    out, log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    command = [sys.executable, "-P", str(Path(peer_vllm.__file__).resolve()), "--out", str(out), *arguments]
    with log.open("w") as file:
        peer = subprocess.Popen(
            command, stdout=file, stderr=file, env=_environment(target, site), start_new_session=True
        )
        code, results = _watch(peer, out, timeout_s, keep)
    if code is None:
        raise EngineFault(f"the peer took longer than {timeout_s:.0f} s. Raise --peer-timeout-s. {_last_words(log)}")
    if code or not out.exists():
        raise EngineFault(f"the peer failed with exit code {code}. {_last_words(log)}")
    return results


def _watch(
    peer: subprocess.Popen[bytes], out: Path, timeout_s: float, keep: Callable[[dict[str, Any]], None]
) -> tuple[int | None, list[dict[str, Any]]]:
    """The peer's exit code, None where it took too long, and its results. However this ends, the peer is gone then."""
    deadline_s, results = time.monotonic() + timeout_s, list[dict[str, Any]]()
    try:
        while peer.poll() is None and (left_s := deadline_s - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                peer.wait(min(_POLL_S, left_s))
            for result in _results(out)[len(results) :]:
                results.append(result)
                keep(result)
        return peer.returncode, results
    finally:
        _end_all(peer)


def _results(out: Path) -> list[dict[str, Any]]:
    """Of the lines that are written to their end."""
    lines = out.read_text().splitlines(keepends=True) if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _end_all(peer: subprocess.Popen[bytes]) -> None:
    """End the peer and the processes that it started, and wait until they are gone: they hold the device's memory."""
    deadline_s = time.monotonic() + _GONE_AFTER_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.killpg(peer.pid, signal.SIGKILL)
            peer.poll()  # or it would stay as a zombie
            time.sleep(0.05)


def _last_words(log: Path) -> str:
    """The first errors of a log, which are causes, and its end."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in dict.fromkeys(lines[:-_NUM_LAST_LINES]) if "Error" in line][:_NUM_LAST_LINES]
    return " | ".join(line[-_MAX_LINE_CHARACTERS:] for line in [*errors, *lines[-_NUM_LAST_LINES:]])


def _environment(target: str, site: Path | None) -> dict[str, str]:
    """Ours, with the peer's packages in place of our own path, and experts chosen evenly."""
    variables = {**os.environ, **_OFFLINE}
    if site is not None:
        variables["PYTHONPATH"] = os.pathsep.join(str(path) for path in (site, *(site / sub for sub in _NESTED_SITES)))
    return variables | (_UNIFORM_ROUTING if dummy_target_config(target)["enable_moe_block"] else {})
