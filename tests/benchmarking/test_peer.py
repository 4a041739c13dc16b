"""The peer's process, with a package in place of vLLM. Seen red: our own path left before the peer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.benchmarking.decode import plan_cells
from outrider.benchmarking.peer import check_peer, run_peer
from outrider.errors import ConfigError, EngineFault
from tests.benchmarking.fake_peer import write_site

WORK = {"max_tokens": 21, "context_length": 64, "runs": 2}


def test_each_draft_length_is_one_start_for_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    cells, site = plan_cells("0,7", "1,4", "2", "8,30"), write_site(tmp_path / "site")
    found = run_peer("tiny", cells, site=site, folder=tmp_path / "out", work=WORK, timeout_s=60)
    assert set(found) == {cell.key for cell in cells}
    assert found[7, 4, 8]["rows"][0]["acceptance_length"] == 2.0
    assert found[7, 4, 8]["rows"][0]["num_cycles"] == 10
    assert found[0, 1, 30]["rows"][0]["num_cycles"] == 20
    assert len(found[0, 1, 8]["rows"]) == 2
    assert found[0, 1, 30]["prefill_s"] > 0
    plain, drafted = (json.loads(line) for line in log.read_text().splitlines())
    assert "speculative_config" not in plain
    assert (drafted["max_num_seqs"], drafted["max_model_len"], drafted["routing"]) == (4, 64, None)
    speculative = drafted["speculative_config"]
    assert (speculative["num_speculative_tokens"], speculative["synthetic_acceptance_length"]) == (7, 2.0)
    assert json.loads(Path(speculative["model"], "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_experts_are_chosen_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, site = tmp_path / "log", write_site(tmp_path / "site")
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    run_peer("26b-a4b", plan_cells("0", "1", None), site=site, folder=tmp_path, work=WORK, timeout_s=60)
    assert json.loads(log.read_text())["routing"] == "uniform_random"


def test_a_peer_that_breaks_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "broken")
    site = write_site(tmp_path / "site")
    with pytest.raises(
        EngineFault, match=r"exit code 3\. RuntimeError: no memory, says its engine .*start failed, says vllm"
    ):
        run_peer("tiny", plan_cells("0", "1", None), site=site, folder=tmp_path, work=WORK, timeout_s=60)


def test_a_peer_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hanging")
    monkeypatch.setenv("FAKE_VLLM_LOG", str(tmp_path / "log"))
    site = write_site(tmp_path / "site")
    with pytest.raises(EngineFault, match=r"longer than 2 s.*--peer-timeout-s\. .*the engine starts"):
        run_peer("tiny", plan_cells("0", "1", None), site=site, folder=tmp_path, work=WORK, timeout_s=2)
    engine = int((tmp_path / "log").read_text())
    status = Path(f"/proc/{engine}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_peer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    plain = plan_cells("0", "1", None)
    with pytest.raises(ConfigError, match="'sglang' is not known; choose one of vllm"):
        check_peer("sglang", None, plain)
    with pytest.raises(ConfigError, match="has no folder vllm"):
        check_peer("vllm", tmp_path, plain)
    with pytest.raises(ConfigError, match="--peer-site"):
        check_peer("vllm", None, plain)
    site = write_site(tmp_path / "site")
    check_peer("vllm", site, plain)
    check_peer("vllm", site, plan_cells("0,7", "1", "5"))
    with pytest.raises(ConfigError, match="Give --acceptance-length"):
        check_peer("vllm", site, plan_cells("0,7", "1", None))
