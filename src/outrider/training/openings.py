"""Openings: the beginnings of text that the target continues to make a drafter's training text.

Templates and word lists are text files in `openings/`. Everything before a file's first header is a remark; then a
header names what the lines below it are::

    [list dish]         words for the slot {dish}
    [kind recipe 2]     templates of one kind, drawn twice as often as a kind without a number

In a template `\\n` and `\\t` stand for the characters. `{dish}` is a word from that list, the same one wherever it
stands in the template; `{Dish}` begins with a capital, `{dish2}` is drawn independently, and `{task.camel}` rewrites
a snake_case word (`camel`, `pascal`, `words`). The lists of `words.txt` serve every file.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

CATEGORIES: Mapping[str, float] = {"prose": 0.38, "code": 0.20, "questions": 0.11, "lists": 0.09, "languages": 0.22}
"""Share of each category in the openings; a kind's share of its category follows its weight."""

LANGUAGES = (
    "german", "french", "spanish", "italian", "portuguese", "dutch", "polish", "russian", "turkish", "swedish", "czech",
    "indonesian", "japanese", "chinese", "korean", "hindi", "arabic",
)  # fmt: skip

SLOT = re.compile(r"\{(?P<name>[A-Za-z_]+)(?P<index>[2-9]?)(?:\.(?P<form>camel|pascal|words))?\}")
HEADER = re.compile(r"\[(list|kind) ([a-z_]+)(?: (\d+))?\]")
CUT_CATEGORIES = ("prose", "languages")
CUT_PROBABILITY = 0.3
MIN_CUT_WORDS = 3
MAX_DRAWS = 50


@dataclass(frozen=True)
class Opening:
    """One opening, with the category and the kind it was drawn from."""

    text: str
    category: str
    kind: str


@dataclass(frozen=True)
class Kind:
    """Templates of one kind and the word lists that fill their slots."""

    name: str
    category: str
    weight: int
    templates: tuple[str, ...]
    lists: Mapping[str, tuple[str, ...]]


def openings(count: int, rng: random.Random) -> list[str]:
    """The texts of `count` openings; see `draw_openings`."""
    return [opening.text for opening in draw_openings(count, rng)]


def draw_openings(count: int, rng: random.Random) -> list[Opening]:
    """Draw `count` openings in the shares of `CATEGORIES`, distinct until the templates run dry.

    The same state of `rng` gives the same openings.
    """
    kinds = load_kinds()
    weights = kind_weights(kinds)
    seen: set[str] = set()
    drawn: list[Opening] = []
    for kind in rng.choices(kinds, weights, k=count):
        opening = draw_opening(kind, rng)
        for _ in range(MAX_DRAWS):
            if opening.text not in seen:
                break
            opening = draw_opening(kind, rng)
        seen.add(opening.text)
        drawn.append(opening)
    return drawn


def draw_opening(kind: Kind, rng: random.Random) -> Opening:
    """Draw one opening of `kind`; some prose stops early, in mid-sentence, as a user's text does."""
    text = fill_template(rng.choice(kind.templates), kind.lists, rng)
    if kind.category in CUT_CATEGORIES and rng.random() < CUT_PROBABILITY:
        text = cut_short(text, rng)
    return Opening(text, kind.category, kind.name)


def fill_template(template: str, lists: Mapping[str, tuple[str, ...]], rng: random.Random) -> str:
    """Replace every slot of `template` by a word drawn from its list."""
    chosen: dict[str, str] = {}

    def word_for(slot: re.Match[str]) -> str:
        name = slot["name"].lower()
        word = chosen.setdefault(name + slot["index"], rng.choice(lists[name]))
        return render_word(word, slot)

    return SLOT.sub(word_for, template)


def render_word(word: str, slot: re.Match[str]) -> str:
    """Write `word` in the form that `slot` asks for."""
    if slot["form"]:
        first, *rest = word.split("_")
        forms = {
            "camel": first + "".join(map(str.capitalize, rest)),
            "pascal": "".join(map(str.capitalize, (first, *rest))),
            "words": " ".join((first, *rest)),
        }
        word = forms[slot["form"]]
    return word[0].upper() + word[1:] if slot["name"][0].isupper() else word


def cut_short(text: str, rng: random.Random) -> str:
    """Cut `text` after a random word, if it has more words than the fewest we keep."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    if len(ends) <= MIN_CUT_WORDS:
        return text
    return text[: ends[rng.randrange(MIN_CUT_WORDS - 1, len(ends) - 1)]]


def kind_weights(kinds: tuple[Kind, ...]) -> list[float]:
    """The share of each kind, so that the categories have the shares of `CATEGORIES`."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for kind in kinds:
        totals[kind.category] += kind.weight
    return [CATEGORIES[kind.category] * kind.weight / totals[kind.category] for kind in kinds]


@cache
def load_kinds() -> tuple[Kind, ...]:
    """Read every kind of opening from the package's text files."""
    shared = read_sections("words")
    files = [(category, category) for category in CATEGORIES if category != "languages"]
    files += [(language, "languages") for language in LANGUAGES]
    return tuple(kind for file, category in files for kind in read_kinds(file, category, shared))


def read_kinds(file: str, category: str, shared: Mapping[tuple[str, str, int], tuple[str, ...]]) -> list[Kind]:
    """Read the kinds of one file; its own lists come before those of `shared` with the same name."""
    sections = read_sections(file)
    lists = {name: lines for (what, name, _), lines in (*shared.items(), *sections.items()) if what == "list"}
    return [
        Kind(name, category, weight, lines, lists) for (what, name, weight), lines in sections.items() if what == "kind"
    ]


def read_sections(file: str) -> dict[tuple[str, str, int], tuple[str, ...]]:
    """Read `openings/<file>.txt` into {(list or kind, name, weight): its lines}."""
    text = resources.files(__package__).joinpath("openings", f"{file}.txt").read_text(encoding="utf-8")
    sections: dict[tuple[str, str, int], list[str]] = {}
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if header := HEADER.fullmatch(line):
            lines = sections.setdefault((header[1], header[2], int(header[3] or 1)), [])
        elif line:
            lines.append(line.replace("\\n", "\n").replace("\\t", "\t"))
    return {section: tuple(lines) for section, lines in sections.items()}
