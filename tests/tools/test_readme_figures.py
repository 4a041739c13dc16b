"""Figures in the README are those of the records it names."""

from __future__ import annotations

from tools.readme_figures import ROOT, comparison_table, table


def test_the_table_of_figures_is_what_the_records_say() -> None:
    assert table() in (ROOT / "README.md").read_text()


def test_so_is_the_table_of_comparisons() -> None:
    assert comparison_table() in (ROOT / "README.md").read_text()
