# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging

from tests.support.remote import Remote
from war_rl.config import SpecConfig
from war_rl.trainers.verl.feed import FeedPublisher
from war_rl.types import FeedItem, TrajectoryId, as_tokens, decode_feed


class Server:
    def __init__(self, hold: asyncio.Event | None = None, error: Exception | None = None):
        self.got: list[FeedItem] = []
        self._hold, self._error = hold, error
        self.war_feed = Remote(self._war_feed)

    async def _war_feed(self, blob):
        if self._error:
            raise self._error
        self.got += decode_feed(blob)
        if self._hold:
            await self._hold.wait()


def told(servers):
    """What the link to the router knows of the servers; an exception is raised."""

    async def now():
        if isinstance(servers, Exception):
            raise servers
        return servers

    return now


def item(n: int, start: int = 0, session: int = 0) -> FeedItem:
    return FeedItem(TrajectoryId("g", session, 1), start, as_tokens(range(start, start + n)))


def config(**kwargs) -> SpecConfig:
    return SpecConfig(**{"feed_interval_ms": 1.0, **kwargs})


async def until(condition):
    """Wait for the sender to get there, however slow the machine; a condition that never comes fails the test."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the feed did not get there in 10 s")


async def settle(feed):
    """Nothing is left to be sent."""
    await until(lambda: feed._sender is None or feed._sender.done())


def test_every_replica_gets_everything_in_order():
    async def main():
        servers = {"a": Server(), "b": Server()}
        feed = FeedPublisher(told(servers), config())
        for start in (0, 5, 10):
            feed.publish(item(5, start))
        await settle(feed)
        for server in servers.values():
            assert [i.start for i in server.got] == [0, 5, 10]
        assert feed.counters["feed_tokens"] == 15

    asyncio.run(main())


def test_a_busy_replica_gets_everything_later_and_holds_nobody_up():
    async def main():
        hold = asyncio.Event()
        slow, fast = Server(hold), Server()
        feed = FeedPublisher(told({"slow": slow, "fast": fast}), config())
        for n, start in enumerate((0, 5, 10), 1):
            feed.publish(item(5, start))
            await until(lambda n=n: len(fast.got) == n)
        assert [i.start for i in fast.got] == [0, 5, 10]
        assert [i.start for i in slow.got] == [0]
        hold.set()
        await settle(feed)
        assert [i.start for i in slow.got] == [0, 5, 10]
        assert feed.counters["feed_dropped_tokens"] == 0
        assert feed._bytes == 0

    asyncio.run(main())


def test_a_replica_that_never_answers_cannot_fill_the_memory():
    async def main():
        slow, fast = Server(asyncio.Event()), Server()
        feed = FeedPublisher(told({"slow": slow, "fast": fast}), config(feed_max_mb=1), share=lambda b: b)
        for session in range(6):
            feed.publish(item(100_000, session=session))
            await until(lambda session=session: len(fast.got) == session + 1)
        assert [i.trajectory.session for i in fast.got] == list(range(6))
        assert feed._bytes <= 1 << 20
        assert feed.counters["feed_dropped_tokens"] > 0

    asyncio.run(main())


def test_what_waits_is_bounded_and_the_oldest_goes_first():
    async def main():
        server, other, shared = Server(), Server(), []
        share = lambda blob: shared.append(blob) or blob  # noqa: E731
        feed = FeedPublisher(told({"a": server, "b": other}), config(feed_max_mb=1), share=share)
        big = 200_000  # 0.8 MB of int32
        feed.publish(item(big))
        feed.publish(item(big, session=1))
        await settle(feed)
        assert [i.trajectory.session for i in server.got] == [1]
        assert feed.counters["feed_dropped_tokens"] == big
        # A large message is put into the object store once for all replicas.
        assert len(shared) == 1

    asyncio.run(main())


def test_errors_are_counted_and_said_once(caplog):
    async def main():
        feed = FeedPublisher(told(RuntimeError("router is gone")), config())
        with caplog.at_level(logging.WARNING):
            for start in (0, 5):
                feed.publish(item(5, start))
                await settle(feed)
        assert feed.counters["feed_errors"] == 2
        assert [r for r in caplog.text.splitlines() if "router is gone" in r].__len__() == 1

    asyncio.run(main())


def test_switched_off_it_sends_nothing():
    async def main():
        for off in (config(feed=False), config(policy="off")):
            server = Server()
            feed = FeedPublisher(told({"a": server}), off)
            feed.publish(item(5))
            await settle(feed)
            assert not server.got
            assert feed.counters["feed_items"] == 0

    asyncio.run(main())


def test_flush_returns_when_everything_has_arrived():
    async def main():
        hold = asyncio.Event()
        slow, fast = Server(hold=hold), Server()
        publisher = FeedPublisher(told({"slow": slow, "fast": fast}), config())
        await publisher.flush()
        publisher.publish(item(5))
        publisher.publish(item(3, start=5))
        flushed = asyncio.ensure_future(publisher.flush())
        await until(lambda: sum(len(i.tokens) for i in fast.got) == 8)
        assert not flushed.done()
        hold.set()
        await flushed
        assert sum(len(i.tokens) for i in slow.got) == sum(len(i.tokens) for i in fast.got) == 8

    asyncio.run(main())


def test_nothing_is_kept_where_no_replica_can_draft():
    async def main():
        publisher = FeedPublisher(told({}), config(replicas="none"))
        publisher.publish(item(10))
        assert publisher.counters["feed_items"] == 0

    asyncio.run(main())
