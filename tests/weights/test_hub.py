"""Names on a model hub, against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from outrider.errors import LocateError
from outrider.weights.hub import fetch_from_hub, is_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "gemma3_text"}',
    "model.safetensors": b"weights",
    "modeling_x.py": b"raise SystemExit",
    "original/other.json": b"{}",
    "backbone-only/config.json": b'{"architectures": []}',
    "backbone-only/model.safetensors": b"other weights",
    "backbone-only/old/config.json": b"{}",
}
NAME = "owner/some-model"


class Hub(BaseHTTPRequestHandler):
    """One repository with FILES; any other name is unknown."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [{"type": "file", "path": n, "size": len(d), "oid": self._etag(d)} for n, d in FILES.items()]
            return self._send(json.dumps(entries).encode())
        if path.startswith(f"/api/models/{NAME}"):
            facts = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self._send(json.dumps(facts).encode())
        name = path.partition(f"/{NAME}/resolve/{COMMIT}/")[2]
        if name in FILES:
            return self._send(FILES[name])
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(body), "ETag": f'"{self._etag(body)}"', "X-Repo-Commit": COMMIT}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _etag(self, body: bytes) -> str:
        return hashlib.sha1(body).hexdigest()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A hub on the loopback interface, and an empty cache of the hub library."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetches_weights_and_their_descriptions_only(hub: ThreadingHTTPServer) -> None:
    path = fetch_from_hub(NAME)
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors")}


def test_a_folder_of_a_repository_is_fetched_alone(hub: ThreadingHTTPServer) -> None:
    path = fetch_from_hub(f"{NAME}/backbone-only")
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {name: FILES[f"backbone-only/{name}"] for name in ("config.json", "model.safetensors")}
    assert not (path.parent / "model.safetensors").exists()
    with pytest.raises(LocateError, match=f"{NAME} has no folder other"):
        fetch_from_hub(f"{NAME}/other")


def test_a_fetched_copy_will_do_without_a_network(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_from_hub(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch_from_hub(NAME) == path


def test_a_name_that_the_hub_does_not_know(hub: ThreadingHTTPServer) -> None:
    with pytest.raises(LocateError, match="owner/none is not a path, and the model hub does not give"):
        fetch_from_hub("owner/none")


def test_offline_without_a_copy(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocateError, match=rf"{NAME} is not a path.*the hub cannot be reached, and no copy"):
        fetch_from_hub(NAME)


def test_a_hub_that_does_not_answer(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LocateError, match=rf"{NAME} is not a path.*the hub cannot be reached"):
        fetch_from_hub(NAME)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "too").mkdir(parents=True)
    assert is_hub_name("google/gemma-3-270m")
    assert is_hub_name("owner/draft/backbone-only")
    for name in ("gemma", "/a/b", "a/b/c/d", "./a", "~/a", "a/b.gguf", "here/too", "", "a/", "../a"):
        assert not is_hub_name(name)
