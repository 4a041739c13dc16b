from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.scripted import byte_tokenizer
from outrider.core import Chunk, TokenLogprobs
from outrider.server.chat import GEMMA4
from outrider.server.chat_replies import ChatChoice, ThoughtCounter
from outrider.server.messages import Tool
from outrider.server.parser import ChatParser
from outrider.server.replies import Tally
from outrider.tokenizer import IncrementalDecoder
from tests.serving import joined_message, whole_message

TOKENIZER = byte_tokenizer()
ANSWER = (
    "<|channel>thought\nplan: añadir 🙂<channel|>Sure, 삼. "
    '<|tool_call>call:get{city:<|"|>Oslo<|"|>,days:3}<tool_call|><|tool_call>call:get{city:<|"|>삼<|"|>}<tool_call|>'
)
TOKEN_IDS = tuple(TOKENIZER.encode(ANSWER, add_bos=False))


def make_choice(*, thinking: bool = True, prompt: str = "<|turn>model\n") -> ChatChoice:
    parser = ChatParser(GEMMA4, (Tool("get"),), enable_thinking=thinking, prompt=prompt)
    thoughts = ThoughtCounter(TOKENIZER, prompt, enable_thinking=thinking)
    return ChatChoice(0, TOKENIZER, Tally(4), parser, thoughts, wants_logprobs=False)


def answer(cuts: list[int]) -> tuple[dict[str, object], dict[str, object], int]:
    """The streamed message, the whole one and the number of thought tokens, for chunks that part at `cuts`."""
    choice = make_choice()
    decoder = IncrementalDecoder(TOKENIZER, shown_ids=GEMMA4.shown_token_ids(TOKENIZER))
    edges = [0, *sorted(set(cuts)), len(TOKEN_IDS)]
    pieces = choice.opening()
    for start, end in pairwise(edges):
        is_last = end == len(TOKEN_IDS)
        text = decoder.push(TOKEN_IDS[start:end]) + (decoder.flush() if is_last else "")
        pieces += choice.push(Chunk(0, text, TOKEN_IDS[start:end], 0, "stop" if is_last else None))
    streamed = joined_message([{"choices": [piece]} for piece in pieces])
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    return streamed, whole_message({"choices": [choice.whole()]}), choice.tally.num_reasoning_tokens


@given(st.lists(st.integers(1, len(TOKEN_IDS) - 1), max_size=40))
def test_any_cut_gives_the_same_message(cuts: list[int]) -> None:
    streamed, whole, num_thoughts = answer(cuts)
    assert streamed == whole
    calls = [(name, json.loads(arguments)) for name, arguments in whole.pop("calls")]  # type: ignore[attr-defined]
    assert calls == [("get", {"city": "Oslo", "days": 3}), ("get", {"city": "삼"})]
    assert whole["reasoning"] == "plan: añadir 🙂"
    assert str(whole["content"]).strip() == "Sure, 삼."
    assert whole["finish_reason"] == "tool_calls"
    assert num_thoughts == len("thought\nplan: añadir 🙂".encode())


def test_thoughts_are_counted_by_their_markers() -> None:
    count = lambda prompt, ids, thinking=True: ThoughtCounter(TOKENIZER, prompt, enable_thinking=thinking).count(ids)  # noqa: E731
    assert count("x", (97, 259, 98, 99, 260, 100)) == 2
    assert count("x<|channel>", (98, 260, 100)) == 1
    assert count("x<|channel>thought\n", (98, 260, 100)) == 1
    assert count("x<|channel>thought\n<channel|>", (98, 260, 100)) == 1
    assert count("x<|channel>thought\n<channel|>", (98, 100), thinking=False) == 0
    assert count("<|channel>old<turn|>new", (98, 100)) == 0


def test_tokens_are_spelled_as_ids_on_request_and_their_bytes_stay() -> None:
    parser = ChatParser(GEMMA4, (), enable_thinking=False, prompt="")
    thoughts = ThoughtCounter(TOKENIZER, "", enable_thinking=False)
    choice = ChatChoice(0, TOKENIZER, Tally(4), parser, thoughts, wants_logprobs=True, shows_ids=True)
    choice.push(Chunk(0, "a", (97,), 0, "stop", logprobs=(TokenLogprobs(97, -0.5, ((98, -1.0),)),)))
    (entry,) = choice.whole()["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    assert entry["top_logprobs"] == [{"token": "token_id:98", "logprob": -1.0, "bytes": [98]}]


def test_a_message_without_text_is_an_empty_string_and_with_calls_null() -> None:
    plain = make_choice()
    plain.push(Chunk(0, "", (), 0, "stop"))
    assert plain.whole()["message"]["content"] == ""
    assert "tool_calls" not in plain.whole()["message"]
    calling = make_choice()
    calling.push(Chunk(0, "<|tool_call>call:get{}<tool_call|>", (), 0, "stop"))
    assert calling.whole()["message"]["content"] is None
