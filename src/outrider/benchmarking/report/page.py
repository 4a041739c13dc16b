"""A report as one HTML file that needs nothing from elsewhere: style inside, charts as SVG, no script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib import resources

from outrider.benchmarking.report.blocks import REST, Chart, Figure, Report, Section, Table

MAX_OPEN_ROWS = 8
NUMBER = re.compile(r"[−–-]?[\d.,]*\d ?(%|×|ms)?( \(.*\))?|–")


def page(report: Report) -> str:
    """The whole document."""
    style = resources.files("outrider.benchmarking.report").joinpath("report.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}</title>",
            f"<style>\n{style}</style>\n</head>\n<body>",
            *_top(report),
            "<main>",
            *(line for section in report.sections for line in _section(section)),
            *_environments(report),
            "</main>",
            "<footer>Every figure on this page is read from a record; none is typed in here.</footer>",
            "</body>\n</html>\n",
        ]
    )


def _top(report: Report) -> Iterator[str]:
    num = len(report.sections)
    yield f"<header><p class=kicker>Outrider</p><h1>{escape(report.title)}</h1>"
    yield f"<p class=lede>{num} record{'' if num == 1 else 's'}. What was compared, where, and what came out.</p>"
    yield "<ol class=glance>"
    for section in report.sections:
        facts = dict(section.facts)
        first = section.figures[0] if section.figures else Figure("", "")
        source = "published · " if section.is_published else ""
        yield (
            f'<li><a href="#{section.anchor}"><span class=what>{escape(section.title)}<small>{source}'
            f"<span class=file>{escape(facts['record'])} · </span>{escape(facts['where'])}</small></span>"
            f"<span class=value>{escape(first.value)}<small>{escape(first.label)}</small></span></a></li>"
        )
    yield "</ol></header>"


def _section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.anchor}">'
    yield "<aside><dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in section.facts)
    yield "</dl></aside>"
    yield f"<div class=body><h2>{escape(section.title)}</h2>"
    yield from (f"<p class=finding>{escape(words)}</p>" for words in section.findings)
    yield from (f'<p class="finding warning">{escape(words)}</p>' for words in section.warnings)
    if section.figures:
        yield "<ul class=figures>"
        yield from map(_figure, section.figures)
        yield "</ul>"
    for chart in section.charts:
        yield from _chart(chart)
    is_all_there_is = not section.charts
    for title, table in section.tables:
        yield from _folded(title, table, is_open=is_all_there_is or _is_short(title, table))
    yield "</div></section>"


def _is_short(title: str, table: Table) -> bool:
    """True where a table is read at once; the rest of the figures are for who asks for them."""
    return title != REST and len(table.rows) <= MAX_OPEN_ROWS


def _figure(figure: Figure) -> str:
    note = f"<small>{escape(figure.note)}</small>" if figure.note else ""
    return f"<li><span class=label>{escape(figure.label)}</span><b>{escape(figure.value)}</b>{note}</li>"


def _chart(chart: Chart) -> Iterator[str]:
    yield f"<figure><h3>{escape(chart.title)}</h3>"
    yield f"<div class=wide>{chart.wide}</div><div class=narrow>{chart.narrow}</div>"
    yield f"<figcaption>{escape(chart.caption)}</figcaption>"
    yield from _folded("As a table", chart.table, is_open=False)
    yield "</figure>"


def _folded(title: str, table: Table, *, is_open: bool) -> Iterator[str]:
    yield f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary><div class=scroll><table>"
    yield "<thead>" + _row("th", table.columns, table) + "</thead><tbody>"
    yield from (_row("td", row, table) for row in table.rows)
    yield "</tbody></table></div></details>"


def _row(cell: str, words: tuple[str, ...], table: Table) -> str:
    cells = (
        f"<{cell}{' class=num' if _is_numeric(table, index) else ''}>{escape(each)}</{cell}>"
        for index, each in enumerate(words)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _is_numeric(table: Table, column: int) -> bool:
    return bool(table.rows) and all(NUMBER.fullmatch(row[column]) for row in table.rows)


def _environments(report: Report) -> Iterator[str]:
    yield '<section id="environments"><aside></aside><div class=body><h2>Environments, arms and commands</h2>'
    for section in report.sections:
        name = escape(dict(section.facts)["record"])
        yield f"<details><summary>{name}</summary><pre>{escape(section.raw)}</pre></details>"
    yield "</div></section>"
