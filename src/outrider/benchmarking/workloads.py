"""Named, hashed sets of prompts: what the demo, the golden fixtures and the tests run.

The prompts are what a person tries first with a small base model: beginnings of articles, letters, stories, recipes,
functions, answers and lists, in several languages. They share no run of eight words with any opening a drafter was
trained on; `shared_ngrams` is the measure and a test holds it against every opening the templates can make.
"""

import hashlib
import unicodedata
from dataclasses import dataclass

NGRAM_WORDS = 8


@dataclass(frozen=True)
class Workload:
    """A named set of prompts."""

    name: str
    prompts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Hex digest over the prompts in order; each ends in a zero byte, so moving text between two changes it."""
        return hashlib.sha256("".join(f"{prompt}\0" for prompt in self.prompts).encode()).hexdigest()


def ngrams(text: str, n: int = NGRAM_WORDS) -> set[str]:
    """Every run of `n` consecutive words of `text`, case-folded, without punctuation.

    A Chinese or Japanese character counts as half a word, since those scripts do not mark words: a run of 2n characters
    there weighs as much as n words elsewhere.
    """
    units = split_units(text)
    weights = [1 if is_ideograph_or_kana(unit[0]) else 2 for unit in units]
    runs: set[str] = set()
    end, weight = 0, 0
    for start in range(len(units)):
        while end < len(units) and weight < 2 * n:
            weight += weights[end]
            end += 1
        if weight < 2 * n:
            break
        runs.add(" ".join(units[start:end]))
        weight -= weights[start]
    return runs


def shared_ngrams(a: str, b: str, n: int = NGRAM_WORDS) -> set[str]:
    """Runs of `n` words that both texts contain (see `ngrams`)."""
    return ngrams(a, n) & ngrams(b, n)


def split_units(text: str) -> list[str]:
    """Case-folded words of `text`: runs of letters, marks and digits; each ideograph or kana stands alone."""
    spaced: list[str] = []
    for char in text.casefold():
        if is_ideograph_or_kana(char):
            spaced.append(f" {char} ")
        else:
            spaced.append(char if unicodedata.category(char)[0] in "LMN" else " ")
    return "".join(spaced).split()


def is_ideograph_or_kana(char: str) -> bool:
    """Whether `char` belongs to a script written without spaces between words."""
    return "\u3040" <= char <= "\u30ff" or "\u3400" <= char <= "\u9fff"


DEMO = Workload(
    "demo",
    (
        "The honey bee is a social insect that lives in colonies of up to sixty thousand workers. Each colony has a "
        "single queen, whose task is to",
        "Venice is a city in the north-east of Italy, built on more than a hundred small islands in a shallow lagoon. "
        "Its history begins",
        "When the last ferry had gone, Marta sat down on the harbour wall and opened the letter that her brother had "
        "left for her. It began:",
        "How to repot a house plant\n\nMost house plants need a bigger pot every two years. You will need fresh "
        "compost, a pot one size larger and a watering can.\n\nStep 1:",
        "The water cycle describes how water moves between the oceans, the air and the land. It starts when the sun",
        "Dear Mrs Holloway,\n\nThank you for your letter of 4 May about the noise from our building site. I am very "
        "sorry that",
        "Residents of a small town on the west coast have voted to keep their library open after a campaign that "
        "lasted three years. The decision means that",
        "Tomato and basil soup\n\nServes four. Ready in 35 minutes.\n\nIngredients:\n\n- 1 kg ripe tomatoes\n-",
        "There was once a clockmaker who could repair every clock in the kingdom except his own. One winter night",
        "Regular exercise is good for both the body and the mind. It strengthens the heart, improves sleep and",
        'def fibonacci(n):\n    """Return the n-th Fibonacci number, computed with a loop instead of recursion."""\n',
        "class BankAccount:\n"
        '    """A bank account with an owner and a balance."""\n\n'
        "    def __init__(self, owner, balance=0):\n"
        "        self.owner = owner\n"
        "        self.balance = balance\n\n"
        "    def deposit(self, amount):\n",
        "// Returns true if the given string reads the same forwards and backwards, ignoring case and spaces.\n"
        "function isPalindrome(text) {\n",
        "#include <stdio.h>\n\n/* Sorts an array of n integers in place, smallest first, using bubble sort. */\n"
        "void bubble_sort(int *values, int n)\n{\n",
        "-- Total sales per customer in the last year, largest first\n"
        "SELECT customers.name, SUM(orders.amount) AS total\nFROM customers\nJOIN orders ON",
        "<!DOCTYPE html>\n<html>\n<head>\n  <title>Anna's Bakery</title>\n</head>\n<body>\n"
        "  <h1>Welcome to Anna's Bakery</h1>\n  <p>",
        "Question: Why does ice float on water instead of sinking to the bottom?\nAnswer:",
        "Q: What is the difference between a virus and a bacterium, and why do antibiotics work on only one of them?\n"
        "A:",
        "What should I do if my laptop will not turn on?\n\nFirst, check that the charger is plugged in and that",
        "Things to pack for a weekend of camping with children:\n\n1. A tent\n2. A sleeping bag for everyone\n3.",
        "The planets of the solar system, in order of their distance from the sun:\n\n- Mercury: the smallest planet\n"
        "- Venus:",
        "Der Schwarzwald ist ein Mittelgebirge im Südwesten Deutschlands. Er ist bekannt für seine dichten Wälder, "
        "seine Uhren und",
        "La tour Eiffel a été construite pour l'Exposition universelle de 1889. Aujourd'hui, elle accueille chaque "
        "année",
        "Había una vez un pescador muy pobre que vivía con su hija en una casa pequeña junto al mar. Un día,",
    ),
)

GOLDEN = Workload(
    "golden",
    (
        "The lighthouse keeper climbed the stairs for the last time, counted all of them as he always did, and",
        "Coffee was first grown in Ethiopia and traded across the Red Sea. By the seventeenth century",
        "Gravity is the force that",
        "import csv\n\n\ndef read_scores(path):\n"
        '    """Read a CSV file with the columns name and score; return a dict from name to score."""\n',
        "fn main() {\n    let mut total: u64 = 0;\n    for i in 1..=100 {\n",
        "Q: How many legs does a spider have?\nA:",
        "Shopping list for Saturday's party\n\n- 3 bottles of lemonade\n- 2 bags of crisps\n-",
        "Die Hauptstadt von Österreich ist",
        "Москва — столица России. Этот город известен тем, что",
        "日本の四季はそれぞれ美しい。春には桜が咲き、夏には",
    ),
)

TEST = Workload(
    "test",
    (
        "The old bridge across the valley was closed to lorries in spring because",
        "One, two, three, four, five, six, seven, eight, nine, ten, eleven,",
        "def greet(person):\n    return",
        "Il treno per Napoli parte alle nove e arriva",
        "长江是亚洲最长的河流，它发源于青藏高原，最后流入",  # noqa: RUF001
        "Breaking news 🎉: our team has won the cup! 🏆 Fans",
    ),
)

WORKLOADS = {workload.name: workload for workload in (DEMO, GOLDEN, TEST)}
