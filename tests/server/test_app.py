from __future__ import annotations

from typing import Any

import httpx
import pytest

from outrider.backends.scripted import Script, ScriptedBackend
from outrider.environment import OUTRIDER_VERSION
from outrider.errors import ConfigError
from outrider.server.app import ServerConfig, create_app
from outrider.server.chat import PLAIN
from tests.serving import listening, serve

SCRIPTS = {"": Script.of_text("<|channel>thought\nx<channel|>Hello 🙂", block_tokens=3)}


def test_503_until_there_is_a_backend() -> None:
    backend = ScriptedBackend(SCRIPTS)
    backend.start()
    app = create_app(None, model="m")
    with listening(app) as url, httpx.Client(base_url=url) as http:
        loading = http.get("/health")
        assert (loading.status_code, loading.json()["status"]) == (503, "loading")
        refused = http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
        assert http.get("/v1/models").status_code == 503
        assert http.get("/v1/speculation").json()["active"] is False
        assert http.get("/metrics").status_code == 200
        assert http.get("/version").json() == {"version": OUTRIDER_VERSION}
        app.state.readiness.serve(backend, PLAIN)
        assert http.get("/health").json() == {"status": "ready", "reasons": []}
        backend.fault = "broken"
        assert http.get("/health").status_code == 503
    assert backend.gauges().num_running == 0
    with pytest.raises(Exception, match="does not run"):  # the application has stopped it
        backend.submit([1], None, print)  # type: ignore[arg-type]


def test_a_bug_is_a_500_in_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(SCRIPTS) as served:

        def break_down(*arguments: object, **options: object) -> int:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(served.backend, "submit", break_down)
        answered = served.post("/v1/completions", {"prompt": "x"})
        assert answered.status_code == 500
        assert answered.json()["error"]["type"] == "server_error"
        assert "secret" not in answered.text
        assert served.http.get("/nowhere").json()["error"]["message"] == "Not Found"
        assert served.http.get("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "fields",
    [
        {"max_body_bytes": 0},
        {"drain_s": -1.0},
        {"metrics_prefix": "a b"},
        {"metrics_prefix": ""},
        {"api_key": ""},
        {"served_model_names": ("",)},
    ],
)
def test_settings_that_cannot_work_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ServerConfig(**fields)
