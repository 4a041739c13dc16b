"""T-044: every row of a batch gives its solo ids and its solo acceptance, one leaving, one joining."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core import SamplingParams
from outrider.engine import cycle as cycle_module
from outrider.engine.batch import CycleBatch, PackedRows, pack_rows
from outrider.engine.engine import Engine
from outrider.engine.rejection import DraftBlock, point_mass_block
from outrider.engine.state import RequestState
from tests.scripted import ScriptedProposer, make_test_engine
from tests.toy import reference_greedy, toy_target

TARGET = toy_target()
PROMPTS = [[(7 * i + 3 * n) % 95 for i in range(n)] for n in (3, 8, 9, 17, 1)]
LENGTHS = [4, 8, 8, 8, 8]  # the first ends early
TEXTS = [prompt + reference_greedy(TARGET, prompt, length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]

Outcome = tuple[list[int], dict[int, int], int]


class RequestScripts(ScriptedProposer):
    """Scripts and texts by request, which its seed names; each counts its own rounds."""

    def __init__(self, scripts: list[list[int]]) -> None:
        super().__init__(TEXTS)
        self.scripts, self.rounds = scripts, [0] * len(scripts)

    def propose(self, batch: CycleBatch, draft_length: int) -> DraftBlock:
        drafts = []
        for request, at in zip(batch.noise_seeds, batch.host_positions, strict=True):
            script = self.scripts[request]
            drafts.append(self._drafts(request, at, draft_length, script[self.rounds[request] % len(script)]))
            self.rounds[request] += 1
        return point_mass_block(torch.tensor(drafts), torch.float64)


def new_engine(scripts: list[list[int]]) -> Engine:
    return make_test_engine(TARGET, RequestScripts(scripts), max_seats=4)


def add(engine: Engine, request: int) -> RequestState:
    return engine.add(PROMPTS[request], SamplingParams(max_tokens=LENGTHS[request], seed=request))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def outcome(request: RequestState) -> Outcome:
    return request.output_token_ids, request.acceptance.accepted_histogram, request.acceptance.num_draft_tokens


@pytest.fixture
def checked_rows(monkeypatch: pytest.MonkeyPatch) -> list[PackedRows]:
    """Every packed pass: a row's position is its place in the text, a spare row has no seat."""
    passes: list[PackedRows] = []

    def packed(batch: CycleBatch, draft_token_ids: torch.Tensor, *, num_rows: int) -> PackedRows:
        result = pack_rows(batch, draft_token_ids, num_rows=num_rows)
        for row, (owner, slot) in enumerate(zip(result.owners.tolist(), result.slots.tolist(), strict=True)):
            num_prompt_tokens = len(PROMPTS[batch.noise_seeds[owner]])
            assert int(result.rows.positions[row]) == num_prompt_tokens + len(batch.outputs[owner]) - 1 + slot
        passes.append(result)
        return result

    monkeypatch.setattr(cycle_module, "pack_rows", packed)
    return passes


@pytest.mark.parametrize("first_seed", range(0, 50, 10))
def test_t044_ids_and_acceptance_are_the_solo_ones(first_seed: int, checked_rows: list[PackedRows]) -> None:
    for seed in range(first_seed, first_seed + 10):
        rng = random.Random(seed)
        scripts = [[rng.randrange(5) for _ in range(4)] for _ in PROMPTS]
        engine = new_engine(scripts)
        requests = [add(engine, request) for request in range(4)]
        for _ in range(3):
            engine.step()
        requests.append(add(engine, 4))  # joins in the third round
        finish(engine)
        for index, request in enumerate(requests):
            assert request.output_token_ids == TEXTS[index][len(PROMPTS[index]) :]
        solo = new_engine(scripts)
        chosen = seed % 5
        alone = add(solo, chosen)
        finish(solo)
        assert outcome(requests[chosen]) == outcome(alone)
    assert checked_rows
