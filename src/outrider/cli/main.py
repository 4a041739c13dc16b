"""The `outrider` command. Each command group is one thin file; heavy imports wait inside the commands."""

from __future__ import annotations

import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, TextIO

import typer

from outrider.cli import bench, demo, doctor, explain, generate, serve, train
from outrider.environment import package_version
from outrider.errors import OutriderError

_PACKAGE_DIR = Path(__file__).parent.parent

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Lossless block-diffusion speculative decoding for Gemma models."""
    if version:
        sys.stdout.write(f"outrider {package_version('outrider') or 'from source'}\n")
        raise typer.Exit


app.command()(demo.demo)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(serve.serve)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # text is never lost to a terminal that cannot show it
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            app()
        except OutriderError as error:
            sys.stderr.write(f"outrider: {error}\n")
            raise SystemExit(error.exit_code) from None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are one line, as errors are; a library's say where they come from."""
    is_ours = Path(filename).is_relative_to(_PACKAGE_DIR)
    text = f"outrider: {message}\n" if is_ours else warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


if __name__ == "__main__":
    main()
