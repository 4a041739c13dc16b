"""Where commands write: one JSON object on stdout for machines, everything else on stderr for people."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

console = Console(stderr=True)


def emit_json(value: Any) -> None:
    """Print one JSON object, alone, on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def progress_line(message: str) -> None:
    """One line of progress on stderr."""
    console.print(message, highlight=False, markup=False)
