from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.benchmarking.record import RecordFile
from outrider.benchmarking.report.cautions import findings, warnings
from outrider.benchmarking.report.records import Record
from tests.benchmarking.report import made


def of(fields: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Findings and warnings."""
    record = Record(Path("made.json"), fields)
    return list(findings(record)), list(warnings(record))


def test_a_settled_comparison_is_a_finding() -> None:
    assert of(made.compare()) == (["drafter over plain: faster by 61 %."], [])


def test_what_may_not_be_claimed_is_a_warning() -> None:
    unsettled = made.compare()
    unsettled["summary"] |= {"verdict": "unresolved", "verdict_text": "24 prompts are too few; 90 would do"}
    assert of(unsettled) == ([], ["drafter over plain: 24 prompts are too few; 90 would do."])
    assert "the interval holds 1" in of(made.compare(ratio=1.01, verdict=None))[1][0]
    tie = made.compare(verdict=None)
    tie["summary"] |= {"speedup": 1.015, "speedup_interval": [1.005, 1.025]}
    assert "within the noise floor of 2.1 %" in of(tie)[1][0]
    assert of(made.compare(verdict=None)) == ([], [])


def test_a_drafter_that_loses_is_named_with_its_workload() -> None:
    assert sum("The drafter loses here" in words for words in of(made.sweep(best=0))[1]) == 4
    assert of(made.sweep())[1] == []
    said = of(made.own_sweep())[1]
    assert said == [
        "The drafter loses here: drafting nothing is fastest (prose).",
        "code, n 3: faults: request errors.",
    ]


def test_findings_of_a_run_say_whether_its_figures_count() -> None:
    assert of(made.own_run())[1] == [
        "The figures must not be used: other tenant: 41 tokens were not ours",
        "Mind: no counters: the server has none",
    ]


def test_a_session_says_which_limits_it_broke() -> None:
    summary = {"verdict": "fail", "faults": ["memory_growth", "phases"], "warnings": ["nothing was drafted"]}
    assert of(made.record("soak", summary))[1] == ["Faults: memory growth, phases.", "Nothing was drafted."]


def test_a_check_that_failed_is_a_warning() -> None:
    rungs = [{"name": "basic", "status": "pass"}, {"name": "tools", "status": "fail", "reason": "no call came"}]
    fields = made.record("verify", {"verdict": "fail"}, rows=rungs)
    assert of(fields)[1] == ["Failed: tools: no call came"]


def test_an_incomplete_record_says_so() -> None:
    fields = {**made.compare(), "complete": False, "missing": [{"arm": "plain", "fault": None}]}
    assert of(fields)[1] == ["The run was stopped or parts of it failed: 1 are missing."]


def test_a_comparison_that_was_stopped_says_why_and_claims_nothing(tmp_path: Path) -> None:
    RecordFile(tmp_path / "a.json").write(made.compare(), missing=[{"arm": "plain", "num_rows": 9}], stopped="Ctrl-C")
    num_rows = len(made.compare()["rows"])
    assert of(json.loads((tmp_path / "a.json").read_text())) == (
        [],
        [
            f"The run was stopped (Ctrl-C): {num_rows} rows were kept, 9 are missing.",
            "drafter over plain: the run was stopped (Ctrl-C), so nothing is claimed.",
        ],
    )


def test_warnings_of_the_record_itself() -> None:
    git = {"git": {"dirty": True}}
    fields = made.record("demo", {"identical": False}, environment=git, published=True, notes=["Mind this."])
    words = " ".join(of(fields)[1])
    for said in ("Published figures", "not committed", "did not write the same text", "Mind this."):
        assert said in words
    assert of(made.decode())[1][0].startswith("Acceptance was imposed")
