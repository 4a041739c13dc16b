"""A report as Markdown: every chart is its table."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.benchmarking.report.blocks import Report, Section, Table


def markdown(report: Report) -> str:
    """The whole report."""
    lines = [f"# {report.title}", "", *_glance(report)]
    for section in report.sections:
        lines += ["", *_section(section)]
    lines += ["", "## Environments, arms and commands"]
    for section in report.sections:
        lines += ["", f"### {dict(section.facts)['record']}", "", "```json", section.raw, "```"]
    return "\n".join(lines) + "\n"


def _glance(report: Report) -> list[str]:
    rows = []
    for section in report.sections:
        facts = dict(section.facts)
        headlines = "; ".join(f"{figure.label} {figure.value}" for figure in section.figures[:2])
        rows.append((facts["record"], section.title, headlines or "–", facts["where"]))
    return list(_table(Table(("record", "what", "headline", "where"), tuple(rows))))


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield ""
    yield from (f"- {name}: {_safe(words)}" for name, words in section.facts)
    for words in (*section.findings, *section.warnings):
        yield from ("", f"> {_safe(words)}")
    if section.figures:
        yield ""
    for figure in section.figures:
        yield f"- **{_safe(figure.label)}: {figure.value}**" + (f" ({figure.note})" if figure.note else "")
    for chart in section.charts:
        yield from ("", f"### {_safe(chart.title)}", "", *_table(chart.table))
    for title, table in section.tables:
        yield from ("", f"### {_safe(title)}", "", *_table(table))


def _table(table: Table) -> Iterator[str]:
    yield _row(table.columns)
    yield "|" + "---|" * len(table.columns)
    yield from map(_row, table.rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(map(_safe, cells)) + " |"


def _safe(words: str) -> str:
    """Text that Markdown does not take for a cell's border or for markup."""
    return words.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
