"""Make one record of several that measured parts of one table, such as a draft length on each GPU.

python tools/join_records.py n0.json n7.json --out benchmarks/results/h200-decode.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.benchmarking.record import write_record
from outrider.errors import ConfigError

SAME = ("schema", "name", "workload")


def join_records(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows and summaries of all, the first one's environment; later arms carry their own and a number in their names.

    What is missing of any is missing of the joined one, which is then no more complete than they are. ConfigError for
    fewer than two, and for records of different kinds or workloads.
    """
    if len(records) < 2:
        raise ConfigError("one record is joined with nothing. Give two or more.")
    first = records[0]
    for key in SAME:
        if any(record[key] != first[key] for record in records):
            raise ConfigError(f"the records differ in {key}, so they are not parts of one table.")
    joined = {**first, "arms": [], "rows": [], "summary": []}
    missing: list[dict[str, Any]] = []
    joined["command"] = " && ".join(record["command"] for record in records)
    for number, record in enumerate(records, start=1):
        names = {arm["name"]: _numbered(arm["name"], number) for arm in record["arms"]}
        about = {} if number == 1 else {"environment": record["environment"]}
        joined["arms"] += [{**arm, "name": names[arm["name"]], **about} for arm in record["arms"]]
        joined["rows"] += [{**row, "arm": names[row["arm"]]} for row in record["rows"]]
        joined["summary"] += record["summary"] if isinstance(record["summary"], list) else [record["summary"]]
        absent = record.get("missing", ())
        missing += [{**each, "arm": names.get(each["arm"], _numbered(each["arm"], number))} for each in absent]
    stopped = [record["stopped"] for record in records if "stopped" in record]
    marks = {"complete": False, "missing": missing} | ({"stopped": ", ".join(stopped)} if stopped else {})
    return _unmarked(joined) | (marks if missing or stopped else {})


def _unmarked(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("complete", "missing", "stopped")}


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} ({number})"


def main() -> None:
    """Read the command line, join and write."""
    parser = argparse.ArgumentParser(description="Make one record of several.")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="a new file")
    asked = parser.parse_args()
    if asked.out.exists():
        raise SystemExit(f"{asked.out} exists, and records are never overwritten. Name a new file.")
    try:
        write_record(join_records([json.loads(path.read_text()) for path in asked.records]), asked.out)
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
