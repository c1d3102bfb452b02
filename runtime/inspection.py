"""`cicada inspect` and `cicada remove`: what lies in the weight store."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from models.store import CorruptModel, PreparedModel, Store
from runtime.facts import layer_facts, model_facts

_UNCUT_COLUMNS: Final = 1000
_SHOWN_LABELS: Final = 5
_ONE_MODEL_ONLY: Final = {
    "folder",
    "preset",
    "parameters",
    "converted from",
    "execution",
    "gain",
    "labels",
    "input",
    "factory",
    "processing",
}


def inspect(weights: Path, name: str | None, *, verify: bool, as_json: bool) -> bool:
    """Shows all models, or one model's layers; returns whether no fault was found.

    A model that cannot be opened is a fault always; with `verify` sizes and hashes are checked, and the
    user's code is run as far as making the model.
    Raises UnknownModel.
    """
    store = Store(weights)
    if name is None:
        models, faults = _open_all(store)
        shown = [_whole(model) for model in models]
    else:
        model, faults = _open_one(store, name)
        models = [] if model is None else [model]
        shown = [_whole(model) | {"contents": layer_facts(model)} for model in models]
    if verify:
        for model in models:
            faults |= {model.name: [*store.verify(model.name), *_findings_in_code(model)]}
    faults = {faulty: findings for faulty, findings in faults.items() if findings}
    if as_json:
        document = {"models": shown, "faults": faults}
        print(json.dumps(document, indent=2))  # noqa: T201 - the command's output
    else:
        _print(weights, shown, faults, verify=verify)
    return not faults


def remove(weights: Path, name: str) -> None:
    """Removes a model with all its versions. Raises UnknownModel."""
    Store(weights).remove(name)
    _console().print(f"removed {name}")


def _open_all(store: Store) -> tuple[list[PreparedModel], dict[str, list[str]]]:
    models = [store.open(name) for name in store.names()]
    return models, {name: store.verify(name) for name in store.damaged()}


def _open_one(store: Store, name: str) -> tuple[PreparedModel | None, dict[str, list[str]]]:
    try:
        return store.open(name), {}
    except CorruptModel as error:
        return None, {name: [str(error)]}


def _findings_in_code(model: PreparedModel) -> list[str]:
    if model.manifest.factory is None and model.manifest.processing is None:
        return []
    from models import own  # noqa: PLC0415 - with torch, which nothing else here needs

    with contextlib.redirect_stdout(
        sys.stderr
    ):  # what the user's code prints is not ours to answer
        return list(own.findings(model.manifest))


def _whole(model: PreparedModel) -> dict[str, Any]:
    return model_facts(model) | {
        "converted from": ", ".join(model.manifest.found_dtypes),
        "labels": _labels(model),
        "factory": model.manifest.factory.target if model.manifest.factory else None,
        "processing": model.manifest.processing.target if model.manifest.processing else None,
        "folder": str(model.path),
    }


def _labels(model: PreparedModel) -> str:
    if not model.labels:
        return ""
    first = ", ".join(model.labels[:_SHOWN_LABELS])
    return f"{first}, ..." if len(model.labels) > _SHOWN_LABELS else first


def _print(
    weights: Path, shown: list[dict[str, Any]], faults: dict[str, list[str]], *, verify: bool
) -> None:
    console = _console()
    if not shown and not faults:
        console.print(f"no model is prepared in {weights}")
    elif shown and "contents" in shown[0]:
        _print_facts(console, shown[0])
        _print_rows(console, shown[0]["contents"], leave_out={"sha256"})
    elif shown:
        _print_rows(console, shown, leave_out=_ONE_MODEL_ONLY)
    for name, findings in faults.items():
        for finding in findings:
            console.print(f"{name}: {finding}")
    if verify and not faults:
        console.print(f"verified {', '.join(model['name'] for model in shown)}: no findings")


def _print_facts(console: Console, facts: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, value in facts.items():
        if title != "contents" and value is not None:
            table.add_row(_title(title), _cell(title, value))
    console.print(table)


def _print_rows(console: Console, rows: list[dict[str, Any]], leave_out: set[str]) -> None:
    table = Table(box=None, pad_edge=False)
    titles = [title for title in rows[0] if title not in leave_out]
    for title in titles:
        table.add_column(
            _title(title),
            justify="right" if isinstance(rows[0][title], int) else "left",
            no_wrap=title in {"name", "version"},
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(title, row[title]) for title in titles))
    console.print(table)


def _title(fact: str) -> str:
    return "size" if fact == "bytes" else fact


def _cell(fact: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{title} {_plain(part)}" for title, part in value.items())
    return decimal(int(str(value))) if fact == "bytes" else str(value)


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _console() -> Console:
    """As wide as the terminal; where there is none, lines are not cut."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _UNCUT_COLUMNS
    return console
