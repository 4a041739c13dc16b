"""Workloads: stable, distinct, and foreign to everything a drafter was trained on."""

import itertools
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterable

import pytest

from outrider.benchmarking.workloads import (
    DEMO,
    GOLDEN,
    NGRAM_WORDS,
    TEST,
    WORKLOADS,
    is_ideograph_or_kana,
    ngrams,
    shared_ngrams,
    split_units,
)
from outrider.training.openings import SLOT, Kind, draw_openings, load_kinds, openings, render_word

ALL_PROMPTS = [prompt for workload in WORKLOADS.values() for prompt in workload.prompts]

# A place in a template, as the tuples of units that can stand there.
Place = list[tuple[str, ...]]


def test_the_demo_is_large_enough_and_its_prompts_have_a_natural_length() -> None:
    assert len(DEMO.prompts) == 24
    assert all(8 <= len(prompt.split()) <= 60 for prompt in DEMO.prompts)


def test_no_prompt_is_used_twice() -> None:
    assert len(set(ALL_PROMPTS)) == len(ALL_PROMPTS) == len(DEMO.prompts) + len(GOLDEN.prompts) + len(TEST.prompts)


def test_the_hash_changes_with_the_text_and_with_its_division() -> None:
    def hash_of(*prompts: str) -> str:
        return type(DEMO)("x", prompts).sha256

    hashes = {hash_of("ab", "c"), hash_of("a", "bc"), hash_of("abc"), hash_of("c", "ab")}
    assert len(hashes) == 4
    assert hash_of("ab", "c") == hash_of("ab", "c")
    assert len(DEMO.sha256) == 64


def test_workloads_import_without_torch() -> None:
    code = "import sys, outrider.benchmarking.workloads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_planted_run_of_eight_words_is_found() -> None:
    planted = "the quick brown fox jumps over the fence"
    ours = f"Well, {planted} again."
    theirs = "She said: 'The quick, brown FOX\njumps over the fence!'"
    assert shared_ngrams(ours, theirs) == {planted}
    assert not shared_ngrams(ours, theirs.replace("over", "under"))


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("max_value = f(x1)", ["max", "value", "f", "x1"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("東京 tower、高い", ["東", "京", "tower", "高", "い"]),
    ],
)
def test_units_are_words_or_single_characters_of_unspaced_scripts(text: str, units: list[str]) -> None:
    assert split_units(text) == units


def test_sixteen_characters_of_an_unspaced_script_weigh_as_much_as_eight_words() -> None:
    run = "春眠不觉晓处处闻啼鸟夜来风雨声花"
    assert len(run) == 2 * NGRAM_WORDS
    assert shared_ngrams(f"他说：{run}。", f"诗云{run}落") == {" ".join(run)}  # noqa: RUF001
    assert not ngrams(run[1:])


def test_no_template_can_make_eight_words_of_a_prompt() -> None:
    wanted = {tuple(run.split()) for prompt in ALL_PROMPTS for run in ngrams(prompt)}
    made = [
        (kind.name, template, " ".join(run))
        for kind in load_kinds()
        for template in kind.templates
        for run in runs_that_can_be_made(places_of(template, kind), wanted)
    ]
    assert made == []


def test_the_exhaustive_check_finds_a_run_across_slots() -> None:
    kind = Kind("x", "prose", 1, (), {"fruit": ("red apple", "pear"), "name": ("Ann", "Bo")})
    places = places_of("When {name}'s {fruit}s fell, {name} and everyone else laughed", kind)
    run = tuple(split_units("apples fell, Bo and everyone else laughed"))
    assert runs_that_can_be_made(places, {run, ("pear", "fell")}) == [run]


def test_the_exhaustive_check_recognises_what_the_templates_made() -> None:
    places = {kind.name: [places_of(template, kind) for template in kind.templates] for kind in load_kinds()}
    for opening in draw_openings(400, random.Random(9)):
        for run in sorted(ngrams(opening.text))[:2]:
            wanted = [tuple(run.split())]
            assert any(runs_that_can_be_made(one, wanted) for one in places[opening.kind]), run


def test_no_drawn_opening_shares_eight_words_with_a_prompt() -> None:
    wanted = {run for prompt in ALL_PROMPTS for run in ngrams(prompt)}
    assert [text for text in openings(10_000, random.Random(20)) if wanted & ngrams(text)] == []


def places_of(template: str, kind: Kind) -> list[Place]:
    """The places of `template` in order; letters that touch a slot belong to the slot's place."""
    places: list[Place] = []
    touching: list[list[str]] = []

    def close() -> None:
        texts = map("".join, itertools.product(*touching))
        places.append(list({tuple(split_units(text)) for text in texts}))
        touching.clear()

    end = 0
    for slot in (*SLOT.finditer(template), None):
        for char in template[end : slot.start() if slot else None]:
            if unicodedata.category(char)[0] in "LMN" and not is_ideograph_or_kana(char):
                touching.append([char])
            else:
                close()
                places.append([tuple(split_units(char))])
        if slot:
            touching.append([render_word(word, slot) for word in kind.lists[slot["name"].lower()]])
            end = slot.end()
    close()
    return places


def runs_that_can_be_made(places: list[Place], wanted: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The runs of `wanted` that some choice for each place spells out, starting anywhere."""
    vocabulary = {unit for place in places for choice in place for unit in choice}
    return [run for run in wanted if vocabulary.issuperset(run) and can_make(places, run)]


def can_make(places: list[Place], run: tuple[str, ...]) -> bool:
    """Whether some choice for each place spells out `run`, starting anywhere."""

    def continues(index: int, rest: tuple[str, ...]) -> bool:
        return not rest or (index < len(places) and any(begins(choice, index, rest) for choice in places[index]))

    def begins(choice: tuple[str, ...], index: int, rest: tuple[str, ...]) -> bool:
        return choice[: len(rest)] == rest[: len(choice)] and continues(index + 1, rest[len(choice) :])

    return any(
        begins(choice[offset:], index, run)
        for index, place in enumerate(places)
        for choice in place
        for offset in range(len(choice))
    )
