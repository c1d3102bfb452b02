"""Asks a service for its health, over and over, in a process of its own, and tells how quickly it answered."""

import argparse
import http.client
import json
import select
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import cycle
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from models.errors import ModelError

PATHS: Final = ("/v2/health/live", "/v2/health/ready")
_PAUSE_S: Final = 0.01
_ANSWER_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Health:
    """How many times health was asked for, and how long the answers took, in milliseconds."""

    n: int
    p50_ms: float
    slowest_ms: float


class Unhealthy(ModelError):
    """The service was found unhealthy under load."""


class HealthProbe:
    """The asking process, from entering to `stop`; a context manager."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.health", self._url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def stop(self) -> Health:
        """Raises Unhealthy if one of the answers was no 200, or did not come."""
        told, wrong = self._process.communicate(timeout=2 * _ANSWER_LIMIT_S)
        if self._process.returncode != 0:
            last_line = wrong.decode().strip().rpartition("\n")[2]
            raise Unhealthy(f"the service's health cannot be told: {last_line}")
        return Health(**json.loads(told))


def ask(url: str) -> Health:
    """Until standard input is closed; at least once."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_LIMIT_S)
    times_ms = []
    for path in cycle(PATHS):
        start = time.monotonic()
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        times_ms.append((time.monotonic() - start) * 1e3)
        if answer.status != 200:
            raise SystemExit(f"{path} was answered with {answer.status}")
        if select.select([sys.stdin], [], [], _PAUSE_S)[0]:
            break
    connection.close()
    return Health(len(times_ms), statistics.median(times_ms), max(times_ms))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.health")
    parser.add_argument("url")
    print(json.dumps(asdict(ask(parser.parse_args().url))))  # noqa: T201 to the process that asked


if __name__ == "__main__":
    main()
