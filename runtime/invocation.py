"""`cicada invoke`: one image to a running service; its labels, and where the time went."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import http_sf
import httpx
from rich.console import Console
from rich.table import Table

from handler.timeline import UNITS
from runtime import gantt

_CONNECT_S: Final = 5.0


class _InvocationError(Exception):
    """What to tell the person at the terminal."""


def invoke(
    image: Path,
    *,
    model: str | None,
    strategy: str | None,
    url: str | None,
    top: int,
    api_key: str | None = None,
    timeline: bool = False,
) -> None:
    """Prints the answer's labels and timing headers as tables; exits with 1 and a sentence on failure.

    timeline: also draws the request's Gantt chart.
    """
    try:
        service = (url or _local_url()).rstrip("/")
        known = {} if api_key is None else {"X-API-Key": api_key}
        response = _post(image, model, strategy, service, top, known)
        drawn = _timeline(service, response.headers["X-Request-ID"], known) if timeline else None
    except _InvocationError as error:
        sys.exit(f"cicada: {error}")
    console = Console()
    console.print(_labels(response.json()))
    console.print(_times(response.headers))
    console.print(_units(response.headers))
    console.print(_summary(response.headers))
    if drawn is not None:
        console.print(gantt.chart(drawn, max(20, console.width - 10)))


def _local_url() -> str:
    from runtime.settings import Settings, SettingsError  # noqa: PLC0415 only if no URL is given

    try:
        return f"http://127.0.0.1:{Settings().port}"
    except SettingsError as error:
        raise _InvocationError(str(error)) from None


def _post(
    image: Path,
    model: str | None,
    strategy: str | None,
    url: str,
    top: int,
    known: Mapping[str, str],
) -> httpx.Response:
    path = "/invocations" if model is None else f"/predictions/{quote(model, safe='')}"
    headers = {"Content-Type": "application/octet-stream", **known}
    if strategy is not None:
        headers["Cicada-Strategy"] = strategy
    try:
        response = httpx.post(
            url + path,
            params={"top": top},
            headers=headers,
            content=image.read_bytes(),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )
    except OSError as error:
        raise _InvocationError(f"{image}: {error.strerror or error}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _InvocationError(f"{url} does not answer: {error}") from None
    if not response.is_success:
        raise _InvocationError(_sentence(response))
    return response


def _timeline(url: str, request_id: str, known: Mapping[str, str]) -> dict[str, Any]:
    try:
        response = httpx.get(f"{url}/requests/{request_id}", headers=known, timeout=_CONNECT_S)
    except httpx.HTTPError as error:
        raise _InvocationError(f"{url} does not answer: {error}") from None
    if not response.is_success:
        raise _InvocationError(_sentence(response))
    found: dict[str, Any] = response.json()
    return found


def _sentence(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"


def _labels(predictions: list[dict[str, Any]]) -> Table:
    table = Table("label", "index")
    table.add_column("probability", justify="right")
    for prediction in predictions:
        probability = prediction["probability"]
        shown = "not finite" if probability is None else f"{probability:.4f}"
        table.add_row(prediction["label"], str(prediction["index"]), shown)
    return table


def _times(headers: Mapping[str, str]) -> Table:
    table = Table("time")
    table.add_column("ms", justify="right")
    for name, parameters in _structure(headers, "Server-Timing", "list"):
        table.add_row(str(name), f"{parameters['dur']:.1f}")
    return table


def _units(headers: Mapping[str, str]) -> Table:
    table = Table("unit")
    columns = ("work", "wait", "idle")
    for column in columns:
        table.add_column(f"{column} ms", justify="right")
    times = [_structure(headers, f"Cicada-{column.title()}", "dictionary") for column in columns]
    for unit in UNITS:
        table.add_row(unit, *(f"{_bare(time[unit]):.1f}" for time in times))
    return table


def _summary(headers: Mapping[str, str]) -> Table:
    table = Table(show_header=False)
    for name in ("Model", "Version", "Strategy", "Layers", "Utilization", "Occupancy"):
        table.add_row(name.lower(), headers[f"Cicada-{name}"])
    placeholder = _structure(headers, "Cicada-Placeholder", "dictionary")
    table.add_row("placeholder bytes", f"{_bare(placeholder['bytes']):,}")
    table.add_row("placeholder usage", f"{_bare(placeholder['usage']):.1f} ms")
    table.add_row("request", headers["X-Request-ID"])
    return table


def _structure(headers: Mapping[str, str], name: str, kind: str) -> Any:
    """A structured field (RFC 9651); an absent one is empty."""
    return http_sf.parse(headers.get(name, "").encode(), tltype=kind)


def _bare(item: Any) -> Any:
    """An item without its parameters."""
    return item[0] if isinstance(item, tuple) else item
