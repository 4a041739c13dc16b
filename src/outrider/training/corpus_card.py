"""What a corpus is made of, and what a drafter trained on it will therefore be good and bad at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.training.answering import Record
from outrider.training.conversations import Conversation

_CODE = re.compile(r"```|^\s*(?:def|class|import|function|#include|SELECT|fn|public) ", re.MULTILINE)
_FENCE = re.compile(r"```([A-Za-z+#]+)")
_IMPLEMENT = re.compile(r"\b(?:implement|write|create|build|add|fix|refactor|make|complete|generate|code)\b", re.I)
_EXPLAIN = re.compile(r"\b(?:explain|why|what|how does|how do|describe|compare|difference|review|summari[sz]e)\b", re.I)
_SCRIPTS = (
    ("japanese", re.compile(r"[\u3040-\u30ff]")),
    ("chinese", re.compile(r"[\u3400-\u9fff]")),
    ("korean", re.compile(r"[\uac00-\ud7af]")),
    ("russian or kin", re.compile(r"[\u0400-\u04ff]")),
    ("arabic or kin", re.compile(r"[\u0600-\u06ff]")),
    ("hindi or kin", re.compile(r"[\u0900-\u097f]")),
)
_FUNCTION_WORDS = {
    "english": "the of and to is that it for with how what you are write a",
    "german": "der die das und ist nicht ein eine mit zu wie was ich schreibe den",
    "french": "le la les et est une des dans pour que qui comment du écris je",
    "spanish": "el los las y es una del para que cómo en por qué escribe un",
    "italian": "il gli e è una di per che come scrivi un della sono con",
    "portuguese": "o os e é uma do da para que como não escreva um em",
    "dutch": "de het een en is van niet voor met hoe wat schrijf dat ik",
}
_WORDS_OF = {name: frozenset(words.split()) for name, words in _FUNCTION_WORDS.items()}
_RARE_SHARE = 0.05


@dataclass(frozen=True)
class Sample:
    """One answer of the target, with the conversation it is of."""

    conversation: Conversation
    turn: int
    record: Record

    @property
    def prompt_token_ids(self) -> list[int]:
        """All before the answer, as the target read it."""
        ids: list[int] = self.record["prompt_token_ids"]
        return ids

    @property
    def token_ids(self) -> list[int]:
        """The answer, its end token included."""
        ids: list[int] = self.record["token_ids"]
        return ids

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)


def domain_of(sample: Sample) -> str:
    """The row's own domain, else "tools", "code" or "chat" by what is asked and answered."""
    conversation = sample.conversation
    if conversation.domain is not None:
        return conversation.domain
    if conversation.tools:
        return "tools"
    return "code" if is_code(sample) else "chat"


def is_code(sample: Sample) -> bool:
    """Whether the row says so, or question or answer has a block or a line of code."""
    conversation = sample.conversation
    shown = _CODE.search(conversation.question) or _CODE.search(sample.record["text"])
    return conversation.domain == "code" or bool(shown)


def language_of(sample: Sample) -> str:
    """The row's own language, else a guess from the question's script and function words, else "unknown"."""
    conversation = sample.conversation
    return conversation.language or guess_language(conversation.question)


def guess_language(text: str) -> str:
    """A language by script, or by which function words are most frequent; "unknown" if none or two are."""
    for name, script in _SCRIPTS:
        if script.search(text):
            return name
    words = re.findall(r"[^\W\d_]+", text.casefold())
    counts = Counter({name: sum(word in known for word in words) for name, known in _WORDS_OF.items()})
    (first, most), (_, next_most) = counts.most_common(2)
    return first if most > next_most else "unknown"


def intent_of(sample: Sample) -> str:
    """What a question about code wants: "implement", "explain" or "other", by the English verb that comes first."""
    question = sample.conversation.question
    found = {"implement": _IMPLEMENT.search(question), "explain": _EXPLAIN.search(question)}
    starts = {name: match.start() for name, match in found.items() if match}
    return min(starts, key=lambda name: starts[name]) if starts else "other"


