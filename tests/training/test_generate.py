"""Text that the target writes: prompts stay, greedy is the argmax, samples follow the filters, ends are found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider.tokenizer import Tokenizer
from outrider.training.capture import GridRunner
from outrider.training.generate import (
    TextBatch,
    TextKind,
    choose,
    count_valid,
    encode_openings,
    filtered_probs,
    generate_batch,
    generate_text,
)
from outrider.training.openings import Opening
from tests.training import tiny

OPTIONS = tiny.GENERATE
LENGTHS = torch.tensor([1, 3, 6, 2, 6, 4, 1, 5])


@pytest.fixture(scope="module")
def runner() -> GridRunner:
    return GridRunner(tiny.target(), num_sequences=8, num_positions=OPTIONS.sequence_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.tokenizer(), bos_id=tiny.BOS_ID, eos_ids=[tiny.EOS_ID])


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    ids = torch.randint(5, tiny.VOCAB, (8, OPTIONS.max_opening_tokens), generator=torch.Generator().manual_seed(9))
    return ids.masked_fill(torch.arange(OPTIONS.max_opening_tokens) >= LENGTHS[:, None], tiny.PAD_ID)


Write = Callable[[TextKind], TextBatch]


@pytest.fixture
def write(runner: GridRunner, prompts: torch.Tensor) -> Write:
    def written(kind: TextKind) -> TextBatch:
        torch.manual_seed(1)
        return generate_batch(runner, prompts, LENGTHS, kind=kind, config=OPTIONS, end_token_ids=(tiny.EOS_ID,))

    return written


def probs_of(runner: GridRunner, text: TextBatch) -> torch.Tensor:
    """The target's probabilities for the token AT positions 1 .., [S, P - 1, V], recomputed."""
    token_ids = text.token_ids.long()
    steps = [runner.step(token_ids[:, p], p)[0] for p in range(token_ids.shape[1] - 1)]
    return torch.stack(steps, dim=1).softmax(dim=-1)


@pytest.mark.parametrize("kind", list(TextKind))
def test_prompts_are_untouched(write: Write, prompts: torch.Tensor, kind: TextKind) -> None:
    text = write(kind)
    for row, prompt, length in zip(text.token_ids, prompts, LENGTHS.tolist(), strict=True):
        assert torch.equal(row[:length].long(), prompt[:length])
    assert bool((text.first_label >= LENGTHS).all())
    assert bool((text.first_label <= LENGTHS + OPTIONS.max_sampled_prefix_tokens).all())


def test_greedy_text_is_the_argmax_from_the_first_label_on(runner: GridRunner, write: Write) -> None:
    text = write(TextKind.GREEDY)
    best = probs_of(runner, text).argmax(dim=-1)
    positions = torch.arange(1, OPTIONS.sequence_tokens)
    supervised = positions >= text.first_label[:, None]
    assert torch.equal(text.token_ids[:, 1:].long()[supervised], best[supervised])
    drawn = (positions >= LENGTHS[:, None]) & ~supervised
    assert bool((text.token_ids[:, 1:].long() != best)[drawn].any())  # variety before it
    assert text.candidate_ids is None
    assert text.candidate_probs is None


def test_the_longest_prefix_is_drawn_to_its_end(runner: GridRunner, prompts: torch.Tensor) -> None:
    """Also where it follows an opening of full length."""
    options = replace(OPTIONS, max_sampled_prefix_tokens=12)
    full = torch.full_like(LENGTHS, OPTIONS.max_opening_tokens)
    torch.manual_seed(2)
    text = generate_batch(runner, prompts, full, kind=TextKind.GREEDY, config=options, end_token_ids=(tiny.EOS_ID,))
    positions = torch.arange(1, OPTIONS.sequence_tokens)
    drawn = (positions >= full[:, None]) & (positions < text.first_label[:, None])
    differs = text.token_ids[:, 1:].long() != probs_of(runner, text).argmax(dim=-1)
    assert int(drawn.sum()) > 10
    assert differs[drawn].float().mean() > 0.5


@pytest.mark.parametrize("kind", [TextKind.SAMPLED, TextKind.FILTERED])
def test_soft_targets_are_the_targets_own_unfiltered_probabilities(
    runner: GridRunner, write: Write, kind: TextKind
) -> None:
    text = write(kind)
    assert text.candidate_ids is not None
    assert text.candidate_probs is not None
    probs = probs_of(runner, text)
    kept = probs.gather(-1, text.candidate_ids[:, 1:].long())
    torch.testing.assert_close(text.candidate_probs[:, 1:].float(), kept, atol=1e-3, rtol=1e-2)
    top = probs.topk(OPTIONS.num_soft_candidates, dim=-1).values
    torch.testing.assert_close(kept, top, atol=1e-5, rtol=1e-4)


