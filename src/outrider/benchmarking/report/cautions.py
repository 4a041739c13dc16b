"""What a reader must not miss: what a record may claim, what it may not, and what went wrong while it was made."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.benchmarking.record import num_missing
from outrider.benchmarking.report import readings
from outrider.benchmarking.report.records import Record
from outrider.benchmarking.report.wording import ABSENT, label, percent

SETTLED = ("faster", "slower", "equal")  # verdicts of a comparison whose sample carries them


def warnings(record: Record) -> Iterator[str]:
    """What a reader must not miss."""
    settings = [arm.get("settings") or {} for arm in record.fields["arms"]]
    if record.is_published:
        yield "Published figures, typed in from the source named. Nothing here measured them."
    if record.fields.get("complete") is False:
        yield _incomplete(record)
    if any(each.get("is_synthetic") for each in settings):
        yield "Acceptance was imposed: this times cycles, and its text is nobody's."
    if (record.fields["environment"].get("git") or {}).get("dirty"):
        yield "Made from a working tree with changes that were not committed."
    if any(summary.get("identical") is False for summary in record.summaries):
        yield "The arms did not write the same text."
    for name in readings.losing_cells(record):
        yield f"The drafter loses here: drafting nothing is fastest ({name})."
    yield from _verdicts(record)
    yield from _faults(record)
    yield from record.fields.get("notes") or ()


def _incomplete(record: Record) -> str:
    """Why rows are missing, and how many."""
    lacking, num_rows = num_missing(record.fields.get("missing") or ()), len(record.fields["rows"])
    if record.fields.get("stopped"):
        return f"The run was stopped ({record.fields['stopped']}): {num_rows} rows were kept, {lacking} are missing."
    return f"The run was stopped or parts of it failed: {lacking} are missing."


def _faults(record: Record) -> Iterator[str]:
    """Faults and warnings that summaries list, findings of a run's integrity, and checks that failed."""
    keys = readings.varying(record.summaries, (*readings.NAMES, *readings.AXES))
    for summary in record.summaries:
        name = readings.cell_name(summary, keys)
        if summary.get("faults") and not summary.get("verdict_text"):
            yield f"{name + ': faults' if name else 'Faults'}: {', '.join(map(label, summary['faults']))}."
        yield from (f"{text[:1].upper()}{text[1:]}." for text in summary.get("warnings") or ())
        for finding in (summary.get("integrity") or {}).get("findings") or ():
            weight = "The figures must not be used" if finding.get("is_fatal") else "Mind"
            yield f"{weight}: {label(finding['name'])}: {finding['detail']}"
    for check in readings.checks(record):
        if check["status"] == "fail":
            yield f"Failed: {check.get('name', ABSENT)}: {check.get('reason', ABSENT)}"


def findings(record: Record) -> Iterator[str]:
    """What the record itself claims of each comparison, where its sample carries a claim."""
    for summary in record.summaries:
        if summary.get("verdict") in SETTLED and summary.get("verdict_text"):
            yield f"{summary['arm']} over {summary['baseline']}: {summary['verdict_text']}."


def _verdicts(record: Record) -> Iterator[str]:
    """What may not be claimed of a comparison: in the record's own words, else by its interval and noise floor."""
    floor = readings.noise_floor(record)
    compared = [summary for summary in record.summaries if summary.get("speedup") is not None]
    for effect, summary in zip(readings.effects(record), compared, strict=True):
        if summary.get("verdict_text"):
            if summary.get("verdict") not in SETTLED:
                yield f"{effect.name}: {summary['verdict_text']}."
        elif effect.interval and effect.interval[0] <= 1 <= effect.interval[1]:
            yield f"No difference is shown for {effect.name}: the interval holds 1."
        elif floor and 1 / (1 + floor) <= effect.ratio <= 1 + floor:
            yield f"A tie for {effect.name}: the ratio lies within the noise floor of {percent(floor)}."
