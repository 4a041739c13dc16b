"""A drafter's README: what it is, what it was measured to be worth, how it was made. Every figure is a record's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.models.config import LayerKind
from outrider.models.drafter_config import BlockLayout, DrafterConfig

UNKNOWN = "not recorded"
Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card is made of, beside the drafter's own config."""

    layout: str
    licence: str | None = None
    """As the model hub spells it, such as "gemma" or "apache-2.0"."""
    target_name: str | None = None
    training: Fields | None = None
    """The `training_record.json` that lay beside the weights."""
    selection: Fields | None = None
    """A record of `train select`."""
    sha256: str | None = None
    """Of the drafter that is exported: the record must have measured this one."""


def model_card(drafter: DrafterConfig, facts: CardFacts) -> str:
    """The card in Markdown. ConfigError for a selection record that measured other drafters."""
    parts = [
        _front_matter(drafter, facts),
        f"# {drafter.name}\n\n{_introduction(drafter, facts)}",
        _table("What it is", ("", ""), list(_shape(drafter, facts))),
        _acceptance(facts),
        _training(facts.training),
        _licence(facts),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _front_matter(drafter: DrafterConfig, facts: CardFacts) -> str:
    """What the hub reads; a field that is not known is left out, never guessed."""
    kind = "dspark" if drafter.markov or drafter.layout is BlockLayout.NEXT_POSITION else "dflash"
    lines = ["---"]
    if facts.licence:
        lines.append(f"license: {json.dumps(facts.licence)}")
    if facts.target_name:
        lines.append(f"base_model: {json.dumps(facts.target_name)}")
    return "\n".join([*lines, "tags:", "- speculative-decoding", f"- {kind}", "---"]) + "\n"


def _introduction(drafter: DrafterConfig, facts: CardFacts) -> str:
    target = f"`{facts.target_name}`" if facts.target_name else "its target"
    return (
        f"A drafter for block-diffusion speculative decoding of {target}: it proposes up to {drafter.max_draft_length} "
        "tokens in one pass, and the target checks them. It decides how fast text comes, never what it says. The files "
        f"are in the `{facts.layout}` layout."
    )


def _shape(drafter: DrafterConfig, facts: CardFacts) -> Iterator[tuple[str, str]]:
    is_next, windows = drafter.layout is BlockLayout.NEXT_POSITION, {spec.window for spec in drafter.layers} - {None}
    kinds = [spec.kind for spec in drafter.layers]
    full = kinds.count(LayerKind.FULL)
    scale = drafter.embedding_scale
    yield "layers", f"{len(kinds)} ({len(kinds) - full} sliding, {full} full), {drafter.style.value} style"
    yield "causal inside the block", ", ".join("yes" if each else "no" for each in drafter.layer_is_causal)
    yield "window", ", ".join(str(window) for window in sorted(windows, key=str)) or "none"
    yield "block", f"{drafter.block_size} slots; a slot predicts {'the next' if is_next else 'its own'} position"
    yield "draft length unless told otherwise", str(drafter.num_speculative_tokens)
    yield "target layers read (0-based outputs)", ", ".join(map(str, drafter.target_layer_ids))
    yield "hidden size", str(drafter.hidden_size)
    yield "vocabulary", f"{drafter.draft_vocab_size} of {drafter.vocab_size} tokens; mask {drafter.mask_token_id}"
    yield "block embeddings", "scaled as the target's" if scale is None else f"multiplied by {scale:g}"
    yield "Markov head", f"{drafter.markov.kind.value}, rank {drafter.markov.rank}" if drafter.markov else "none"
    yield "confidence head", "yes" if drafter.confidence else "none"
    yield "SHA-256 of the drafter exported", facts.sha256 or UNKNOWN


def _acceptance(facts: CardFacts) -> str:
    """The rows of the record that are this drafter's, with where they were measured."""
    if facts.selection is None:
        return "## Acceptance\n\nNot measured: no record was given.\n"
    name = _name_in(facts.selection, facts.sha256)
    cells = [each for each in facts.selection["summary"] if each["drafter"] == name]
    baseline = cells[0]["baseline"]
    head = ("domain", "temperature", "tokens a cycle", f"against {baseline}", "interval", "prompts")
    rows = [
        (
            each["domain"],
            f"{each['temperature']:g}",
            _number(each["mean_acceptance_length"]),
            "the baseline itself" if name == baseline else _number(each["difference"], "+.3f"),
            " to ".join(f"{end:+.3f}" for end in each["interval"]) if each["interval"] else "–",
            str(each["num_prompts"]),
        )
        for each in cells
    ]
    where = _environment(facts.selection.get("environment") or {})
    text = (
        "Tokens that a cycle of the engine is worth on held-out prompts, the target's own token included; differences "
        f"are paired by prompt, with {100 * cells[0]['confidence']:g} % intervals. Prompts: "
        f"{facts.selection['workload']['name']} (SHA-256 {facts.selection['workload']['sha256']}). "
        f"Measured {facts.selection.get('created', UNKNOWN)} on {where}.\n"
    )
    return _table("Acceptance", head, rows) + "\n" + text


def _name_in(selection: Fields, sha256: str | None) -> str:
    """The name of this drafter in the record, found by its bytes: a name could be another's."""
    for arm in selection["arms"]:
        if arm.get("drafter_sha256") == sha256 and sha256 is not None:
            return str(arm["name"])
    measured = ", ".join(str(arm.get("name")) for arm in selection["arms"])
    raise ConfigError(
        f"the record measured {measured}, none of which is this drafter (SHA-256 {sha256}). Measure it with `outrider "
        "train select --record`, or leave the record out."
    )


def _training(record: Fields | None) -> str:
    if record is None:
        return "## Training\n\nNot recorded: no training_record.json lay beside the weights.\n"
    text, done, total = record.get("text") or {}, record.get("num_steps_done"), record.get("num_steps")
    rows = [
        ("steps", f"{done} of {total}" if total else UNKNOWN),
        ("seconds of training", _number(record.get("train_seconds"), ".0f")),
        ("tokens of text, written by the target", str(text.get("num_tokens", UNKNOWN))),
        ("SHA-256 of the target", str(text.get("target_sha256", UNKNOWN))),
        ("parameters", str(record.get("num_parameters", UNKNOWN))),
        ("environment", _environment(record.get("environment") or {})),
    ]
    recipe = json.dumps(record.get("recipe") or {}, indent=1, ensure_ascii=False)
    return _table("Training", ("", ""), rows) + f"\nThe recipe:\n\n```json\n{recipe}\n```\n"


def _environment(found: Fields) -> str:
    """The machine and the versions, in a line."""
    accelerators = [str(each.get("name")) for each in found.get("accelerators") or ()]
    packages = found.get("packages") or {}
    commit = (found.get("git") or {}).get("commit")
    words = [
        " + ".join(accelerators) or found.get("cpu_model"),
        f"Outrider {found['outrider']}" if found.get("outrider") else None,
        f"commit {commit[:12]}" if commit else None,
        *(f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)),
    ]
    return ", ".join(filter(None, words)) or UNKNOWN


def _licence(facts: CardFacts) -> str:
    said = f"`{facts.licence}`" if facts.licence else "Not stated"
    return (
        f"## Licence\n\n{said}. A drafter that was trained on a target's output, or brings its tables, is bound by the "
        "target's terms as well.\n"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rows)]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def _number(value: float | None, shape: str = ".3f") -> str:
    return "–" if value is None else f"{value:{shape}}"
