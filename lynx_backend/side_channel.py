"""Drafts on their way to whoever wants to show them, beside what an engine says for certain.

An engine publishes, a proxy listens. A message that nobody hears in time is lost, and nothing else:
what is verified comes through the engine's own answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq
import zmq.asyncio

from .errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_WAITING = 10_000


class Said(Enum):
    """What an engine says about a request's drafts."""

    #: these tokens come after those drafted so far
    DRAFTED = "drafted"
    #: the first ``count`` of the drafts are right, the others are taken back
    VERIFIED = "verified"
    #: all drafts are taken back
    DROPPED = "dropped"


@dataclass(frozen=True)
class News:
    """One message.

    Attributes:
        tag: the request, as whoever asked for its drafts calls it.
        tokens: newly drafted ones.
        count: drafts that verification kept.
        heard: monotonic seconds of its arrival here.
    """

    tag: str
    said: Said
    tokens: tuple[int, ...] = ()
    count: int = 0
    heard: float = field(default=0.0, compare=False)


class Publisher:
    """An engine's end. Never waits and never raises afterwards.

    Args:
        address: of the listener, such as ``tcp://127.0.0.1:5570``. It may start later.

    Raises:
        ConfigError: it is no such address.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as e:
            raise ConfigError(f"drafts cannot be published to {address!r}: {e}") from e

    def say(self, tag: str, said: Said, tokens: Sequence[int] = (), count: int = 0) -> None:
        """Tell whoever listens about the drafts of request ``tag``."""
        body = {"tag": tag, "said": said.value, "tokens": [*tokens], "count": count}
        try:
            self._socket.send(json.dumps(body).encode(), zmq.NOBLOCK)
        except zmq.ZMQError as e:  # as if nobody had heard it
            logger.debug("a draft was not published: %s", e)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """A proxy's end: hears all engines that publish to its address.

    Args:
        address: to listen at, such as ``tcp://127.0.0.1:5570``.

    Raises:
        ConfigError: one cannot listen there.
    """

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._queues: dict[str, asyncio.Queue[News]] = {}
        try:
            self._socket.bind(address)
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot listen for drafts at {address!r}: {e}") from e

    async def run(self) -> None:
        """Give out what is heard, until cancelled."""
        while True:
            news = _parsed(await self._socket.recv())
            if news is not None and news.tag in self._queues:
                self._queues[news.tag].put_nowait(news)

    @contextmanager
    def following(self, tag: str) -> Iterator[asyncio.Queue[News]]:
        """What is said about one request, while this lasts."""
        queue = self._queues[tag] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._queues[tag]

    def close(self) -> None:
        self._socket.close()


def _parsed(data: bytes) -> News | None:
    """A message, or None for what is none: anybody may connect."""
    try:
        body = json.loads(data)
        tokens = tuple(int(token) for token in body["tokens"])
        tag, said, count = str(body["tag"]), Said(body["said"]), int(body["count"])
        return News(tag, said, tokens, count, time.monotonic())
    except (ValueError, KeyError, TypeError):
        return None
