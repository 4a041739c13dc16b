"""Answers that must match a grammar: which tokens may come next, for the target's rows and for drafts.

xgrammar follows the grammar; it is asked here and nowhere else. Tokens that became text advance a request's matcher
for good. Drafts advance it only while they are looked at, and are taken back. A row is masked for the text before it,
drafts included, so that drafting changes no text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from outrider.core import Grammar, SamplingParams
from outrider.errors import ConfigError, RequestError
from outrider.tokenizer import Tokenizer

MAX_WHITESPACE = 16  # characters between two elements of JSON: room for indents, none for a model that writes on and on
MAX_NESTING = 100  # brackets; xgrammar's time grows with the square, and its stack has an end
_BITS = 32  # in a word of a mask
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line before xgrammar's messages


class Constraint:
    """Where one request stands in its grammar. Made by `make_constraint`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._mask = torch.zeros(1, -(-vocab_size // _BITS), dtype=torch.int32)
        self._num_tried = 0

    @property
    def has_ended(self) -> bool:
        """True once an end token was taken: nothing may follow, and no mask may be asked for."""
        return bool(self._matcher.is_terminated())

    def advance(self, token_id: int) -> bool:
        """Take a token that became text; False if the grammar does not allow it."""
        return bool(self._matcher.accept_token(token_id))

    def try_token(self, token_id: int) -> None:
        """Take a draft that is allowed here, until `take_back`."""
        self._matcher.accept_token(token_id)
        self._num_tried += 1

    def take_back(self) -> None:
        """Forget the drafts that were tried."""
        if self._num_tried:
            self._matcher.rollback(self._num_tried)
        self._num_tried = 0

    def allows(self, token_ids: Tensor | None = None) -> Tensor:
        """Which of some token ids int64 [C] may come next, all of the vocabulary by default; bool, on their device."""
        self._matcher.fill_next_token_bitmask(self._mask)
        words = self._mask[0]
        if token_ids is None:
            bits = words[:, None] >> torch.arange(_BITS, dtype=torch.int32)
            return (bits & 1).bool().flatten()[: self._vocab_size]
        ids = token_ids.cpu()
        return (words[ids // _BITS] >> (ids % _BITS) & 1).bool().to(token_ids.device)

    def legal_rows(self, rows: list[Tensor], raw_rows: list[Tensor], draft_token_ids: Sequence[int]) -> list[Tensor]:
        """K + 1 rows [V] of a block, -inf where the grammar does not go on after the drafts before each.

        Where adjustments ruled out all that is legal, the raw row counts. Rows behind an illegal draft, or behind the
        end, are left as they are: nothing there can become text.
        """
        legal = list(rows)
        for slot in range(min(len(rows), len(draft_token_ids) + 1)):
            if self.has_ended:
                break
            allowed = self.allows()
            is_illegal = ~allowed.to(rows[slot].device)
            legal[slot] = rows[slot].masked_fill(is_illegal, -torch.inf)
            if bool((legal[slot] == -torch.inf).all()):
                legal[slot] = raw_rows[slot].masked_fill(is_illegal, -torch.inf)
            if slot == len(draft_token_ids) or not allowed[draft_token_ids[slot]]:
                break
            self.try_token(draft_token_ids[slot])
        self.take_back()
        return legal


class LegalDrafts:
    """Keeps the drafts of a batch legal while a proposer walks over its slots."""

    def __init__(self, constraints: Sequence[Constraint | None]) -> None:
        self._constraints = {request: each for request, each in enumerate(constraints) if each is not None}
        self._num_requests = len(constraints)
        self._lengths: dict[int, int] = {}  # of requests whose draft has ended
        self._slot = 0

    def mask(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Logits [Q, C] of a slot's candidates int64 [Q, C], -inf where illegal; a draft without any ends before it."""
        running = [request for request in self._constraints if request not in self._lengths]
        if not running:
            return logits
        masked = logits.clone()
        for request in running:
            constraint = self._constraints[request]
            is_legal = torch.zeros_like(ids[request], dtype=torch.bool)
            if not constraint.has_ended:
                is_legal = constraint.allows(ids[request])
            if bool(is_legal.any()):
                masked[request] = logits[request].masked_fill(~is_legal, -torch.inf)
            else:
                self._lengths[request] = self._slot
        return masked

    def take(self, token_ids: Tensor) -> None:
        """Go on after the drafts int64 [Q] of the slot."""
        self._slot += 1
        running = [request for request in self._constraints if request not in self._lengths]
        chosen = token_ids.tolist() if running else []
        for request in running:
            self._constraints[request].try_token(chosen[request])

    def finish(self, num_drafts: int) -> tuple[int, ...] | None:
        """Take the drafts back; how many of each request count, None where all do."""
        for constraint in self._constraints.values():
            constraint.take_back()
        if not self._lengths:
            return None
        return tuple(self._lengths.get(request, num_drafts) for request in range(self._num_requests))


def make_constraint(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Iterable[int]
) -> Constraint | None:
    """None where a request has no grammar; RequestError where it means nothing or could not end."""
    if params.grammar is None:
        return None
    if tokenizer is None:
        raise RequestError("a grammar needs a tokenizer, and this engine has none. Leave it out.")
    ends = sorted(token_id for token_id in end_token_ids if token_id < vocab_size)
    if not ends:
        raise RequestError("a grammar needs a token to end with: leave out ignore_eos, or give stop_token_ids.")
    if _nesting(params.grammar.text) > MAX_NESTING:
        raise RequestError(f"the grammar is nested more than {MAX_NESTING} brackets deep. Make it flatter.")
    is_spelled = params.grammar.kind == "structural_tag"
    compiler = _compiler(tokenizer, vocab_size, frozenset(params.shown_token_ids if is_spelled else ()))
    try:
        compiled = _compile(compiler, params.grammar)
    except (RuntimeError, ValueError) as error:
        reason = _ORIGIN.sub("", str(error).strip())
        raise RequestError(f"the grammar ({params.grammar.kind}) cannot be followed: {reason}") from error
    return Constraint(_xgrammar().GrammarMatcher(compiled, override_stop_tokens=ends), vocab_size)


def _nesting(text: str) -> int:
    """How many brackets are open at once, quoted ones counted too."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[({]|[\])}]", text):
        depth = depth + 1 if bracket in "[({" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _xgrammar() -> Any:
    """Imported when first needed: it takes seconds."""
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigError("grammars need xgrammar. Install it: pip install 'outrider[server]'.") from error
    return xgrammar


@lru_cache(maxsize=8)
def _compiler(tokenizer: Tokenizer, vocab_size: int, spelled_ids: frozenset[int]) -> Any:
    """Compiles for one vocabulary, each grammar once. Control tokens match nothing but for those that are spelled."""
    hidden_ids = tokenizer.special_ids - spelled_ids
    spellings = tokenizer.spellings()[:vocab_size]
    vocabulary = ["" if token_id in hidden_ids else spelling for token_id, spelling in enumerate(spellings)]
    xgrammar = _xgrammar()
    kind = xgrammar.VocabType.BYTE_FALLBACK
    info = xgrammar.TokenizerInfo(vocabulary, kind, vocab_size=vocab_size, stop_token_ids=list(tokenizer.eos_ids))
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=256 * 2**20)


def _compile(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind in ("json_schema", "json_object"):
        schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
        return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
    compile_text = {
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }
    return compile_text[grammar.kind](grammar.text)
