from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.kernels import compiler


def test_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compiler.find_compilers()
    if not commands:
        pytest.skip("no compiler on this machine")
    first = compiler.compiled_library(commands[0], cache_dir=tmp_path)
    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: pytest.fail("compiled a second time"))
    assert compiler.compiled_library(commands[0], cache_dir=tmp_path) == first
    assert first.is_file()


def test_another_processor_gets_another_library(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("processor : 0\nflags : sse avx2\n")
    other.write_text("processor : 0\nflags : sse avx512f\n")
    assert compiler.processor_flags(one) != compiler.processor_flags(other)
    assert compiler.processor_flags(tmp_path / "missing") == compiler.processor_flags(tmp_path / "missing")


def test_no_compiler_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-compiler"):
        compiler.load_library(tmp_path, [("/no-such-compiler",)])


def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    compilers = compiler.find_compilers()
    if not compilers:
        pytest.skip("no compiler on this machine")
    library = compiler.compiled_library(compilers[0], cache_dir=tmp_path)
    whole = library.read_bytes()
    library.write_bytes(whole[:1000])
    again = compiler.compiled_library(compilers[0], cache_dir=tmp_path)
    assert len(again.read_bytes()) == len(whole)
    assert list(again.parent.iterdir()) == [again]


def test_a_cache_that_cannot_be_used_is_not_taken_for_a_missing_compiler(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Cannot use the cache .*file/kernels.*Set OUTRIDER_CACHE") as caught:
        compiler.load_library(tmp_path / "file", [("cc",)])
    assert not isinstance(caught.value, compiler.NotCompiledError)
