"""`outrider demo`: watch plain and speculative decoding write the same text, and see by how much one is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.benchmarking import demo as measurement
from outrider.benchmarking.record import make_record, write_record
from outrider.benchmarking.workloads import DEMO
from outrider.cli import options
from outrider.cli.output import console, emit_json, progress_line, show, writable
from outrider.core import Chunk, SamplingParams
from outrider.errors import ConfigError

ACCEPTED_STYLE = "bold underline green"
MIN_TOKENS = 2
NUM_STREAMED_PROMPTS = 3  # shown as they are written; the rest runs behind a progress bar


def demo(
    max_tokens: Annotated[int, typer.Option(help="Tokens to write for each prompt.")] = 128,
    prompts: Annotated[int, typer.Option(help="How many of the built-in prompts to run.")] = len(DEMO.prompts),
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Engine seed: noise of sampled runs.")] = 0,
    num_speculative_tokens: options.DraftLength = None,
    drafter: options.Drafter = "auto",
    drafter_quantization: options.DrafterQuantization = None,
    target: options.Target = None,
    kernels: options.Kernels = "auto",
    device: options.Device = "auto",
    record: Annotated[Path | None, typer.Option(help="Also write a record with raw rows to this new file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Decode the same prompts with and without the drafter, in turn, and compare."""
    if not 1 <= prompts <= len(DEMO.prompts):
        raise ConfigError(f"prompts={prompts}, but the demo has {len(DEMO.prompts)}. Choose from 1 to that many.")
    if max_tokens < MIN_TOKENS:
        raise ConfigError(f"max_tokens={max_tokens} leaves nothing to time after the first token. Give at least 2.")
    if record is not None and writable("--record", record).exists():
        raise ConfigError(f"--record {record} exists, and records are never overwritten. Name a new file.")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, ignore_eos=True
    )
    arms, llm = _load_arms(
        target,
        drafter=drafter,
        drafter_quantization=drafter_quantization,
        seed=seed,
        draft_length=num_speculative_tokens,
        kernels=kernels,
        device=device,
    )
    config = measurement.DemoConfig(
        params=params, prompts=DEMO.prompts[:prompts], num_speculative_tokens=llm.num_speculative_tokens
    )
    if not as_json:
        console.print(Text.assemble("Tokens from ", ("accepted drafts", ACCEPTED_STYLE), " are marked."), end="")
    rows = _run(arms, config, is_quiet=as_json)
    summary = measurement.summarize(rows, config)
    emit_json(summary) if as_json else show(_table(summary))
    if record is not None:
        settings = {
            "kernels": llm.kernels_name,
            "drafter": llm.drafter_name,
            "drafter_quantization": drafter_quantization,
            "seed": seed,
        }
        described = [{"name": name, "backend": "local", "target": target or "embedded", **settings} for name in arms]
        raw = [measurement.row_as_dict(row) for row in rows]
        write_record(make_record("demo", workload=DEMO, arms=described, rows=raw, summary=summary), record)


def _load_arms(
    target: str | None,
    *,
    drafter: str,
    drafter_quantization: str | None,
    seed: int,
    draft_length: int | None,
    kernels: str,
    device: str,
) -> tuple[dict[str, Any], Any]:
    import outrider

    engine = outrider.EngineConfig(seed=seed, max_seats=1, context_length=512, num_speculative_tokens=draft_length)
    common: dict[str, Any] = {"config": engine, "device": device, "progress": progress_line}
    quantized: dict[str, Any] = {"drafter": drafter, "drafter_quantization": drafter_quantization}
    llm = outrider.load(target, kernels=kernels, **quantized, **common)
    if llm.drafter_name is None:
        raise ConfigError("the demo compares with and without a drafter; give one with --drafter.")
    if llm.num_speculative_tokens == 0:
        raise ConfigError("num_speculative_tokens=0 drafts nothing to compare; give at least 1.")
    arms = {measurement.PLAIN: llm.without_drafter(), measurement.SPECULATIVE: llm}
    if llm.kernels_name == "cpu":
        arms[measurement.TORCH] = outrider.load(target, drafter=None, kernels="torch", **common)
    return arms, llm


def _run(arms: dict[str, Any], config: measurement.DemoConfig, *, is_quiet: bool) -> list[measurement.Row]:
    """All prompts on all arms: the first ones stream, both arms in turn, the others run behind a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("prompts", total=len(config.prompts))
    num_streamed = 0 if is_quiet else min(NUM_STREAMED_PROMPTS, len(config.prompts))
    streaming = False

    def on_prompt(index: int, arm: str, prompt: str) -> None:
        nonlocal streaming
        streaming = index < num_streamed and arm != measurement.TORCH
        if streaming:
            progress.stop()
            heading = Text.assemble((f"\n\n{arm}\n", "bold"), (prompt, "dim"))
            console.print(heading, end="", soft_wrap=True)
        elif not progress.live.is_started:
            console.print("\n")
            progress.start()
        progress.update(task, completed=index, description=f"prompt {index + 1} ({arm})")

    def on_chunk(arm: str, chunk: Chunk) -> None:
        if streaming:
            console.print(_marked(arms[arm], chunk), end="", soft_wrap=True)

    try:
        rows = measurement.run_demo(arms, config, on_chunk=on_chunk, on_prompt=on_prompt)
        progress.update(task, completed=len(config.prompts))
    finally:
        progress.stop()
    return rows


def _marked(llm: Any, chunk: Chunk) -> Text:
    """A chunk's text with the share that came from accepted drafts marked."""
    accepted = llm.tokenizer.decode(chunk.token_ids[: chunk.num_accepted_draft_tokens])
    shown = Text(chunk.text)
    shown.stylize(ACCEPTED_STYLE, 0, min(len(accepted), len(chunk.text)))
    return shown


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title="Plain and speculative decoding, same prompts, in turn", show_header=False)
    labels = {
        "prompts": "prompts",
        "identical": "same text",
        "plain_tokens_per_s": "plain, tokens/s",
        "speculative_tokens_per_s": "speculative, tokens/s",
        "speedup": "speedup (decode time)",
        "num_speculative_tokens": "draft length",
        "mean_acceptance_length": "mean acceptance length",
        "acceptance_outside_repeats": "… outside repeats",
        "kernel_gain": "plain, our kernels over torch",
        "plain_prefill_s": "prefill, plain, s",
        "speculative_prefill_s": "prefill, speculative, s",
    }
    for key, label in labels.items():
        value = summary[key]
        shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        shown += "×" if key in ("speedup", "kernel_gain") and value is not None else ""
        table.add_row(label, "yes" if value is True else "NO" if value is False else shown)
    return table
