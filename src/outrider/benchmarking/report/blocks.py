"""What a report is made of, before it is Markdown or HTML."""

from __future__ import annotations

from dataclasses import dataclass, field

REST = "All figures"  # the table of a section that holds what its charts and other tables do not


@dataclass(frozen=True)
class Figure:
    """A headline: what it is, its value, and what one must know beside it (its interval, usually)."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text under columns; columns of numbers are set flush right by who renders it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """A drawing as SVG, once for a desk and once for a telephone, and its figures as a table for who cannot see it."""

    title: str
    caption: str
    wide: str
    narrow: str
    table: Table


@dataclass(frozen=True)
class Section:
    """One record: what was compared and where, what may be claimed, and what a reader must not miss."""

    anchor: str
    title: str
    facts: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    findings: tuple[str, ...]
    warnings: tuple[str, ...]
    charts: tuple[Chart, ...]
    tables: tuple[tuple[str, Table], ...]
    raw: str = field(repr=False)
    """Environment, arms and command as JSON."""
    is_published: bool = False


@dataclass(frozen=True)
class Report:
    """All sections, in the order of their files."""

    title: str
    sections: tuple[Section, ...]
