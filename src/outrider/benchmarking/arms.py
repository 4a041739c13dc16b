"""What `bench compare` can put side by side: servers by URL, and the engine in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from outrider.backends.base import Backend
from outrider.benchmarking.answer import Sample
from outrider.benchmarking.client import ChatRequest, ServerClient
from outrider.benchmarking.compare import AGAIN
from outrider.benchmarking.counters import CounterReset, Counters, settled_metrics
from outrider.benchmarking.request_sets import Item
from outrider.core import AcceptanceStats, SamplingParams
from outrider.errors import ConfigError, EngineFault, OutriderError

LOCAL = "local:"
LOCAL_KINDS = ("plain", "drafter")
LOCAL_FIELDS = {"num_speculative_tokens"}
COMMON_FIELDS = {"max_tokens", "messages", "prompt", "seed", "stream", "stream_options", "temperature"}


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """An arm as the command line names it."""

    name: str
    place: str
    """A server's URL, 'local:plain' or 'local:drafter'."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Body fields for a server, `num_speculative_tokens` for a local one; nested ones are objects."""

    @property
    def local_kind(self) -> str | None:
        """'plain' or 'drafter' in this process; None for a server."""
        return self.place.removeprefix(LOCAL) if self.place.startswith(LOCAL) else None


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How every arm is asked, which is the same for all but for its own fields."""

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True
    """Answers of one length; servers that do not know the field end where they end."""
    is_chat: bool = False
    """Each prompt is sent as a user's message instead of as text to continue; chats are chats anyway."""

    def as_asked(self, item: Item) -> Item:
        """The item in that form."""
        if item.prompt is None or not self.is_chat:
            return item
        return replace(item, prompt=None, messages=({"role": "user", "content": item.prompt},))


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """A chat as text, and what ends an answer to it where it is not to run on."""

    text: str
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


def parse_arm(text: str) -> ArmSpec:
    """NAME=PLACE[,field=value…]; a value is JSON or else text, and `speculative.enabled=false` is a nested field.

    ConfigError for what is no such thing, with an example.
    """
    head, *settings = text.split(",")
    name, has_place, place = head.partition("=")
    if name.endswith(f" {AGAIN}"):
        raise ConfigError(f"--arm {name!r} is what --aa calls a second run of an arm. Give another name.")
    if not (name and has_place) or name.startswith(("http:", "https:", LOCAL)):
        raise ConfigError(f"--arm {text!r} has no name. Write NAME=PLACE, as in fast=http://127.0.0.1:8000.")
    fields: dict[str, Any] = {}
    for setting in settings:
        key, has_value, value = setting.partition("=")
        if not (has_value and all(key.split("."))):
            raise ConfigError(f"--arm {name}: {setting!r} is no field. Write field=value, as in top_k=20.")
        _put(fields, key.split("."), _value(value))
    spec = ArmSpec(name=name, place=place, fields=fields)
    if spec.local_kind is not None and spec.local_kind not in LOCAL_KINDS:
        raise ConfigError(f"--arm {name}: {place!r} is not known. Use local:plain, local:drafter or a URL.")
    if spec.local_kind is None and not place.startswith(("http://", "https://")):
        raise ConfigError(f"--arm {name}: {place!r} is no URL. Give one such as http://127.0.0.1:8000.")
    if common := sorted(set(fields) & COMMON_FIELDS):
        raise ConfigError(
            f"--arm {name}: {common[0]} is the same for all arms, so it is no field of one. Leave it out."
        )
    if spec.local_kind is not None and (unknown := sorted(set(fields) - LOCAL_FIELDS)):
        raise ConfigError(f"--arm {name}: a local arm has no field {unknown[0]!r}, only num_speculative_tokens.")
    return spec