def test_kept_taps_are_those_of_the_whole_text(runner: GridRunner, prompts: torch.Tensor) -> None:
    ends = (tiny.EOS_ID,)
    text = generate_batch(
        runner, prompts, LENGTHS, kind=TextKind.SAMPLED, config=OPTIONS, end_token_ids=ends, tap_layers=(0, 2)
    )
    assert text.taps is not None
    assert text.taps.dtype == torch.bfloat16  # the hidden states of Gemma's <bos> overflow float16
    whole = runner.taps(text.token_ids, (0, 2))
    torch.testing.assert_close(text.taps[:, :-1].float(), whole[:, :-1], atol=1e-2, rtol=1e-2)
    assert text.taps.shape == whole.shape
    assert not text.taps[:, -1].any()  # no anchor has the last position in its context


def test_filtered_text_stays_inside_its_filters(runner: GridRunner, write: Write) -> None:
    text = write(TextKind.FILTERED)
    chosen = probs_of(runner, text).gather(-1, text.token_ids[:, 1:, None].long())
    likelier = (probs_of(runner, text) > chosen).sum(dim=-1)
    free = torch.arange(1, OPTIONS.sequence_tokens) >= LENGTHS[:, None]
    assert int(likelier[free].max()) < OPTIONS.filtered_top_k


def test_filters_by_hand() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    ids, kept = filtered_probs(probs, top_k=3, top_p=0.7)
    assert ids.tolist() == [[1, 3, 2]]
    # Of the top three 0.44 + 0.33 reach 0.7, so the third is not needed.
    assert kept.tolist() == [pytest.approx([0.4, 0.3, 0.0])]
    assert filtered_probs(probs, top_k=3, top_p=1e-9)[1].tolist() == [pytest.approx([0.4, 0.0, 0.0])]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(TextKind.SAMPLED, [0.1, 0.4, 0.2, 0.3]), (TextKind.FILTERED, [0.0, 4 / 7, 0.0, 3 / 7])],
)
def test_draws_follow_the_probabilities(kind: TextKind, expected: list[float]) -> None:
    torch.manual_seed(0)
    num_draws = 20_000
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(num_draws, -1)
    options = replace(OPTIONS, filtered_top_k=3, filtered_top_p=0.7)
    drawn = choose(probs, kind=kind, config=options)
    assert (torch.bincount(drawn, minlength=4) / num_draws).tolist() == pytest.approx(expected, abs=0.016)


def test_valid_tokens_end_with_the_first_end_after_the_prompt() -> None:
    tokens = torch.tensor([[2, 1, 7, 1, 8, 1], [2, 7, 7, 7, 7, 7], [2, 7, 7, 7, 7, 9], [1, 1, 8, 8, 8, 8]])
    assert count_valid(tokens, torch.tensor([2, 2, 2, 1]), (1, 9)).tolist() == [4, 6, 6, 2]


def test_openings_are_encoded_cut_and_padded(tokenizer: Tokenizer) -> None:
    openings = [Opening("ab", "prose", "one"), Opening("abcdefghij", "prose", "one")]
    ids, lengths = encode_openings(openings, tokenizer, max_tokens=4, device=torch.device("cpu"))
    assert lengths.tolist() == [3, 4]
    assert ids[0].tolist() == [*tokenizer.encode("ab"), 0]
    assert ids[1].tolist() == tokenizer.encode("abc")


def test_all_batches_of_a_recipe(runner: GridRunner, tokenizer: Tokenizer) -> None:
    def source(count: int, rng: random.Random) -> list[Opening]:
        return [Opening(f"{rng.randrange(1000)}", "code" if i % 4 == 0 else "prose", "one") for i in range(count)]

    messages: list[str] = []
    batches, categories = generate_text(
        runner, tokenizer, OPTIONS, source=source, end_token_ids=(tiny.EOS_ID,), progress=messages.append
    )
    kinds = [TextKind.GREEDY, TextKind.GREEDY, TextKind.SAMPLED, TextKind.FILTERED]
    assert [batch.kind for batch in batches] == kinds
    assert categories == {"code": 8, "prose": 24}
    assert messages[-1] == "generated batch 4/4 (filtered)"
    again, _ = generate_text(
        runner, tokenizer, OPTIONS, source=source, end_token_ids=(tiny.EOS_ID,), progress=messages.append
    )
    assert all(torch.equal(one.token_ids, two.token_ids) for one, two in zip(batches, again, strict=True))
