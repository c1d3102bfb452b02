"""The feed: everyone who follows it has everything, in order, at its own pace, and nobody keeps it open."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime import events
from runtime.events import KEPT, Event, Feed
from runtime.handler_process import End
from runtime.requests import Record

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def publish(feed: Feed, *names: str) -> None:
    for name in names:
        feed.request_ended(Record(name))


async def ids(feed: Feed, after: int, seconds: float | None = 0.01) -> list[str]:
    return [event.tell()["id"] async for event in feed.follow(after, seconds) if event]


async def test_a_follower_has_what_it_asked_for_of_the_past_and_all_that_follows() -> None:
    feed = Feed()
    publish(feed, "a", "b", "c")
    following = asyncio.create_task(ids(feed, feed.start(None, 2), None))
    await asyncio.sleep(0)
    publish(feed, "d")
    await asyncio.sleep(0)
    publish(feed, "e")
    feed.close()
    assert await following == ["b", "c", "d", "e"]


async def test_a_follower_that_comes_back_goes_on_where_it_was() -> None:
    feed = Feed()
    publish(feed, "a", "b", "c")
    had = [event async for event in feed.follow(0, 0.01) if event]
    assert await ids(feed, feed.start(feed.id_of(had[1]), 0)) == ["c"]
    assert await ids(feed, feed.start(feed.id_of(had[2]), 3)) == []


@pytest.mark.parametrize("last_id", ["", "x", "12345678-1", "-1", "{run}-", "{run}--1", "{run}-²"])
async def test_an_id_that_is_none_of_this_run_means_nothing(last_id: str) -> None:
    feed = Feed()
    publish(feed, "a", "b")
    run, _, _ = feed.id_of(Event(1, "request", dict)).partition("-")
    assert await ids(feed, feed.start(last_id.replace("{run}", run), 1)) == ["b"]


async def test_an_id_from_the_future_is_the_last_there_was() -> None:
    feed = Feed()
    publish(feed, "a")
    event = Event(10**9, "request", dict)
    start = feed.start(feed.id_of(event), 0)
    publish(feed, "b")
    assert await ids(feed, start) == ["b"]


async def test_one_that_takes_nothing_costs_nothing_and_misses_what_is_too_old() -> None:
    feed = Feed()
    slow = feed.follow(0, None)
    publish(feed, "first")
    assert await told(slow) == "first"
    publish(feed, *(str(number) for number in range(2 * KEPT)))
    assert await told(slow) == str(KEPT)


async def told(following: AsyncIterator[Event | None]) -> str | None:
    event = await anext(following)
    return None if event is None else str(event.tell()["id"])


async def test_silence_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SILENCE_S", 0.01)
    feed = Feed()
    following = feed.follow(0, None)
    assert await told(following) is None
    publish(feed, "a")
    assert await told(following) == "a"


async def test_a_closed_feed_gives_what_there_is_and_ends() -> None:
    feed = Feed()
    publish(feed, "a")
    feed.close()
    assert await ids(feed, 0, None) == ["a"]


async def test_handlers_come_and_go() -> None:
    feed = Feed()
    feed.handler_ready(7)
    feed.handler_ended(End("SIGKILL", "was killed by SIGKILL", 7))
    said = [event.tell() async for event in feed.follow(0, 0.01) if event]
    assert [(each["pid"], each["state"], each["cause"], each["sentence"]) for each in said] == [
        (7, "ready", None, None),
        (7, "ended", "SIGKILL", "was killed by SIGKILL"),
    ]
