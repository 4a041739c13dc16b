"""Whether the server answers yet, and why not."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from outrider.backends.base import ServingBackend
from outrider.server.chat import PLAIN, ChatTemplate
from outrider.server.faults import Fault

Status = Literal["loading", "ready", "acceptance-low", "failed", "draining"]
SERVING: tuple[Status, ...] = ("ready", "acceptance-low")


@dataclass
class Readiness:
    """The backend once there is one, and the state that /health tells. Set from the thread that boots it."""

    backend: ServingBackend | None = None
    template: ChatTemplate = PLAIN
    status: Status = "loading"
    reasons: tuple[str, ...] = ()
    """Likely causes of low acceptance, or the failure."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def serve(self, backend: ServingBackend, template: ChatTemplate, *, low_acceptance: tuple[str, ...] = ()) -> None:
        """The self-test has passed, or drafts are poor for these likely causes: answer from now on."""
        with self._lock:
            self.backend, self.template, self.reasons = backend, template, low_acceptance
            if self.status == "loading":
                self.status = "acceptance-low" if low_acceptance else "ready"

    def fail(self, reason: str) -> None:
        """It will never be ready."""
        self.status, self.reasons = "failed", (reason,)

    @property
    def is_serving(self) -> bool:
        """True where answers can be expected."""
        return self.status in SERVING

    def check_health(self) -> None:
        """Take note of a backend that broke since."""
        fault = self.backend.fault if self.backend is not None else None
        if fault is not None and self.is_serving:
            self.fail(fault)

    def serving(self) -> ServingBackend:
        """The backend; a 503 where it does not answer."""
        self.check_health()
        if self.backend is None or not self.is_serving:
            reason = "".join(f" {each}" for each in self.reasons)
            raise Fault(503, f"The server is not ready: {self.status}.{reason}", code=self.status)
        return self.backend

    def drain(self, drain_s: float) -> None:
        """Take no more requests and stop the backend, running requests being given `drain_s` seconds to end."""
        with self._lock:
            was, self.status = self.status, "draining"
        if was != "draining" and self.backend is not None:
            self.backend.stop(drain_s=drain_s)
