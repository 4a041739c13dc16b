"""A target that answers by a function of the prompt's text, in Gemma 4's template and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.backends.scripted import byte_tokenizer
from outrider.cli.train_chat import TemplateChat
from outrider.core import Chunk, Prompt, SamplingParams
from outrider.server.chat import GEMMA4
from outrider.tokenizer import IncrementalDecoder
from outrider.training.answering import AnswerOptions
from outrider.training.conversations import Conversation, read_row

TOKENIZER = byte_tokenizer()
CHAT = TemplateChat(GEMMA4, TOKENIZER)
END_ID = TOKENIZER.eos_ids[-1]
OPTIONS = AnswerOptions(sequence_tokens=400, max_tokens=100, num_streams=2)
CALL = '<|tool_call>call:clock{zone:<|"|>Rome<|"|>}<tool_call|>'
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


class Talker:
    """A `Backend`; `prompts` are the texts it was asked, in order. After `dies_after` answers it is killed."""

    def __init__(self, answers: Callable[[str], str], *, dies_after: int | None = None) -> None:
        self.answers, self.dies_after = answers, dies_after
        self.prompts: list[str] = []

    def encode(self, prompt: Prompt) -> list[int]:
        """As the tokenizer has it."""
        assert isinstance(prompt, str)
        return TOKENIZER.encode(prompt)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Three tokens a chunk, control tokens among them, up to max_tokens."""
        assert params is not None
        if len(self.prompts) == self.dies_after:
            raise KeyboardInterrupt
        text = "".join(TOKENIZER.token_text(int(token_id)) for token_id in prompt)
        self.prompts.append(text)
        token_ids = [*TOKENIZER.encode(self.answers(text), add_bos=False), END_ID]
        kept = token_ids[: params.max_tokens]
        decoder = IncrementalDecoder(TOKENIZER, shown_ids=params.shown_token_ids)
        for at in range(0, len(kept), 3):
            part, is_last = kept[at : at + 3], at + 3 >= len(kept)
            shown = decoder.push(token_id for token_id in part if token_id not in params.stop_token_ids)
            reason = ("stop" if kept[-1] == END_ID else "length") if is_last else None
            yield Chunk(0, shown, tuple(part), 0, finish_reason=reason)


def row(line: str) -> Conversation:
    """One row."""
    return read_row(line, where="talk")


def question(text: str) -> Conversation:
    """A plain prompt."""
    return row(f'{{"prompt": "{text}"}}')
