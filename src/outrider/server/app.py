"""The application: routes, and what every route shares. `create_app` is the only door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from outrider.backends.base import ServingBackend
from outrider.environment import OUTRIDER_VERSION
from outrider.errors import ConfigError, OutriderError
from outrider.server.chat import ChatTemplate, find_template
from outrider.server.faults import Fault, fault_of, fault_of_validation
from outrider.server.generation import ClientGoneError
from outrider.server.guards import BodyLimit, BugGuard, KeyGuard
from outrider.server.metrics import ServerMetrics
from outrider.server.readiness import Readiness
from outrider.server.routes import openai_routes, text_routes

STATIC_DIR = Path(__file__).parent / "static"
CLIENT_GONE = 499  # nginx's status for a client that closed its connection; nobody reads it


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP side alone; those of the engine are the backend's."""

    served_model_names: tuple[str, ...] = ()
    """Names that clients may use; empty means the backend's own. The first one is in the answers."""
    api_key: str | None = None
    """Asked for as `Authorization: Bearer KEY`; /health and the playground's page are open."""
    max_body_bytes: int = 8 * 2**20
    metrics_prefix: str = "outrider"
    drain_s: float = 30.0
    """How long running answers may go on once the server was told to stop, in seconds."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the field."""
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} lets no request in. Give at least 1.")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s={self.drain_s} is negative. Give seconds, 0 to abort at once.")
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"metrics_prefix={self.metrics_prefix!r} is no metric name. Use letters, digits and _.")
        if self.api_key == "" or any(not name for name in self.served_model_names):
            raise ConfigError("api_key and served_model_names must not be empty. Leave them out instead.")


def create_app(
    backend: ServingBackend | None,
    config: ServerConfig | None = None,
    *,
    template: ChatTemplate | None = None,
    model: str = "",
) -> FastAPI:
    """The server over a backend that was started, or over none yet: then `app.state.readiness.serve` brings it.

    `template` is the target's, by default what its vocabulary suggests; `model` names the target while there is no
    backend to ask. The backend is stopped when the application ends.
    """
    config = config or ServerConfig()
    readiness = Readiness()
    if backend is not None:
        readiness.serve(backend, template or find_template(None, backend.tokenizer))
    names = config.served_model_names or (backend.model if backend is not None else model,)
    metrics = ServerMetrics(
        lambda: readiness.backend.gauges() if readiness.backend is not None else None,
        model=names[0],
        prefix=config.metrics_prefix,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(readiness.drain, config.drain_s)

    app = FastAPI(title="Outrider", version=OUTRIDER_VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.readiness, app.state.metrics, app.state.names = readiness, metrics, names
    app.include_router(openai_routes)
    app.include_router(text_routes)
    _add_status_routes(app)
    _add_fault_handlers(app)
    app.add_middleware(BugGuard)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    if config.api_key is not None:
        app.add_middleware(KeyGuard, api_key=config.api_key)
    return app


def _add_status_routes(app: FastAPI) -> None:
    readiness: Readiness = app.state.readiness

    @app.get("/health")
    def health() -> JSONResponse:
        """200 once answers can be expected, 503 before and after."""
        readiness.check_health()
        body = {"status": readiness.status, "reasons": list(readiness.reasons)}
        return JSONResponse(body, 200 if readiness.is_serving else 503)

    @app.get("/version")
    def version() -> dict[str, str]:
        """Which Outrider this is."""
        return {"version": OUTRIDER_VERSION}

    @app.get("/metrics")
    def metrics() -> Response:
        """For Prometheus."""
        return Response(app.state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def playground() -> FileResponse:
        """The playground."""
        return FileResponse(STATIC_DIR / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC_DIR))


def _add_fault_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(Fault)
    def on_fault(_: Request, fault: Fault) -> Response:
        return _answer(fault)

    @app.exception_handler(OutriderError)
    def on_error(_: Request, error: OutriderError) -> Response:
        return _answer(fault_of(error))

    @app.exception_handler(RequestValidationError)
    def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return _answer(fault_of_validation(error))

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(HTTPException)
    def on_http(_: Request, error: StarletteHTTPException) -> Response:
        return _answer(Fault(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    @app.exception_handler(ClientGoneError)
    def on_gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)


def _answer(fault: Fault) -> Response:
    body: dict[str, Any] = fault.body()
    return JSONResponse(body, fault.status, fault.headers)