def _put(fields: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *outer, last = path
    for key in outer:
        fields = fields.setdefault(key, {})
        if not isinstance(fields, dict):
            raise ConfigError(f"--arm: {key!r} is a value and has fields as well. Leave one of them out.")
    fields[last] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ServerArm:
    """A server asked with fields of one's own."""

    def __init__(self, spec: ArmSpec, client: ServerClient, asking: Asking) -> None:
        self.name, self._spec, self._client, self._asking = spec.name, spec, client, asking

    @property
    def asked(self) -> Mapping[str, Any]:
        """Drafting, where a field turns it on or off."""
        speculative = self._spec.fields.get("speculative")
        if not isinstance(speculative, dict):
            return {}
        length, enabled = speculative.get("num_speculative_tokens"), speculative.get("enabled")
        if enabled is None and length is None:
            return {}
        return {"drafting": enabled is not False and length != 0}

    def echo(self, samples: Sequence[Sample]) -> Mapping[str, Any]:
        """Drafting, as answers or counters say. Answers without either mean that it was off on our own server only."""
        told = [sample.acceptance for sample in samples if sample.acceptance]
        if not told and self._client.server_kind() != "outrider":
            return {}
        return {"drafting": any(each.get("num_draft_tokens", 0) > 0 for each in told)}

    def measure(self, item: Item) -> Sample:
        """Ask once; what drafting brought is the server's counters' word where the answer says nothing of it."""
        before = self._counters()
        sample = self._client.complete(self._request(item, max_tokens=item.max_tokens or self._asking.max_tokens))
        if before is None or sample.acceptance is not None or sample.error is not None:
            return sample
        after = self._counters()
        return sample if after is None else replace(sample, acceptance=_counted(before, after))

    def _counters(self) -> Counters | None:
        """Now; None where the server is our own, whose answers say it all, or does not answer."""
        try:
            kind = self._client.server_kind()
            return None if kind == "outrider" else settled_metrics(self._client, kind)[1]
        except EngineFault:
            return None

    def _request(self, item: Item, *, max_tokens: int) -> ChatRequest:
        asking, fields = self._asking, dict(self._spec.fields)
        if asking.ignore_eos:
            fields = {"ignore_eos": True, **fields}
        asked = asking.as_asked(item)
        return ChatRequest(
            messages=asked.messages,
            prompt=asked.prompt,
            tools=asked.tools,
            max_tokens=max_tokens,
            temperature=asking.temperature,
            seed=asking.seed,
            extra=fields,
        )

    def count_prompt_tokens(self, item: Item) -> int:
        """Tokens of a prompt as the server reads it, template included, by the usage of a short answer."""
        sample = self._client.complete(self._request(item, max_tokens=1))
        if sample.num_prompt_tokens is None:
            raise EngineFault(f"{self.name} does not count a prompt: {sample.error or 'its usage is missing'}.")
        return sample.num_prompt_tokens

    def describe(self) -> dict[str, Any]:
        """For a record; EngineFault where the server does not answer."""
        return {
            "name": self.name,
            "backend": self._client.server_kind(),
            "target": self._client.model,
            "drafter": None,
            "settings": {**asdict(self._asking), **self._spec.fields},
        }


class LocalArm:
    """A backend in this process; ours with its drafter, or without."""

    def __init__(
        self,
        spec: ArmSpec,
        backend: Backend,
        asking: Asking,
        *,
        target: str,
        drafter: str | None,
        kernels: str,
        render: Callable[[Item], Rendering],
    ) -> None:
        """`render` makes text of a chat, as a server would."""
        self._render = render
        self.name, self._spec, self._backend, self._asking = spec.name, spec, backend, asking
        self._about = {"target": target, "drafter": drafter, "kernels": kernels}
        self._params = SamplingParams(
            max_tokens=asking.max_tokens,
            temperature=asking.temperature,
            seed=asking.seed,
            ignore_eos=asking.ignore_eos,
            num_speculative_tokens=spec.fields.get("num_speculative_tokens"),
        )

    @property
    def asked(self) -> Mapping[str, Any]:
        """Drafting, by which of the two it is."""
        is_drafting = self._about["drafter"] is not None and self._params.num_speculative_tokens != 0
        return {"drafting": is_drafting}

    def echo(self, samples: Sequence[Sample]) -> Mapping[str, Any]:
        """Drafting, as the cycles were."""
        return {"drafting": any(sample.acceptance for sample in samples)}

    def measure(self, item: Item) -> Sample:
        """Stream one answer; what the backend raises about it is its error."""
        rendered = self._rendered(item)
        params = self._params_for(item, rendered)
        started_s = time.perf_counter()
        times_s: list[float] = []
        token_ids: list[int] = []
        text, finish_reason, error = "", None, None
        stats = AcceptanceStats()
        try:
            for chunk in self._backend.stream(rendered.text, params):
                times_s.append(time.perf_counter())
                token_ids += chunk.token_ids
                text, finish_reason = text + chunk.text, chunk.finish_reason
                if chunk.num_draft_tokens:
                    stats.record_cycle(
                        draft_length=chunk.num_draft_tokens, num_accepted_tokens=chunk.num_accepted_draft_tokens
                    )
        except OutriderError as raised:
            error = str(raised)
        return Sample(
            started_s=started_s,
            ttft_s=times_s[0] - started_s if times_s else None,
            chunk_gaps_s=tuple(later - earlier for earlier, later in pairwise(times_s)),
            e2e_s=(times_s[-1] if times_s else time.perf_counter()) - started_s,
            num_prompt_tokens=len(self._backend.encode(rendered.text)),
            num_output_tokens=len(token_ids),
            num_chunks=len(times_s),
            text=text,
            reasoning="",
            tool_calls=(),
            finish_reason=finish_reason,
            error=error,
            acceptance=_acceptance(stats),
        )

    def _params_for(self, item: Item, rendered: Rendering) -> SamplingParams:
        params = replace(self._params, max_tokens=item.max_tokens or self._params.max_tokens)
        if params.ignore_eos:
            return params
        return replace(params, stop_strings=rendered.stop_strings, stop_token_ids=rendered.stop_token_ids)

    def _rendered(self, item: Item) -> Rendering:
        asked = self._asking.as_asked(item)
        return Rendering(text=asked.prompt) if asked.prompt is not None else self._render(asked)

    def count_prompt_tokens(self, item: Item) -> int:
        """Tokens of a prompt as the backend reads it; RequestError for a chat that the target's template cannot say."""
        return len(self._backend.encode(self._rendered(item).text))

    def describe(self) -> dict[str, Any]:
        """For a record."""
        settings = {"kernels": self._about["kernels"], **asdict(self._asking), **self._spec.fields}
        return {
            "name": self.name,
            "backend": "local",
            "target": self._about["target"],
            "drafter": self._about["drafter"],
            "settings": settings,
        }


def _counted(before: Counters, after: Counters) -> dict[str, Any] | None:
    """What was drafted between two readings; None where a server does not count it or was started anew."""
    try:
        grown = after - before
    except CounterReset:
        return None
    counts = {
        "num_spec_steps": grown.num_drafts,
        "num_draft_tokens": grown.num_draft_tokens,
        "num_accepted_draft_tokens": grown.num_accepted_tokens,
    }
    return None if None in counts.values() else counts


def _acceptance(stats: AcceptanceStats) -> dict[str, Any] | None:
    """In the names that servers use; None where nothing was drafted."""
    if stats.num_draft_tokens == 0:
        return None
    return {
        "num_spec_steps": stats.num_cycles,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
    }
