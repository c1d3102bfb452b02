"""Data files: every one says in JSON and in CSV on what it was made, and how the page cache was."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import environment
from bench.paper.estimates import Estimate

Row = Mapping[str, Any]


def write(
    folder: Path, name: str, rows: Sequence[Row], sessions: Sequence[Row], cache: str
) -> None:
    """`name`.json and `name`.csv. Estimates become four columns: n, median, low, high."""
    flat = [_flat(row) for row in rows]
    content = {"sessions": sessions, "cache": cache, "rows": [_plain(row) for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    made_on = environment.columns(sessions[-1], cache)
    columns = list(dict.fromkeys(column for row in flat for column in row))
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *made_on], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **made_on} for row in flat)


def _plain(row: Row) -> dict[str, Any]:
    return {
        key: asdict(value) if isinstance(value, Estimate) else value for key, value in row.items()
    }


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Estimate):
            flat |= {f"{key}_{part}": found for part, found in asdict(value).items()}
        elif not isinstance(value, list | dict):
            flat[key] = value
    return flat
