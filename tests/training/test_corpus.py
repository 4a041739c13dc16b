from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cli.train_chat import TemplateChat
from outrider.errors import ConfigError
from outrider.server.chat import PLAIN
from outrider.training import corpus
from outrider.training.conversations import Conversation
from outrider.training.corpus import CorpusFiles, make_corpus, pack, select_samples
from outrider.training.corpus_card import Sample
from outrider.training.dataset import anchor_candidates
from outrider.training.generate import TextKind
from outrider.training.pipeline import read_text
from tests.training.talk import CHAT, OPTIONS, TOKENIZER, TOOL, Talker, question, row

IDENTITY = {"target_sha256": "abc", "tokenizer_sha256": "def"}
ASKED = [question(f"What is {number}?") for number in range(12)] + [row('{"turns": ["Who?", "And you?"]}')]


def says(prompt: str) -> str:
    return (
        "I cannot say." if "What is 3" in prompt or "What is 7" in prompt else f"It is {zlib.crc32(prompt.encode())}."
    )


def made(folder: Path, talker: Talker, asked: list[Conversation] = ASKED, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"dropped": Counter({"bad row": 1}), "progress": lambda _: None, **more}
    options = given.pop("options", OPTIONS)
    identity = given.pop("identity", IDENTITY)
    chat = given.pop("chat", CHAT)
    return make_corpus(talker, TOKENIZER, chat, asked, options, folder / "c.pt", identity=identity, **given)


def contents(folder: Path) -> tuple[Any, ...]:
    files = CorpusFiles(folder / "c.pt")
    facts, (batch,) = read_text(files.data, device=torch.device("cpu"))
    return (
        facts,
        batch.token_ids.tolist(),
        batch.first_label.tolist(),
        files.card.read_text(),
        files.card_page.read_text(),
    )


def test_killed_and_started_again_it_ends_with_the_same_corpus(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    card = made(tmp_path / "whole", Talker(says))
    lines: list[str] = []
    num_asked = 0
    for dies_after in (4, 5, 3):
        talker = Talker(says, dies_after=dies_after)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "killed", talker)
        num_asked += len(talker.prompts)
        assert not (tmp_path / "killed" / "c.pt").exists()
    last = Talker(says)
    again = made(tmp_path / "killed", last, ASKED[::-1], progress=lines.append, options=replace(OPTIONS, num_streams=5))
    assert again == card
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert len(last.prompts) < 14 <= num_asked + len(last.prompts)
    assert "conversations were answered before" in lines[0]
    assert "0 s left" in lines[-1]
    made(tmp_path / "killed", unasked := Talker(says))
    assert unasked.prompts == []


def test_answers_that_repeat_are_kept_once_and_everything_left_out_is_counted(tmp_path: Path) -> None:
    card = made(tmp_path, Talker(says))
    assert card["dropped"] == {"bad row": 1, "repeated answer": 1}
    assert (card["num_conversations"], card["num_samples"]) == (13, 13)
    facts, (batch,) = read_text(tmp_path / "c.pt", device=torch.device("cpu"))
    assert facts["num_tokens"] == card["num_tokens"]
    assert facts["target_sha256"] == "abc"
    assert len(batch.token_ids) == 13
    assert json.loads(CorpusFiles(tmp_path / "c.pt").card.read_text()) == card


def test_turns_that_were_not_answered_are_counted(tmp_path: Path) -> None:
    card = made(tmp_path, Talker(lambda prompt: "" if "Who?" in prompt else says(prompt)))
    assert card["dropped"]["empty answer"] == 2
    with pytest.raises(ConfigError, match="no answer is fit to train on"):
        made(tmp_path, Talker(lambda _: ""), [question("Else?")])


def test_only_answers_are_supervised_from_their_first_token_on() -> None:
    """T-077: the anchor before it is the prompt's last token."""
    prompt, found = [2, 50, 51, 52], [60, 61, 62]
    record = {"prompt_token_ids": prompt, "token_ids": found}
    batch = pack([Sample(question("Why?"), 0, record)], sequence_tokens=10)
    assert batch.kind is TextKind.GREEDY
    assert batch.token_ids.tolist() == [[2, 50, 51, 52, 60, 61, 62, 0, 0, 0]]
    assert anchor_candidates(batch).nonzero()[:, 1].tolist() == [3, 4, 5]


def test_samples_of_a_conversation_stay_together_whatever_the_order_of_files() -> None:
    two = row('{"turns": ["Who?", "And you?"]}')
    asked = [question(f"{number}") for number in range(5)] + [two]
    answers = {each.key: [{"token_ids": [index]}] for index, each in enumerate(asked)}
    answers[two.key].append({"token_ids": [99]})
    records = {key: {"key": key, "ended": None, "answers": found} for key, found in answers.items()}
    samples, _ = select_samples(asked, records)
    assert samples == select_samples(asked[::-1], records)[0]
    turns = [sample.conversation.key == two.key for sample in samples]
    assert turns.index(True) + 1 == len(turns) - 1 - turns[::-1].index(True)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"identity": {**IDENTITY, "target_sha256": "x"}}, "target_sha256"),
        ({"identity": {**IDENTITY, "tokenizer_sha256": "x"}}, "tokenizer_sha256"),
        ({"chat": TemplateChat(PLAIN, TOKENIZER)}, "chat_template_sha256"),
        ({"options": replace(OPTIONS, max_tokens=9)}, "max_tokens"),
        ({"options": replace(OPTIONS, sequence_tokens=500)}, "sequence_tokens"),
    ],
)
def test_a_corpus_of_something_else_is_not_gone_on_with(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    made(tmp_path, Talker(says), ASKED[:2])
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"another {named}"):
        made(tmp_path, Talker(says), **changed)
    assert contents(tmp_path) == before


def test_a_row_that_the_template_cannot_write_stops_before_anything_is_asked(tmp_path: Path) -> None:
    tools = row(json.dumps({"prompt": "Time?", "tools": [TOOL]}))
    plain = TemplateChat(PLAIN, TOKENIZER)
    talker = Talker(says)
    with pytest.raises(ConfigError, match=r"talk: .*cannot write it .*knows no tools.*--drop-bad-rows"):
        made(tmp_path, talker, [*ASKED[:2], tools], chat=plain)
    assert (talker.prompts, list(tmp_path.iterdir())) == ([], [])
    card = made(tmp_path, talker, [*ASKED[:2], tools], chat=plain, on_bad_row="drop")
    assert card["dropped"] == {"bad row": 1, "bad row: this target has no chat template": 1}


def test_progress_is_told_every_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PROGRESS_EVERY_S", 0.0)
    lines: list[str] = []
    made(tmp_path, Talker(says), progress=lines.append)
    assert [line.split()[1] for line in lines] == [f"{number}/13" for number in range(1, 14)]
    assert all("tokens/s" in line and "s left" in line for line in lines)
