"""`outrider train`: let the target write text, fit a drafter to it, export the drafter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options, train_export, train_select
from outrider.cli.output import emit_json, progress_line, show, writable
from outrider.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from outrider.cli.train_chat import TemplateChat
    from outrider.tokenizer import Tokenizer
    from outrider.training.answering import AnswerOptions
    from outrider.training.config import Recipe
    from outrider.training.conversations import OnBadRow
    from outrider.training.pipeline import RunOptions

app = typer.Typer(no_args_is_help=True, help="Train a drafter on text that the target writes itself.")
app.command()(train_select.select)
app.command()(train_export.export)

RecipeArgument = Annotated[list[Path], typer.Argument(help="Recipe files (recipes/*.toml).")]
TargetOption = Annotated[str | None, typer.Option(help="Target weights; the embedded default if left out.")]
ConversationsOption = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL to answer: OpenAI or ShareGPT chats, turns or prompts. May be given several times."),
]
DataOption = Annotated[Path, typer.Option(help="File that holds the generated text.")]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="File to keep the run in; training goes on from it if it exists.")
]
EveryOption = Annotated[int, typer.Option(help="Steps from one writing of --checkpoint to the next.")]
StopOption = Annotated[
    float | None, typer.Option(help="Seconds of training, then write --checkpoint, export the drafter so far and end.")
]
MicroBatchesOption = Annotated[
    int, typer.Option(help="Parts that a process takes a step's texts in: less memory, the same drafter.")
]
TensorboardOption = Annotated[Path | None, typer.Option(help="Folder for TensorBoard; needs the package tensorboard.")]
PreflightOption = Annotated[
    bool, typer.Option("--preflight", help="Say what time, memory and disk the run takes, and end: nothing is written.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command()
def generate(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    data: DataOption,
    target: TargetOption = None,
    conversations: ConversationsOption = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer to --conversations.")] = 1024,
    thinking_share: Annotated[float, typer.Option(help="Share of conversations answered with thoughts.")] = 0.0,
    drop_bad_rows: Annotated[bool, typer.Option(help="Drop and count rows that would poison training.")] = False,
    concurrency: Annotated[int, typer.Option(help="Conversations under way at a time.")] = 4,
    drafter: options.Drafter = "auto",
    no_drafter: options.NoDrafter = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write the recipe's training text to --data: the target's own text, or its answers to --conversations.

    Answers are kept in DATA.answers.jsonl as they come, so the same command goes on where a run was killed; beside
    them are DATA.card.json and DATA.card.md, which say what the corpus is made of. [generate] gives sequence_tokens.
    """
    from outrider.backends.local import resolve_device
    from outrider.training.config import load_recipe

    loaded, place = load_recipe(recipe), resolve_device(device)
    writable("--data", data)
    if conversations:
        from outrider.training.answering import AnswerOptions

        card = _answered(
            conversations,
            AnswerOptions(
                sequence_tokens=loaded.generate.sequence_tokens,
                max_tokens=max_tokens,
                thinking_share=thinking_share,
                num_streams=concurrency,
            ),
            data,
            target=target,
            drafter=None if no_drafter else drafter,
            device=device,
            on_bad_row="drop" if drop_bad_rows else "stop",
        )
        emit_json(card) if as_json else progress_line(card["bias"])
        return
    from outrider.training.pipeline import make_text
    from outrider.weights.locate import locate_target

    facts = make_text(locate_target(target), loaded, data, device=place, progress=progress_line)
    emit_json(facts) if as_json else progress_line(json.dumps(facts))


def _answered(
    paths: list[Path],
    asking: AnswerOptions,
    data: Path,
    *,
    target: str | None,
    drafter: str | None,
    device: str,
    on_bad_row: OnBadRow,
) -> dict[str, Any]:
    """The card of a corpus that the engine here answers."""
    import outrider
    from outrider.tokenizer import Tokenizer
    from outrider.training.conversations import read_conversations
    from outrider.training.corpus import make_corpus
    from outrider.weights.loader import load_checkpoint
    from outrider.weights.locate import locate_target

    directory = locate_target(target)
    checkpoint = load_checkpoint(directory)
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_path)
    chat = _chat(directory, tokenizer)
    spellings = tokenizer.spellings()
    control_tokens = frozenset(spellings[token_id] for token_id in tokenizer.special_ids)
    # Read before the target is loaded: a bad row is found in a second.
    asked, dropped = read_conversations(paths, control_tokens=control_tokens, on_bad_row=on_bad_row)
    engine_config = outrider.EngineConfig(context_length=asking.sequence_tokens, max_seats=asking.num_streams)
    llm = outrider.load(target, drafter=drafter, config=engine_config, device=device, progress=progress_line)
    identity = {
        "target_sha256": checkpoint.sha256(),
        "tokenizer_sha256": hashlib.sha256(checkpoint.tokenizer_path.read_bytes()).hexdigest(),
    }
    return make_corpus(
        llm,
        tokenizer,
        chat,
        asked,
        asking,
        data,
        identity=identity,
        dropped=dropped,
        on_bad_row=on_bad_row,
        progress=progress_line,
    )


