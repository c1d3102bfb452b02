"""A cancellation that comes before, after or while there is something to stop."""

import threading

from handler.cancellation import Cancellation


def test_it_stops_what_is_attached() -> None:
    stops: list[int] = []
    cancellation = Cancellation()
    cancellation.attach(lambda: stops.append(1))
    assert stops == []
    cancellation.cancel()
    assert stops == [1]


def test_it_stops_what_is_attached_later() -> None:
    stops: list[int] = []
    cancellation = Cancellation()
    cancellation.cancel()
    cancellation.attach(lambda: stops.append(1))
    assert stops == [1]


def test_with_nothing_to_stop_it_does_nothing() -> None:
    Cancellation().cancel()


def test_whoever_comes_first_it_stops_once() -> None:
    for _ in range(200):
        stops: list[int] = []
        cancellation, together = Cancellation(), threading.Barrier(2)

        def cancel(cancellation: Cancellation, together: threading.Barrier) -> None:
            together.wait(20)
            cancellation.cancel()

        canceller = threading.Thread(target=cancel, args=(cancellation, together))
        canceller.start()
        together.wait(20)
        cancellation.attach(lambda stops=stops: stops.append(1))  # type: ignore[misc]
        canceller.join(20)
        assert stops == [1]
