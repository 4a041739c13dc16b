"""What a record says about where it was made."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import environment

X86 = "processor\t: 0\nmodel name\t: Example CPU @ 2.00GHz\nflags\t\t: fpu sse2 fma avx2 f16c\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp\n"


def make_checkout(path: Path) -> Path:
    """A git repository that holds src/outrider, with one commit; returns the package's folder."""
    package_dir = path / "src" / "outrider"
    package_dir.mkdir(parents=True)
    (package_dir / "core.py").write_text("\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=path, check=True)
    return package_dir.resolve()


def test_description_is_json_and_names_no_path() -> None:
    text = json.dumps(environment.describe())
    assert json.loads(text)["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text


def test_description_has_what_a_timing_depends_on() -> None:
    described = environment.describe()
    assert described["num_cores"] >= described["num_usable_cores"] >= 1
    assert described["memory_bytes"] > 2**28
    assert set(described["packages"]) == set(environment.PACKAGES)


def test_versions_come_from_the_installed_packages() -> None:
    assert environment.package_version("pytest") == metadata.version("pytest")
    assert environment.package_version("no-such-package-anywhere") is None


def test_git_state_of_a_clean_and_a_changed_checkout(tmp_path: Path) -> None:
    package_dir = make_checkout(tmp_path)
    clean = environment.git_state(package_dir)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (package_dir / "core.py").write_text("# changed\n")
    assert environment.git_state(package_dir) == {"commit": clean["commit"], "dirty": True}


def test_another_projects_checkout_is_not_ours(tmp_path: Path) -> None:
    make_checkout(tmp_path)
    installed = tmp_path / "venv" / "site-packages" / "outrider"
    installed.mkdir(parents=True)
    assert environment.git_state(installed.resolve()) is None


def test_no_git_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_state() is None


def test_cpu_is_read_from_the_kernel(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(X86)
    assert environment.cpu_model(cpuinfo) == "Example CPU @ 2.00GHz"
    assert environment.cpu_features(cpuinfo) == ["avx2", "fma", "f16c"]
    cpuinfo.write_text(ARM)
    assert environment.cpu_features(cpuinfo) == ["asimd", "asimddp"]


def test_cpu_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    assert environment.cpu_features(tmp_path / "missing") == []
    environment.cpu_model(tmp_path / "missing")


def test_accelerators_are_read_from_torch_only_if_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert environment.accelerators() == []
    assert "torch" not in sys.modules
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(name="Example GPU", total_memory=24 << 30),
    )
    fake = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"), get_num_threads=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert environment.accelerators() == [{"name": "Example GPU", "memory_bytes": 24 << 30, "cuda": "13.0"}]
    assert environment.describe()["torch_num_threads"] == 2