def _chat(target: Path, tokenizer: Tokenizer) -> TemplateChat:
    """The chat template that `serve` would use."""
    from outrider.cli.train_chat import TemplateChat
    from outrider.server.chat import find_template

    return TemplateChat(find_template(target if target.is_dir() else None, tokenizer), tokenizer)


@app.command()
def run(
    recipes: RecipeArgument,
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Directory for the drafters, one folder a recipe.")],
    target: TargetOption = None,
    device: DeviceOption = "auto",
    checkpoint: CheckpointOption = None,
    checkpoint_every_steps: EveryOption = 500,
    stop_after_s: StopOption = None,
    micro_batches: MicroBatchesOption = 1,
    tensorboard: TensorboardOption = None,
    preflight: PreflightOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train one drafter a recipe, all on the same text, and export each with its record.

    On several GPUs or machines: torchrun --nproc-per-node N -m outrider train run ... Each process takes its share of a
    step; the drafter is the same.
    """
    from outrider.backends.local import resolve_device
    from outrider.training.checkpoint import CheckpointOptions
    from outrider.training.config import load_recipe
    from outrider.training.parallel import launched_ranks
    from outrider.training.pipeline import RunOptions, train_drafters
    from outrider.weights.locate import locate_target

    keeping = None
    if checkpoint is not None:
        writable("--checkpoint", checkpoint)
        keeping = CheckpointOptions(file=checkpoint, every_steps=checkpoint_every_steps, stop_after_s=stop_after_s)
    elif stop_after_s is not None:
        raise ConfigError("--stop-after-s leaves steps to be done. Say with --checkpoint FILE where to keep the run.")
    loaded, path = [load_recipe(recipe) for recipe in recipes], locate_target(target)
    folder = writable("--out", out, is_directory=True)
    with launched_ranks(resolve_device(device)) as (ranks, place):
        say = progress_line if ranks.is_first else _silence
        options = RunOptions(
            keeping=keeping, num_micro_batches=micro_batches, ranks=ranks, chat_sha256=lambda: _chat_sha256(path)
        )
        if preflight:
            _show_preflight(path, loaded, data, options, place, as_json=as_json)
            return
        if tensorboard is not None and ranks.is_first:
            options = replace(options, scalars=_board(tensorboard))
        records = train_drafters(path, loaded, data, folder, device=place, progress=say, options=options)
    if not ranks.is_first:
        return
    kept = ("finished", "num_steps_done", "held_out")
    shown = {name: {key: record[key] for key in kept} for name, record in records.items()}
    emit_json(shown) if as_json else progress_line(json.dumps(shown))


def _chat_sha256(target: Path) -> str:
    from outrider.tokenizer import Tokenizer
    from outrider.training.answering import chat_sha256
    from outrider.weights.loader import load_checkpoint

    return chat_sha256(_chat(target, Tokenizer.from_file(load_checkpoint(target).tokenizer_path)))


def _silence(message: str) -> None:
    """What processes beside the first say."""


def _board(folder: Path) -> Callable[[str, int, dict[str, float]], None]:
    from outrider.training.board import Board

    return Board(writable("--tensorboard", folder, is_directory=True)).write


def _show_preflight(
    target: Path, recipes: list[Recipe], data: Path, options: RunOptions, device: torch.device, *, as_json: bool
) -> None:
    from outrider.training.pipeline import prepare
    from outrider.training.preflight import rehearse

    ready = prepare(target, recipes, data, device=device, options=options)
    found = rehearse(ready.run, ready.runner, ready.dataset, ready.preflight())
    if not options.ranks.is_first:
        return
    if as_json:
        emit_json(found.record())
    else:
        show("\n".join(found.lines()))
