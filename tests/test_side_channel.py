from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

pytest.importorskip("zmq", reason="the side channel needs pyzmq")

from lynx_backend.errors import ConfigError
from lynx_backend.side_channel import Listener, News, Publisher, Said

WAIT = 30.0


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"


def test_each_follower_hears_of_its_own_request_from_all_engines():
    async def scene() -> list[list[News]]:
        address = free_address()
        engines = [Publisher(address), Publisher(address)]  # before anybody listens
        listener = Listener(address)
        running = asyncio.create_task(listener.run())
        heard: list[list[News]] = []
        with listener.following("a") as a, listener.following("b") as b:
            for engine, tag, queue in zip(engines, "ab", (a, b), strict=True):
                while queue.empty():  # until it is connected
                    engine.say(tag, Said.DROPPED)
                    await asyncio.sleep(0.02)
                engine.say("nobody", Said.DRAFTED, [1])
                engine.say(tag, Said.DRAFTED, [5, 6])
                engine.say(tag, Said.VERIFIED, count=1)
                news = [await asyncio.wait_for(queue.get(), WAIT)]
                while news[-1].said is not Said.VERIFIED:
                    news.append(await asyncio.wait_for(queue.get(), WAIT))
                heard.append([each for each in news if each.said is not Said.DROPPED])
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        listener.close()
        for engine in engines:
            engine.close()
        return heard

    heard = asyncio.run(scene())
    for tag, news in zip("ab", heard, strict=True):
        assert news == [News(tag, Said.DRAFTED, (5, 6)), News(tag, Said.VERIFIED, count=1)]


def test_what_is_no_message_is_ignored():
    import zmq

    async def scene() -> News:
        address = free_address()
        listener = Listener(address)
        running = asyncio.create_task(listener.run())
        stranger = zmq.Context.instance().socket(zmq.PUB)
        stranger.connect(address)
        engine = Publisher(address)
        with listener.following("a") as queue:
            while queue.empty():
                for junk in (b"", b"\xff", b"[]", b'{"tag": "a"}', b'{"tag":"a","said":"x"}'):
                    stranger.send(junk)
                engine.say("a", Said.DRAFTED, [3])
                await asyncio.sleep(0.02)
            assert not running.done()
            found = queue.get_nowait()
        running.cancel()
        listener.close()
        engine.close()
        stranger.close(0)
        return found

    assert asyncio.run(scene()) == News("a", Said.DRAFTED, (3,))


@pytest.mark.parametrize("address", ["nowhere", "tcp://", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_refused(address: str):
    with pytest.raises(ConfigError, match="drafts"):
        Publisher(address)
    with pytest.raises(ConfigError, match="drafts"):
        Listener(address)
