from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from outrider.cli import main as main_module
from outrider.cli.main import main

RECIPE = "recipes/gemma3-270m-dflash-cpu.toml"


def test_help_names_every_command() -> None:
    command = [sys.executable, "-m", "outrider.cli.main", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert shown.returncode == 0
    for name in ("demo", "generate", "doctor", "serve", "train"):
        assert name in shown.stdout


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("outrider ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "Hi", "--temperature", "-1"), "temperature=-1.0"),
        (("generate", "Hi", "--top-p", "0"), "top_p=0.0"),
        (("generate", "Hi", "--top-k", "-3"), "top_k=-3"),
        (("generate", "Hi", "--min-p", "2"), "min_p=2.0"),
        (("generate", "Hi", "--max-tokens", "0"), "max_tokens=0"),
        (("generate", "Hi", "--stop", ""), "stop_strings"),
        (("generate", "Hi", "--target", "/no/such/file.gguf"), "/no/such/file.gguf"),
        (("generate", "Hi", "--kernels", "gpu"), "gpu"),
        (("generate", "Hi", "--context-length", "99999999"), "context_length=99999999"),
        (("generate", "Hi", "--device", "cpu:x"), "device='cpu:x'"),
        (("demo", "--prompts", "0"), "prompts=0"),
        (("demo", "--max-tokens", "1"), "max_tokens=1"),
        (("demo", "--record", "README.md"), "README.md exists"),
        (("demo", "--record", "/proc/no/demo.json"), "/proc/no/demo.json"),
        (("demo", "--record", "/"), "--record /"),
        (("train", "generate", RECIPE, "--data", "/proc/no/text.pt", "--device", "cpu"), "--data /proc/no/text.pt"),
        (("train", "generate", RECIPE, "--data", "text.pt", "--device", "foo"), "device='foo'"),
        (("train", "run", RECIPE, "--data", "/no/text.pt", "--out", "runs", "--device", "cpu"), "/no/text.pt does not"),
        (("train", "run", RECIPE, "--data", RECIPE, "--out", "runs", "--device", "cpu"), f"{RECIPE} holds no text"),
        (("train", "run", RECIPE, "--data", RECIPE, "--out", "/proc/no", "--device", "cpu"), "--out /proc/no"),
        (
            ("train", "run", RECIPE, "--data", RECIPE, "--out", "runs", "--checkpoint", "/proc/no/run.pt"),
            "--checkpoint /proc/no/run.pt",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("README.md", "recipes"):
        (tmp_path / name).symlink_to(Path(__file__).parents[2] / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == 2, shown.err
    assert named in shown.err
    assert shown.out == ""
    assert len([line for line in shown.err.splitlines() if line.startswith("outrider: ")]) == 1


@pytest.mark.parametrize(
    ("variable", "value"), [("OUTRIDER_CACHE", "/proc/no"), ("OUTRIDER_THREADS", "0"), ("OUTRIDER_THREADS", "\u00b2")]
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["outrider", "generate", "Hi", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("outrider: ")
    assert variable in lines[0]


def test_our_own_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        warnings.simplefilter("always")
        warnings.warn_explicit("slow today", UserWarning, str(main_module.__file__), 1)
        warnings.warn_explicit("old call", UserWarning, "/lib/other.py", 7)

    monkeypatch.setattr(main_module, "app", warn)
    main()
    assert capsys.readouterr().err.splitlines() == ["outrider: slow today", "/lib/other.py:7: UserWarning: old call"]
