"""Cancelling a request from the thread that hears that its caller has gone."""

import threading
from collections.abc import Callable


class Cancellation:
    """May be cancelled before or after there is something to stop; that is stopped once either way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._stop: Callable[[], None] | None = None

    def attach(self, stop: Callable[[], None]) -> None:
        with self._lock:
            self._stop = stop
            cancelled = self._cancelled
        if cancelled:
            stop()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            stop = self._stop
        if stop is not None:
            stop()
