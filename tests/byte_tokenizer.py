"""F6 as a real tokenizer: ids 0-255 are bytes, then the control tokens."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import decoders
from tokenizers.models import BPE

from outrider.tokenizer import Tokenizer

BOS, EOS, CALL, CALL_END, QUOTE = 256, 257, 258, 259, 260


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Its control tokens are those of tool calls, besides begin and end."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<bos>": BOS, "<eos>": EOS}
    backend = JsonTokenizer(BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<bos>", "<eos>", "<|tool_call>", "<tool_call|>", '<|"|>'])
    return Tokenizer(backend, bos_id=BOS, eos_ids=[EOS])
