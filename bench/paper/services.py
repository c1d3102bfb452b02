"""One service for each setup and strategy, so that none has in its memory what another left there."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

import httpx

from bench import payload
from bench.http import Served
from bench.latency import HttpVariant
from bench.paper import stores
from bench.paper.choices import SETUPS, Run, Setup
from bench.paper.published import STRATEGIES

_TIMEOUT_S: Final = 600.0
_AT_ONCE: Final = 4
"""Services started at a time."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service that is asked for one strategy."""

    setup: Setup
    strategy: str
    client: httpx.Client

    def ask(self, model: str, request_id: str, strategy: str | None = None) -> float:
        """One request with a tensor in binary form; the client's time, milliseconds."""
        sent = payload.request("binary", model, stores.SIDE, None)
        variant = HttpVariant(
            name=self.strategy,
            format=self.setup.weight_format,
            granularity=self.setup.granularity,
            client=self.client,
            request=replace(sent, headers={**sent.headers, "X-Request-ID": request_id}),
            strategy=strategy or self.strategy,
        )
        return variant.run(b"")

    def shown(self, request_id: str) -> Mapping[str, Any]:
        """What the service says of a request: `GET /requests/{id}`."""
        answer = self.client.get(f"/requests/{quote(request_id, safe='')}")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def start(run: Run, stack: ExitStack) -> list[Service]:
    """All of them, several at a time: each takes seconds, and no measurement runs yet."""
    kinds = [(setup, strategy) for setup in SETUPS for strategy in STRATEGIES]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        served = list(pool.map(lambda kind: _started(run, kind[0], stack), kinds))
    return [
        Service(
            setup,
            strategy,
            stack.enter_context(httpx.Client(base_url=one.url, timeout=_TIMEOUT_S)),
        )
        for (setup, strategy), one in zip(kinds, served, strict=True)
    ]


def _started(run: Run, setup: Setup, stack: ExitStack) -> Served:
    return stack.enter_context(
        Served(stores.store(run, setup).root, queue=1, threads=run.choices.threads)
    )


def warm_up(services: Iterable[Service], models: Iterable[str]) -> None:
    """One request to each service for each model, under the quickest strategy.

    It brings the files into the page cache and the model's plan into the handler, which every strategy
    needs alike.
    """
    models = list(models)
    for service in services:
        for model in models:
            service.ask(model, "warm-up", "cicada")
