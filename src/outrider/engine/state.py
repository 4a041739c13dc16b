"""What the host keeps of each request: its tokens, limits and seat, and where its text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outrider.core import AcceptanceStats, Chunk, SamplingParams, TokenLogprobs
from outrider.engine.adjustments import Adjustments, asks_for_more
from outrider.engine.grammar import Constraint
from outrider.models.attention import GivenRows
from outrider.tokenizer import IncrementalDecoder

NOT_FINITE = "the target's logits were not finite"


class Taken(NamedTuple):
    """What a request took from a pass: its tokens are text from now on, but nobody has been told."""

    request: RequestState
    token_ids: Sequence[int]
    num_accepted_tokens: int  # drafts that the pass kept, before the text was cut
    num_draft_tokens: int
    finish_reason: str | None
    shown: str  # text of a request with stop strings: it says where the tokens end
    logprobs: Sequence[TokenLogprobs]


@dataclass
class RequestState:
    """One request from prompt to last token.

    The last token is the anchor: it is text already, but the target has not run on it, so its keys and values do not
    exist yet. Every earlier token is in the cache.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    noise_seed: int
    draft_length: int  # drafts a cycle, before limits
    num_tokens_left: int  # may still be emitted, by max_tokens and context limit
    stop_token_ids: frozenset[int]
    decoder: IncrementalDecoder | None
    adjustments: Adjustments | None = None
    constraint: Constraint | None = None
    given: GivenRows | None = None  # embeddings that prompt rows bring, on the target's device
    planned_counts: Sequence[int] = ()  # under synthetic acceptance: drafts to keep after each of its tokens
    boundaries: tuple[int, ...] = ()  # prompt tokens after which other requests are likely to go on differently
    seat: int = -1  # -1 while it waits
    num_computed_tokens: int = 0  # while it is prefilled: how many tokens have their keys and values
    num_cached_tokens: int = 0  # of its prompt, found in the caches when it was first prefilled
    num_preemptions: int = 0  # times it lost its seat
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    pending_text: str = ""  # decoded, but it might begin a stop string
    finish_reason: str | None = None
    error: str | None = None  # why it failed
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def anchor_token_id(self) -> int:
        """The newest token."""
        return self.output_token_ids[-1]

    @property
    def anchor_position(self) -> int:
        """Absolute position of the newest token."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    @cached_property
    def needs_host(self) -> bool:
        """False where temperature and filters are all that it asks for, so that a cycle of it reads nothing back."""
        return self.constraint is not None or asks_for_more(self.params, self.adjustments)

    @property
    def is_synthetic(self) -> bool:
        """True where drafts are kept by plan, so that its text is not the target's."""
        return bool(self.planned_counts)

    @property
    def planned_count(self) -> int:
        """Drafts that the next cycle keeps whatever the target says; -1 leaves it to the target."""
        return self.planned_counts[len(self.output_token_ids) - 1] if self.planned_counts else -1

    @property
    def prefill_token_ids(self) -> tuple[int, ...]:
        """What has to be in the caches before it can run: the prompt, and of an answer begun all but the anchor."""
        return self.prompt_token_ids + tuple(self.output_token_ids[:-1])

    @property
    def num_prefill_tokens(self) -> int:
        """How many those are."""
        return len(self.prompt_token_ids) + max(0, len(self.output_token_ids) - 1)

    @property
    def max_draft_length(self) -> int:
        """Most drafts worth verifying now: a cycle adds a token of its own, and nothing past the limit is drafted."""
        return min(self.draft_length, self.num_tokens_left - 1)

    def append(
        self,
        token_ids: list[int],
        *,
        num_accepted_tokens: int,
        num_draft_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Chunk:
        """Take tokens and spell them at once."""
        return self.spell(
            self.take(
                token_ids,
                num_accepted_tokens=num_accepted_tokens,
                num_draft_tokens=num_draft_tokens,
                logprobs=logprobs,
            )
        )

    def take(
        self,
        token_ids: list[int],
        *,
        num_accepted_tokens: int,
        num_draft_tokens: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Taken:
        """Take tokens in order until one ends the request; the earliest event wins, and a stop beats the limit.

        A stop token counts as emitted and is in token_ids; neither its text nor a stop string is in the text.
        `logprobs` has one entry for each token, or none at all. A token that the grammar refuses is not taken: the
        grammar had no way to go on, and the request ends with "error". All that is not needed to go on decoding is left
        to `spell`, which gets what was taken in the same order.
        """
        if self.constraint is None and not self.params.stop_strings:
            taken, shown = self._take_together(token_ids), ""
        else:
            taken, shown = self._take_one_by_one(token_ids)
        kept = logprobs[: len(taken)]
        self.logprobs += kept
        return Taken(self, taken, num_accepted_tokens, num_draft_tokens, self.finish_reason, shown, kept)

    def _take_together(self, token_ids: Sequence[int]) -> Sequence[int]:
        """As `_take_one_by_one` where tokens alone end a request: a device may be waiting for it."""
        taken = token_ids[: self.num_tokens_left]
        if not self.stop_token_ids.isdisjoint(taken):
            is_stop = [token_id in self.stop_token_ids for token_id in taken]
            taken, self.finish_reason = taken[: is_stop.index(True) + 1], "stop"
        self.output_token_ids += taken
        self.num_tokens_left -= len(taken)
        if self.finish_reason is None and self.num_tokens_left == 0:
            self.finish_reason = "length"
        return taken

    def _take_one_by_one(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The tokens that were taken, and their text where there are stop strings."""
        taken: list[int] = []
        shown = ""
        for token_id in token_ids:
            if self.constraint is not None and not self.constraint.advance(token_id):
                self.finish_reason = "error"
                break
            taken.append(token_id)
            self.output_token_ids.append(token_id)
            self.num_tokens_left -= 1
            if token_id in self.stop_token_ids:
                self.finish_reason = "stop"
            elif self.params.stop_strings and self.decoder is not None:
                shown += self._release(self.decoder.push([token_id]))
            if self.finish_reason is None and self.num_tokens_left == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.finish_reason is not None and self.params.stop_strings:
            shown += self._flush_text()
        return taken, shown

    def spell(self, taken: Taken) -> Chunk:
        """What was taken, counted and with its text, which is part of the request's from now on."""
        text, token_ids, num_accepted = taken.shown, tuple(taken.token_ids), taken.num_accepted_tokens
        if taken.num_draft_tokens > 0:
            self.acceptance.record_cycle(draft_length=taken.num_draft_tokens, num_accepted_tokens=num_accepted)
        if self.decoder is not None and self.error is None and not self.params.stop_strings:
            has_stop_token = taken.finish_reason == "stop"
            text = self.decoder.push(token_ids[:-1] if has_stop_token else token_ids)
            text += self.decoder.flush() if taken.finish_reason is not None else ""
        self.text += text
        return Chunk(
            request_index=self.index,
            text=text,
            token_ids=token_ids,
            num_accepted_draft_tokens=min(num_accepted, len(token_ids)),
            finish_reason=taken.finish_reason,
            num_draft_tokens=taken.num_draft_tokens,
            logprobs=tuple(taken.logprobs),
        )

    def fail(self, error: str = NOT_FINITE) -> Taken:
        """End the request because of a fault it may not have caused; nothing of the cycle is text."""
        self.finish_reason, self.error = "error", error
        return Taken(self, (), 0, 0, "error", "", ())

    def _release(self, piece: str) -> str:
        self.pending_text += piece
        stops = self.params.stop_strings if len(self.output_token_ids) > self.params.min_tokens else ()
        ends = [at for stop in stops if (at := self.pending_text.find(stop)) >= 0]
        if ends:
            self.finish_reason = "stop"
            shown, self.pending_text, self.decoder = self.pending_text[: min(ends)], "", None
            return shown
        held = max((held_back(self.pending_text, stop) for stop in stops), default=0)
        cut = len(self.pending_text) - held
        shown, self.pending_text = self.pending_text[:cut], self.pending_text[cut:]
        return shown

    def _flush_text(self) -> str:
        """What was held back when the request ended; the bytes of an unfinished character may complete a stop."""
        shown = self._release(self.decoder.flush()) if self.decoder is not None else ""
        rest, self.pending_text = self.pending_text, ""
        return shown + rest


def held_back(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
