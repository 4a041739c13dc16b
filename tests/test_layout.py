"""The house keeps its shape: every module with logic has its test, no test is an orphan, no module is too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "outrider"
TESTS = ROOT / "tests"
TOOLS = ROOT / "tools"
MAX_LINES = 600
ACROSS_THE_HOUSE = {"test_imports.py", "test_layout.py"}  # twins of no single module
BY_CASE = TESTS / "cases"  # public cases, named by id

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def has_logic(source: str) -> bool:
    """True where a module defines a function or method that does something; interfaces and bare types do not."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return any(not isinstance(statement, ast.Expr) for function in functions for statement in function.body)


def twin_names(module: Path) -> Iterator[str]:
    """Globs of the tests of a module, relative to tests/: test_<stem>.py, or test_<stem>_<aspect>.py beside it."""
    yield str(module.parent / f"test_{module.stem}.py")
    yield str(module.parent / f"test_{module.stem}_*.py")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_with_logic_has_its_test(module: Path) -> None:
    source = (PACKAGE / module).read_text(encoding="utf-8")
    if module.name == "__init__.py" or not has_logic(source):
        return
    twin, _ = twin_names(module)
    assert (TESTS / twin).is_file(), f"write tests/{twin}"


def test_no_test_is_an_orphan() -> None:
    known = {path for module in MODULES for name in twin_names(module) for path in TESTS.glob(name)}
    known |= {TESTS / "tools" / f"test_{path.stem}.py" for path in TOOLS.glob("*.py")}
    written = {path for path in TESTS.rglob("test_*.py") if not path.is_relative_to(BY_CASE)}
    orphans = {str(path.relative_to(ROOT)) for path in written - known if path.name not in ACROSS_THE_HOUSE}
    assert not orphans, "no module of this name; rename the test after the module it tests, or move it to tests/cases/"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_is_too_long(module: Path) -> None:
    num_lines = len((PACKAGE / module).read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, "it has a second job: give that one a module of its own"
