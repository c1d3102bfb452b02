"""How the service fares: `/status` now, `/status/history` over the last ten minutes."""

import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version as distribution_version
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from runtime import limits
from runtime.answers import Json
from runtime.handler_process import End
from runtime.history import STEP_S, Sketch, Step
from runtime.pool import Place, State
from runtime.service import Service, service_of

_MINUTES = (1, 10)


class ShownHandler(BaseModel):
    """One place in the pool, and the handler process in it."""

    pid: int | None = Field(description="null while there is none.")
    state: State
    for_s: float = Field(description="How long it has been in that state, in seconds.")
    request: str | None = Field(description="The id of the request that it works on.")
    done: int = Field(description="Requests that this process was given and ended.")
    memory_bytes: int | None = Field(description="Its private memory; file pages are not in it.")


class ShownEnd(BaseModel):
    at: datetime
    pid: int | None
    cause: str
    sentence: str


class Queue(BaseModel):
    waiting: int
    limit: int


class Memory(BaseModel):
    used_bytes: int | None = Field(
        description="What the container uses, without file pages that can be dropped."
    )
    limit_bytes: int | None
    reserved_bytes: int = Field(description="What the requests under way were granted.")


class Recent(BaseModel):
    """Inference requests of the last minutes; percentiles are of `total`, of those answered."""

    minutes: Literal[1, 10]
    answered: int
    refused: int = Field(description="Answered with 4xx.")
    failed: int = Field(description="Answered with 5xx.")
    per_second: float = Field(description="All of them, on average since the service runs.")
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class Status(BaseModel):
    version: str
    at: datetime
    up_s: float
    ready: bool
    why_not_ready: str | None
    cpus: float
    handlers: list[ShownHandler]
    ended: list[ShownEnd] = Field(description="The last handlers that ended, the latest first.")
    queue: Queue
    memory: Memory
    recent: list[Recent]


class ShownStep(BaseModel):
    at: datetime = Field(description="Its start.")
    answered: int
    refused: int
    failed: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    waiting: int | None = Field(description="Requests that waited for a handler at its end.")
    working: int | None
    memory_bytes: int | None


class ShownHistory(BaseModel):
    step_s: int
    steps: list[ShownStep] = Field(
        description="The oldest first; the last is not over; what is not known is null."
    )


router = APIRouter(prefix="/status", tags=["status"])


@router.get("", response_model=Status, summary="Handlers, queue, memory, and the last minutes")
async def show_status(request: Request) -> Json:
    service = service_of(request)
    reason = service.why_not_ready()
    pool = service.pool
    status = {
        "version": distribution_version("cicada-serverless"),
        "at": datetime.now(UTC),
        "up_s": service.up_s,
        "ready": reason is None,
        "why_not_ready": reason,
        "cpus": service.has.cpus,
        "handlers": [_handler(place) for place in pool.places],
        "ended": [_end(at, end) for at, end in reversed(pool.ended)],
        "queue": {"waiting": pool.waiting, "limit": service.settings.queue},
        "memory": {
            "used_bytes": limits.memory_used(),
            "limit_bytes": service.has.memory_bytes,
            "reserved_bytes": pool.reserved_bytes,
        },
        "recent": [_recent(service, minutes) for minutes in _MINUTES],
    }
    return Json(status)


@router.get(
    "/history",
    response_model=ShownHistory,
    summary="Requests, latencies, queue and memory of the last ten minutes, in steps of five seconds",
)
async def show_history(request: Request) -> Json:
    service = service_of(request)
    service.sample()
    offset = datetime.now(UTC) - timedelta(seconds=time.monotonic())
    steps = [_step(step, offset) for step in service.history.steps()]
    return Json({"step_s": STEP_S, "steps": steps})


def _handler(place: Place) -> dict[str, Any]:
    return {
        "pid": place.pid,
        "state": place.state,
        "for_s": time.monotonic() - place.since_s,
        "request": place.request,
        "done": place.done,
        "memory_bytes": None if place.pid is None else limits.private_memory(place.pid),
    }


def _end(at: datetime, end: End) -> dict[str, Any]:
    return {"at": at, "pid": end.pid, "cause": end.cause, "sentence": end.sentence}


def _recent(service: Service, minutes: int) -> dict[str, Any]:
    steps = list(service.history.steps(minutes * 60))
    counts = {
        name: sum(getattr(step, name) for step in steps)
        for name in ("answered", "refused", "failed")
    }
    return {
        "minutes": minutes,
        **counts,
        "per_second": sum(counts.values()) / max(1.0, min(minutes * 60, service.up_s)),
        **_percentiles(Sketch(step.totals for step in steps)),
    }


def _step(step: Step, offset: datetime) -> dict[str, Any]:
    use = step.use
    return {
        "at": offset + timedelta(seconds=step.start_s),
        "answered": step.answered,
        "refused": step.refused,
        "failed": step.failed,
        **_percentiles(step.totals),
        "waiting": use.waiting if use else None,
        "working": use.working if use else None,
        "memory_bytes": use.memory_bytes if use else None,
    }


def _percentiles(totals: Sketch) -> dict[str, float | None]:
    return {f"p{percent}_ms": totals.percentile(percent) for percent in (50, 95, 99)}
