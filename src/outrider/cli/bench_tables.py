"""Tables of `bench decode` and `bench kernel` for a terminal: columns that say something, as many as fit beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.cli.output import progress_line, show

SHOWN_KERNELS = 12
NOTHING = "–"
Column = tuple[str, list[str]]
"""A head, perhaps of several lines, and a text for each row."""

_KEYS = {"n": "num_speculative_tokens", "batch": "batch", "prompt": "prompt_tokens"}
_FIGURES: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("tok/s", lambda row: _number(row["tokens_per_s"], 1)),
    ("ms a\ncycle", lambda row: _number(row["ms_per_cycle"])),
    ("of\nfloor", lambda row: _share(row["floor_share"])),
    ("accepted", lambda row: _number(row["measured_acceptance_length"])),
    ("prefill\ns", lambda row: _number(row["prefill_s"], 3)),
    ("gaps µs\np50, p99", lambda row: _pair(row["gap_p50_us"], row["gap_p99_us"])),
    ("host\nµs", lambda row: _number(row["host_p50_us"], 0)),
    ("ready\ns", lambda row: _number(row["ready_s"], 1)),
    ("exact", lambda row: {None: NOTHING, True: "yes", False: "NO"}[row["bit_exact"]]),
    ("peer\ntok/s", lambda row: _number(row["peer_tokens_per_s"], 1)),
    ("ratio", lambda row: _number(row["ratio"])),
    ("peer's\nprefill s", lambda row: _number(row["peer_prefill_s"], 3)),
    ("prefill\nratio", lambda row: _number(row["prefill_ratio"])),
)


def show_decode(result: dict[str, Any]) -> None:
    """What `bench decode` found: figures of every cell, then where a cycle of each goes, on a GPU."""
    if not result["summary"]:
        progress_line("no combination was timed to its end")
        return
    for table in decode_tables(result, width=Console().width):
        show(table)
    for cell in result["cells"]:
        if cell["parts"]:
            show(parts_table(cell))


def decode_tables(result: dict[str, Any], *, width: int) -> list[Table]:
    """Figures of all cells in one table of at most `width` characters, or in several, each of which names the cells.

    What is the same for all cells is in the title, and figures that no cell has are left out.
    """
    rows = _merged_rows(result)
    different = {head: name for head, name in _KEYS.items() if len({row[name] for row in rows}) > 1} or {
        "n": _KEYS["n"]
    }
    same = [f"{head} {rows[0][name]}" for head, name in _KEYS.items() if head not in different]
    keys: list[Column] = [(head, [str(row[name]) for row in rows]) for head, name in different.items()]
    columns = [(head, [text(row) for row in rows]) for head, text in _FIGURES]
    columns = [column for column in columns if any(text.strip(f"{NOTHING}, ") for text in column[1])]
    reads = f"{result['target']} on {result['kernels']} kernels, reads reach {result['read_tb_per_s']:.2f} TB/s"
    titles = [", ".join([reads, *same])]
    tables = []
    for shown in _folded(keys, columns, width):
        table = Table(title=titles.pop() if titles else None)
        for head, _ in shown:
            table.add_column(head, justify="right", no_wrap=True)
        for texts in zip(*(texts for _, texts in shown), strict=True):
            table.add_row(*texts)
        tables.append(table)
    return tables


def _merged_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each row of the summary its figures, and those that only a pass has, of the first that timed the cell."""
    passes = [cell for each in (result, *result["again"]) for cell in each["cells"]]
    cells = {tuple(cell[name] for name in _KEYS.values()): cell for cell in reversed(passes)}
    return [{**cells[tuple(row[name] for name in _KEYS.values())], **row} for row in result["summary"]]


def _folded(keys: Sequence[Column], columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns in as few tables as hold them, in order, the keys first in each."""
    tables = [list(keys)]
    for column in columns:
        if _width([*tables[-1], column]) > width and len(tables[-1]) > len(keys):
            tables.append(list(keys))
        tables[-1].append(column)
    return tables


def _width(columns: Sequence[Column]) -> int:
    """Of a table: a line and two spaces a column, and the last line."""
    return 1 + sum(3 + max(len(text) for text in (*head.split("\n"), *texts)) for head, texts in columns)


def parts_table(cell: dict[str, Any]) -> Table:
    """Where a cycle of a cell goes: its parts, then the kernels that take most."""
    where = f"n={cell['num_speculative_tokens']}, batch {cell['batch']}, prompt {cell['prompt_tokens']}"
    table = Table(title=f"{where}: where a cycle goes")
    for column in ("half", "part", "ms", "floor ms", "TB/s", "of floor"):
        table.add_column(column, justify="left" if column in ("half", "part") else "right")
    for row in cell["parts"]:
        figures = (_number(row["ms"]), _number(row["floor_ms"]), _number(row["tb_per_s"]), _share(row["floor_share"]))
        table.add_row(row["half"], row["part"], *figures)
    for kernel in cell["kernels_seen"][:SHOWN_KERNELS]:
        described = f"{kernel['part']}: {kernel['kernel']:.40} {kernel['grid']} × {kernel['per_cycle']:g}"
        table.add_row(kernel["half"], described, _number(kernel["us"] * kernel["per_cycle"] / 1e3), "", "", "")
    return table


def kernel_table(result: dict[str, Any]) -> Table:
    """What `bench kernel` found."""
    table = Table(title=f"{result['target']}: kernels alone; reads reach {result['read_tb_per_s']:.2f} TB/s")
    for column in ("kernel", "rows", "context", "set", "µs", "TB/s", "of floor", "error", "same as alone"):
        table.add_column(column, justify="left" if column in ("kernel", "set") else "right")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            str(row["rows"]),
            NOTHING if row["context"] is None else str(row["context"]),
            row["kernels"],
            _number(row["us"], 1),
            _number(row["tb_per_s"]),
            _share(row["floor_share"]),
            f"{row['error']:.1e}",
            "yes" if row["same_as_alone"] else "no",
        )
    return table


def _pair(first: float | None, second: float | None) -> str:
    return f"{_number(first, 0)}, {_number(second, 0)}"


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.0f} %"
