"""T-002: where two greedy texts part, a tie that rounding decided is told from a fault.

Seen red: the gap not looked at, the third likeliest called a tie, the shorter length alone compared.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.benchmarking.flips import Difference, FlipCount, Scored, count_flips, differences, first_difference
from outrider.kernels.reference import TorchKernels
from outrider.models.attention import Rows, allocate_caches
from outrider.models.gemma import GemmaTarget
from tests.cases.common import text_rows
from tests.toy import toy_target

NUM_TOKENS = 64


def trace(logits: list[float]) -> list[Scored]:
    """A reference of three tokens over a vocabulary of five, the second of which was chosen from these logits."""
    certain = Scored(4, ((4, 9.0), (3, 0.0)))
    ranked = tuple(sorted(enumerate(logits), key=lambda each: -each[1]))
    return [certain, Scored(ranked[0][0], ranked), certain]


@pytest.mark.parametrize(
    ("logits", "run_token", "verdict", "gap"),
    [
        ([4.0, 3.999, 1.0, 0.0, -1.0], 1, "tie", 0.001),
        ([4.0, 2.5, 1.0, 0.0, -1.0], 1, "fault", 1.5),
        ([4.0, 3.999, 1.0, 0.0, -1.0], 2, "fault", 0.001),
    ],
)
def test_t002_hand_made_traces(logits: list[float], run_token: int, verdict: str, gap: float) -> None:
    found = first_difference(trace(logits), [4, run_token, 4], tolerance=0.01)
    assert found is not None
    assert (found.position, found.reference, found.other, found.verdict) == (1, 0, run_token, verdict)
    assert found.top == ((0, 4.0), (1, logits[1]))
    assert found.gap == pytest.approx(gap)


def test_t002_a_run_that_ends_early_is_reported() -> None:
    reference = trace([4.0, 3.999, 1.0, 0.0, -1.0])
    early = first_difference(reference, [4, 0], tolerance=0.01)
    late = first_difference(reference, [4, 0, 4, 2], tolerance=0.01)
    assert early is not None
    assert late is not None
    assert (early.position, early.reference, early.other, early.verdict) == (2, 4, None, "fault")
    assert (late.position, late.reference, late.other, late.verdict) == (3, None, 2, "fault")
    assert "the other ends after 2 tokens" in str(early)
    assert first_difference(reference, [4, 0, 4], tolerance=0.01) is None


class SplitKernels(TorchKernels):
    """Several rows are summed in two parts, as a library's product may do where one row is summed in one."""

    def linear(self, inputs: Tensor, weight: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """inputs [R, in] @ weight [out, in]^T (+ residual [R, out]) -> [R, out], bfloat16."""
        if len(inputs) == 1:
            return super().linear(inputs, weight, residual=residual)
        middle = inputs.shape[1] // 2
        first = super().linear(inputs[:, :middle], weight[:, :middle], residual=residual)
        return super().linear(inputs[:, middle:], weight[:, middle:], residual=first)


def logits_of(target: GemmaTarget, token_ids: list[int], *, piece: int) -> Tensor:
    """Logits float32 [T, V] of a text read so many tokens a pass; only the layers differ by it."""
    caches = allocate_caches(
        target.config.layers,
        num_seats=1,
        context_length=NUM_TOKENS,
        max_rows=NUM_TOKENS,
        dtype=torch.bfloat16,
        device=target.device,
    )
    pieces = [text_rows(token_ids[at : at + piece], at) for at in range(0, len(token_ids), piece)]
    hidden = [target.forward(on_device(rows, target.device), caches).hidden for rows in pieces]
    normed = target.kernels.rms_norm(torch.cat(hidden), target.final_norm, eps=target.config.rms_norm_eps)
    head = TorchKernels(torch.float32, target.device)  # as on a GPU: bfloat16 logits would tie exactly and by the dozen
    return head.logits(normed.float(), target.embedding.float(), cap=target.config.final_logit_softcapping)


def on_device(rows: Rows, device: torch.device) -> Rows:
    return Rows(rows.token_ids.to(device), rows.seats.to(device), rows.positions.to(device))


def flips(one_pass: Tensor, stepwise: Tensor, tolerance: float) -> tuple[list[Difference], FlipCount]:
    """Of the two ways' own choices, token by token, the stepwise ones being the reference."""
    values, ids = stepwise.topk(2)
    reference = [
        Scored(top_ids[0], tuple(zip(top_ids, top_values, strict=True)))
        for top_ids, top_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    found = list(differences(reference, one_pass.topk(2).indices[:, 0].tolist(), tolerance=tolerance))
    return found, count_flips([(len(reference) - len(found), None), *((1, each) for each in found)])


def test_t002_rounding_in_bfloat16_gives_ties_only() -> None:
    target = toy_target(kernels=SplitKernels(torch.bfloat16), dtype=torch.bfloat16, context_length=NUM_TOKENS)
    draw = torch.Generator().manual_seed(4)
    texts = torch.randint(3, target.config.vocab_size, (2, NUM_TOKENS), generator=draw).tolist()
    whole, steps = zip(*((logits_of(target, text, piece=n) for n in (NUM_TOKENS, 1)) for text in texts), strict=True)
    tolerance = float((whole[0] - steps[0]).abs().max())
    assert tolerance > 0
    found, count = flips(whole[1], steps[1], tolerance)
    print(f"tolerance {tolerance:.4f}: {count.num_ties} ties of {count.num_positions}, rate {count.rate:.4f}")  # noqa: T201
    assert (count.num_faults, count.num_positions) == (0, NUM_TOKENS)
    assert count.num_ties == len(found) > 0
    assert count.rate == pytest.approx(len(found) / NUM_TOKENS)
    assert flips(whole[1], steps[1], 0.0)[1].num_faults > 0
