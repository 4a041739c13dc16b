"""The `outrider` command. Each command group is one thin file; heavy imports wait inside the commands."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import typer

from outrider.cli import demo, doctor, generate, train
from outrider.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Lossless block-diffusion speculative decoding for Gemma models.",
)
app.command()(demo.demo)
app.command()(generate.generate)
app.command()(doctor.doctor)
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # text is never lost to a terminal that cannot show it
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OutriderError as error:
        sys.stderr.write(f"outrider: {error}\n")
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
