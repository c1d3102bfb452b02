"""A unit's thread: tasks in turn, on one thread, nothing of them kept."""

import functools
import threading
import weakref

from handler.unit import UnitThread


def test_tasks_run_in_turn_on_one_thread_after_its_start() -> None:
    ran: list[tuple[str, int]] = []

    def note(what: str) -> None:
        ran.append((what, threading.get_ident()))

    unit = UnitThread("unit", on_start=lambda: note("start"))
    tasks = [unit.submit(lambda number=number: note(str(number))) for number in range(3)]  # type: ignore[misc]
    for task in tasks:
        task.join()
        task.join()  # may be asked again
    unit.close()

    assert [what for what, _ in ran] == ["start", "0", "1", "2"]
    assert {thread for _, thread in ran} != {threading.get_ident()}
    assert len({thread for _, thread in ran}) == 1


def test_join_waits_for_the_tasks_end() -> None:
    go, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert go.wait(20)
        ended.set()

    unit = UnitThread("unit", on_start=lambda: None)
    task = unit.submit(work)
    threading.Timer(0.01, go.set).start()
    task.join()
    assert ended.is_set()
    unit.close()


def test_closing_runs_what_was_given_and_ends_the_thread() -> None:
    ran: list[int] = []
    unit = UnitThread("to be closed", on_start=lambda: None)
    unit.submit(lambda: ran.append(1))
    unit.close()
    assert ran == [1]
    assert "to be closed" not in {thread.name for thread in threading.enumerate()}


def test_what_a_task_worked_on_is_let_go_when_it_has_run() -> None:
    class Weights:
        pass

    def work(weights: Weights) -> None:
        assert alive() is weights

    weights = Weights()
    alive = weakref.ref(weights)
    unit = UnitThread("unit", on_start=lambda: None)
    task = unit.submit(functools.partial(work, weights))
    del weights
    task.join()
    unit.submit(lambda: None).join()  # the thread has come back for the next
    assert alive() is None
    unit.close()


def test_a_thread_rests_once_it_had_nothing_to_do_and_not_before_its_first_task() -> None:
    rested = threading.Semaphore(0)
    thread = UnitThread("unit", on_start=lambda: None, on_rest=rested.release, rest_s=0.05)
    try:
        thread.submit(lambda: None).join()
        assert rested.acquire(timeout=10)
        assert not rested.acquire(timeout=0.3), "once"
        thread.submit(lambda: None).join()
        assert rested.acquire(timeout=10)
    finally:
        thread.close()
