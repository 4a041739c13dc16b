"""The playground in a real browser: skipped where there is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.backends.scripted import Script
from tests.browser import Page, browse, needs_browser
from tests.serving import Served, eventually, serve

TEXT = "Drafts ride ahead. 🙂 The target decides."
STATIC = Path(__file__).resolve().parents[2] / "src" / "outrider" / "server" / "static"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    scripts = {"fail": Script.of_text("So far", error="logits are not finite"), "": Script.of_text(TEXT)}
    with serve(scripts) as served:
        yield served


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browse(served.url, tmp_path_factory.mktemp("profile")) as page:
        eventually(lambda: page.evaluate("document.readyState === 'complete' && typeof submit === 'function'"))
        yield page


def run(page: Page, prompt: str, *, kind: str = "completion", draft: bool = True) -> None:
    """Fill the form in and wait for the end of the answer."""
    page.evaluate(f"byId('prompt').value = {json.dumps(prompt)}; byId('draft').checked = {json.dumps(draft)}")
    page.evaluate(f"document.querySelector('input[value={kind}]').checked = true; submit()")


@needs_browser
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_is_streamed_with_its_drafts_marked(served: Served, page: Page, kind: str) -> None:
    run(page, "hello", kind=kind)
    assert page.evaluate("byId('answer').textContent") == TEXT
    assert page.evaluate("[...document.querySelectorAll('#answer .drafted')].slice(0, 3).map(e => e.textContent)") == [
        *"Dra"  # three of the four tokens of each block
    ]
    assert page.evaluate("document.querySelectorAll('#answer span')[3].className") == ""
    num_tokens = len(TEXT.encode()) + 1  # and the end of the turn
    assert re.match(rf"{num_tokens} tokens, .*, 4\.00 tokens a cycle", page.evaluate("byId('figures').textContent"))
    assert page.evaluate("byId('status').textContent").startswith("ready, drafting with script, 3 tokens a cycle")
    assert page.evaluate("byId('acceptance').getContext('2d').getImageData(0, 0, 480, 140).data.some(x => x)")
    assert page.evaluate("!byId('run').disabled && byId('stop').disabled")


@needs_browser
def test_the_switch_turns_drafting_off(served: Served, page: Page) -> None:
    run(page, "hello", draft=False)
    assert page.evaluate("byId('answer').textContent") == TEXT
    assert page.evaluate("document.querySelectorAll('#answer .drafted').length") == 0
    assert served.backend.submitted[-1][1].num_speculative_tokens == 0


@needs_browser
def test_a_failure_is_shown(served: Served, page: Page) -> None:
    run(page, "fail")
    assert "not finite" in page.evaluate("document.querySelector('#answer .error').textContent")


def test_it_needs_nothing_from_elsewhere() -> None:
    for path in STATIC.iterdir():
        assert not re.search(r"https?:|[\"'(]//|@import|\bimport\b", path.read_text(encoding="utf-8")), path.name
