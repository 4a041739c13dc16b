"""A corpus: answers of the target to conversations, kept as they come, cleaned, packed for `train run`, described."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.backends.base import Backend
from outrider.errors import ConfigError
from outrider.tokenizer import Tokenizer
from outrider.training.answering import AnswerOptions, ChatFormat, Record, answer, check_chat, unwritable
from outrider.training.conversations import Conversation, OnBadRow, reason_of
from outrider.training.corpus_card import Sample, card_markdown, make_card
from outrider.training.files import write_whole
from outrider.training.generate import TextBatch, TextKind
from outrider.training.journal import Journal
from outrider.training.pipeline import write_text

SCHEMA = 1
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True)
class CorpusFiles:
    """Where a corpus lies: beside the file `data` that `train run` reads."""

    data: Path

    @property
    def journal(self) -> Path:
        """Answers as they came."""
        return self.data.with_name(f"{self.data.name}.answers.jsonl")

    @property
    def card(self) -> Path:
        """The card, as JSON."""
        return self.data.with_name(f"{self.data.name}.card.json")

    @property
    def card_page(self) -> Path:
        """The card, as Markdown."""
        return self.data.with_name(f"{self.data.name}.card.md")


def make_corpus(
    backend: Backend,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    conversations: Sequence[Conversation],
    options: AnswerOptions,
    data: Path,
    *,
    identity: dict[str, str],
    dropped: Counter[str],
    on_bad_row: OnBadRow = "stop",
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Answer all conversations that the journal beside `data` lacks, write the corpus and its card; returns the card.

    `identity` says whose answers they are: `target_sha256`, `tokenizer_sha256` and what else must not mix; `dropped`
    are rows left out while reading. Killed and run again, it ends with the same corpus.
    """
    files = CorpusFiles(data)
    settings = asdict(options)
    del settings["num_streams"]  # how many are under way changes no answer
    made_of = {**identity, "chat_template_sha256": check_chat(backend, tokenizer, chat, options), **settings}
    writable, dropped = _writable(conversations, chat, options, dropped, on_bad_row=on_bad_row)
    journal = Journal(files.journal, {"schema": SCHEMA, **made_of})
    try:
        _answer_missing(backend, chat, writable, options, journal, progress=progress)
        samples, unused = select_samples(writable, journal.records)
    finally:
        journal.close()
    card = make_card(
        samples, made_of=made_of, chat=chat.name, num_conversations=len(writable), dropped=dropped + unused
    )
    facts = {**made_of, "num_tokens": card["num_tokens"], "tap_layers": [], "samples_sha256": _digest(samples)}
    write_text(data, facts, [pack(samples, sequence_tokens=options.sequence_tokens)])
    write_whole(files.card, lambda file: file.write(f"{json.dumps(card, indent=1)}\n".encode()), what="card")
    write_whole(files.card_page, lambda file: file.write(card_markdown(card).encode()), what="card")
    return card


def _writable(
    conversations: Sequence[Conversation],
    chat: ChatFormat,
    options: AnswerOptions,
    dropped: Counter[str],
    *,
    on_bad_row: OnBadRow,
) -> tuple[list[Conversation], Counter[str]]:
    """Conversations that the template can write; one that it cannot stops the run before anything is asked."""
    kept = []
    dropped = Counter(dropped)
    for conversation in conversations:
        reason = unwritable(conversation, chat, options)
        if reason is None:
            kept.append(conversation)
        elif on_bad_row == "drop":
            dropped[reason_of(reason)] += 1
        else:
            raise ConfigError(
                f"{conversation.where}: the target's chat template cannot write it ({reason}) Remove it, or give "
                "--drop-bad-rows."
            )
    return kept, dropped


def _answer_missing(
    backend: Backend,
    chat: ChatFormat,
    conversations: Sequence[Conversation],
    options: AnswerOptions,
    journal: Journal,
    *,
    progress: Callable[[str], None],
) -> None:
    missing = [conversation for conversation in conversations if conversation.key not in journal.records]
    if len(missing) < len(conversations):
        progress(f"{len(conversations) - len(missing)} of {len(conversations)} conversations were answered before")
    started_s = shown_s = time.perf_counter()
    num_tokens = 0
    for number, record in enumerate(answer(backend, chat, missing, options), 1):
        journal.append(record)
        num_tokens += sum(len(each["token_ids"]) for each in record["answers"])
        now_s = time.perf_counter()
        if now_s - shown_s >= PROGRESS_EVERY_S or number == len(missing):
            shown_s, spent_s = now_s, max(now_s - started_s, 1e-9)
            left_s = spent_s / number * (len(missing) - number)
            pace = f"{num_tokens / spent_s:.0f} tokens/s, {left_s:.0f} s left"
            progress(f"answered {number}/{len(missing)} conversations, {num_tokens} tokens, {pace}")


def select_samples(
    conversations: Sequence[Conversation], records: dict[str, Record]
) -> tuple[list[Sample], Counter[str]]:
    """Samples to train on, one an answer, and how many turns and answers were left out, by reason.

    In the order of keys, so that neither the order of files nor that of answering decides which of equal answers is
    kept, and held-out samples, the last, are of all files; those of one conversation stay together.
    """
    samples: list[Sample] = []
    left_out: Counter[str] = Counter()
    seen: set[tuple[int, ...]] = set()
    for conversation in sorted(conversations, key=lambda each: each.key):
        record = records[conversation.key]
        if record["ended"] is not None:
            left_out[record["ended"]] += len(conversation.turns) - len(record["answers"])
        for number, found in enumerate(record["answers"]):
            if tuple(found["token_ids"]) in seen:
                left_out["repeated answer"] += 1
                continue
            seen.add(tuple(found["token_ids"]))
            samples.append(Sample(conversation, number, found))
    if not samples:
        raise ConfigError(f"no answer is fit to train on: {dict(left_out)}. Give other conversations or more room.")
    return samples, left_out


def pack(samples: Sequence[Sample], *, sequence_tokens: int) -> TextBatch:
    """A row of `sequence_tokens` = P tokens a sample, padded with 0; only its answer is supervised, from its first
    token on (T-077), so that every answer of a conversation is trained once, in the context it was given in."""
    token_ids = torch.zeros(len(samples), sequence_tokens, dtype=torch.int32)
    for row, sample in zip(token_ids, samples, strict=True):
        row[: sample.num_tokens] = torch.tensor(sample.prompt_token_ids + sample.token_ids, dtype=torch.int32)
    first_label = torch.tensor([len(sample.prompt_token_ids) for sample in samples], dtype=torch.int32)
    num_valid = torch.tensor([sample.num_tokens for sample in samples], dtype=torch.int32)
    return TextBatch(TextKind.GREEDY, token_ids, first_label, num_valid, None, None)


def _digest(samples: Sequence[Sample]) -> str:
    rows = [(sample.prompt_token_ids, sample.token_ids) for sample in samples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
