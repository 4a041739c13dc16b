"""Openings: distinct, mixed as declared, repeatable, and made of well-formed templates."""

import random
from collections import Counter

import pytest

from outrider.training.openings import (
    CATEGORIES,
    LANGUAGES,
    SLOT,
    Opening,
    cut_short,
    draw_openings,
    fill_template,
    load_kinds,
    openings,
)


@pytest.fixture(scope="module")
def drawn() -> list[Opening]:
    return draw_openings(40_000, random.Random(7))


def test_tens_of_thousands_of_openings_are_distinct(drawn: list[Opening]) -> None:
    assert len({opening.text for opening in drawn}) >= 0.99 * len(drawn)


def test_the_categories_have_their_declared_shares(drawn: list[Opening]) -> None:
    assert sum(CATEGORIES.values()) == pytest.approx(1)
    counts = Counter(opening.category for opening in drawn)
    for category, share in CATEGORIES.items():
        assert counts[category] / len(drawn) == pytest.approx(share, abs=0.01)


def test_every_kind_and_language_occurs(drawn: list[Opening]) -> None:
    kinds = {opening.kind for opening in drawn}
    assert kinds == {kind.name for kind in load_kinds()}
    assert kinds >= set(LANGUAGES)


def test_most_openings_are_short_and_none_is_long(drawn: list[Opening]) -> None:
    lengths = [len(opening.text.split()) for opening in drawn]
    assert min(lengths) >= 1
    assert max(lengths) <= 60
    assert sum(3 <= length <= 15 for length in lengths) > 0.6 * len(lengths)
    assert sum(length > 15 for length in lengths) > 0.08 * len(lengths)


def test_the_same_random_state_gives_the_same_openings() -> None:
    first = openings(500, random.Random(1))
    assert openings(500, random.Random(1)) == first
    assert openings(500, random.Random(2)) != first


def test_kind_names_are_unique() -> None:
    names = [kind.name for kind in load_kinds()]
    assert len(set(names)) == len(names)


def test_every_slot_has_a_list_and_no_word_has_a_slot() -> None:
    for kind in load_kinds():
        for template in kind.templates:
            unknown = [slot[0] for slot in SLOT.finditer(template) if slot["name"].lower() not in kind.lists]
            assert not unknown, f"{kind.name}: {template!r} has no list for {unknown}"
        assert not [word for words in kind.lists.values() for word in words if SLOT.search(word)]


def test_lists_and_templates_hold_no_duplicates() -> None:
    for kind in load_kinds():
        for lines in (kind.templates, *kind.lists.values()):
            assert not [line for line, times in Counter(lines).items() if times > 1], kind.name


def test_no_opening_is_blank_or_keeps_a_slot(drawn: list[Opening]) -> None:
    assert not [opening for opening in drawn if not opening.text.strip() or SLOT.search(opening.text)]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{task} {task}", "is_prime is_prime"),
        ("{task.camel} {Task.pascal} {task.words}", "isPrime IsPrime is prime"),
        ("{Name} met {name}. {{name}}", "Ann met Ann. {Ann}"),
    ],
)
def test_slots_are_filled_alike_and_in_the_form_asked_for(template: str, text: str) -> None:
    lists = {"task": ("is_prime",), "name": ("Ann",)}
    assert fill_template(template, lists, random.Random(0)) == text


def test_a_numbered_slot_is_drawn_on_its_own() -> None:
    lists = {"name": tuple("abcdefgh")}
    pairs = {fill_template("{name}{name2}", lists, random.Random(seed)) for seed in range(50)}
    assert any(pair[0] != pair[1] for pair in pairs)


def test_a_cut_ends_after_a_word_and_keeps_the_layout() -> None:
    text = "Dear Ann,\n\nthank you very much"
    cuts = {cut_short(text, random.Random(seed)) for seed in range(50)}
    assert cuts == {"Dear Ann,\n\nthank", "Dear Ann,\n\nthank you", "Dear Ann,\n\nthank you very"}
    assert cut_short("Dear Ann, hello", random.Random(0)) == "Dear Ann, hello"
