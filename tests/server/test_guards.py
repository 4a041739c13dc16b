from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from outrider.backends.scripted import Script
from outrider.server.app import ServerConfig
from tests.serving import MODEL, Served, serve

CONFIG = ServerConfig(api_key="sesame", max_body_bytes=1000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve({"": Script.of_text("fine")}, CONFIG) as served:
        served.http.headers["Authorization"] = "Bearer sesame"
        yield served


@pytest.mark.parametrize("header", [None, "", "sesame", "Bearer", "Bearer sesam", "Bearer sesame2", "Basic sesame"])
def test_without_the_key_nobody_gets_in(served: Served, header: str | None) -> None:
    headers = {"Authorization": header or ""} if header is not None else {"Authorization": ""}
    for path in ("/v1/models", "/metrics", "/v1/speculation", "/version", "/openapi.json"):
        answered = served.http.get(path, headers=headers)
        assert answered.status_code == 401, path
        assert answered.json()["error"]["code"] == "invalid_api_key"
        assert answered.headers["www-authenticate"] == "Bearer"


def test_health_and_the_playground_are_open(served: Served) -> None:
    for path in ("/health", "/", "/static/playground.js"):
        assert served.http.get(path, headers={"Authorization": ""}).status_code == 200, path


def test_clients_send_the_key(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        served.sdk.models.list()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="sesame", max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL


def test_a_long_body_is_refused_by_its_header(served: Served) -> None:
    answered = served.post("/v1/completions", {"prompt": "x" * 1000})
    assert answered.status_code == 413
    assert "1000 bytes" in answered.json()["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "x" * 900}).status_code == 200


def test_a_long_body_is_refused_while_it_comes(served: Served) -> None:
    pieces = (b'{"prompt": "', *[b"x" * 100] * 20, b'"}')
    headers = {"Content-Type": "application/json"}
    answered = served.http.post("/v1/completions", content=iter(pieces), headers=headers)
    assert answered.status_code == 413
    short = served.http.post("/v1/completions", content=iter((b'{"prompt"', b': "x"}')), headers=headers)
    assert short.status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"prompt":', "not valid JSON"),
        (b"\xff\xfe", ""),
        (b"", "JSON object"),
        (b"[" * 400, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "Unicode"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 100 + b"}", "seed"),
    ],
)
def test_a_malformed_body_is_400(served: Served, body: bytes, named: str) -> None:
    answered = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answered.status_code == 400
    assert named in answered.json()["error"]["message"]