def make_card(
    samples: Sequence[Sample], *, made_of: dict[str, Any], chat: str, num_conversations: int, dropped: Counter[str]
) -> dict[str, Any]:
    """The card of a corpus, for JSON. Shares are of samples; lengths in tokens."""
    code = [sample for sample in samples if is_code(sample)]
    fences = [fence[1].lower() for sample in code if (fence := _FENCE.search(sample.record["text"]))]
    shares = {
        "domains": _shares(map(domain_of, samples)),
        "languages": _shares(map(language_of, samples)),
        "code_intents": _shares(map(intent_of, code)),
        "code_languages": _shares(fences),
    }
    slices = {
        "thinking": _share(samples, lambda sample: sample.record["has_thought"]),
        "tool_calls": _share(samples, lambda sample: sample.record["num_calls"] > 0),
        "later_turns": _share(samples, lambda sample: sample.turn > 0),
        "code": len(code) / len(samples),
        "cut_at_the_limit": _share(samples, lambda sample: sample.record["finish_reason"] == "length"),
    }
    return {
        "schema": 1,
        "made_of": made_of,
        "chat_template": chat,
        "num_conversations": num_conversations,
        "num_samples": len(samples),
        "num_tokens": sum(len(sample.token_ids) for sample in samples),
        "prompt_tokens": _spread([len(sample.prompt_token_ids) for sample in samples]),
        "answer_tokens": _spread([len(sample.token_ids) for sample in samples]),
        **shares,
        "slices": slices,
        "dropped": dict(sorted(dropped.items())),
        "bias": bias(shares, slices),
    }


def bias(shares: dict[str, dict[str, float]], slices: dict[str, float]) -> str:
    """One paragraph: what most of the corpus is, and what it hardly has."""
    domain, language = (next(iter(shares[kind])) for kind in ("domains", "languages"))
    most = f"{shares['domains'][domain]:.0%} of the answers are {domain}, {shares['languages'][language]:.0%} "
    most += f"follow a question in {language}"
    if shares["code_intents"]:
        intent = next(iter(shares["code_intents"]))
        most += f", and {shares['code_intents'][intent]:.0%} of those with code are of type {intent}"
    rare = [name.replace("_", " ") for name in ("thinking", "tool_calls", "later_turns", "code")]
    rare = [name for name in rare if slices[name.replace(" ", "_")] < _RARE_SHARE]
    lacking = f"It has little or nothing of {', '.join(rare)}: expect shorter accepted drafts there. " if rare else ""
    return (
        f"This corpus is biased: {most}. {lacking}All answers are greedy, so sampled text is less well covered. "
        "Measure acceptance on your own requests before you rely on a drafter trained on it."
    )


def card_markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    lines = ["# Corpus card", "", card["bias"], ""]
    lines += [f"- {card['num_samples']} answers to {card['num_conversations']} conversations, "]
    lines[-1] += f"{card['num_tokens']} tokens to learn from."
    for kind in ("prompt", "answer"):
        spread = card[f"{kind}_tokens"]
        lines.append(f"- Tokens of a{'n' if kind == 'answer' else ''} {kind}: median {spread['median']}, ")
        lines[-1] += f"{spread['min']} to {spread['max']}."
    lines += [
        f"- Target {card['made_of'].get('target_sha256', 'unknown')}; chat template: {card['chat_template']}.",
        "",
    ]
    titles = {"domains": "Domains", "languages": "Languages", "code_intents": "What questions about code want"}
    titles |= {"code_languages": "Languages of code blocks", "slices": "Slices"}
    for key, title in titles.items():
        if card[key]:
            rows = [f"| {_cell(name)} | {share:.1%} |" for name, share in card[key].items()]
            lines += [f"## {title}", "", "| of all | share |", "|---|---|", *rows, ""]
    lines += ["## Left out", ""]
    lines += [f"- {name}: {count}" for name, count in card["dropped"].items()] or ["- nothing"]
    lines += ["", "Domains and languages are the rows' own where they have them, else guessed from words.", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("_", " ").replace("|", "\\|").replace("\n", " ")


def _share(samples: Sequence[Sample], holds: Any) -> float:
    return sum(bool(holds(sample)) for sample in samples) / len(samples)


def _shares(labels: Iterable[str]) -> dict[str, float]:
    """Share of each label, largest first; equal ones by name."""
    counts = Counter(labels)
    order = sorted(counts, key=lambda name: (-counts[name], name))
    return {name: counts[name] / counts.total() for name in order}


def _spread(lengths: Sequence[int]) -> dict[str, int]:
    ordered = sorted(lengths)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1], "total": sum(ordered)}
