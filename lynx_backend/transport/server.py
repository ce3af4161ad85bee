"""Offers a source of objects to other nodes over UCX."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .. import metrics
from ..errors import LynxError, TransportError
from ..keys import ObjectName
from ..logs import warn_limited
from . import protocol
from .base import ObjectSource
from .connection import Connection
from .greeting import UCX_UNREACHABLE, LinkOptions, greet
from .loop import LoopThread
from .protocol import NODE_BYTES, End, Kind, Request
from .sender import Sender
from .stream import FrameStream
from .ucx import Channel

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
MOST_CONNECTIONS = 256
_MOST_LOOKUPS = 64

#: Keeps an object that a peer put; whether it was kept.
Sink = Callable[[ObjectName, memoryview], bool]


class UcxServer:
    """Sends objects of ``source`` to the peers that ask for them, anchors first.

    Listens when made. One thread talks to all peers; one reads objects, one looks them up, one
    keeps what peers put.

    Args:
        source: where the objects are. Not closed by this server.
        host: address to listen on.
        port: 0 for any free one.
        sink: keeps what peers put; without one, puts are refused.
        most_put_bytes: of all unfinished puts together; a put beyond is refused.

    Raises:
        TransportError: the address cannot be listened on.
    """

    def __init__(
        self,
        source: ObjectSource,
        host: str = "127.0.0.1",
        port: int = 0,
        options: LinkOptions | None = None,
        sink: Sink | None = None,
        most_put_bytes: int = 256 << 20,
    ) -> None:
        self.node = os.urandom(NODE_BYTES)
        self._source, self._sink = source, sink
        self._options = options or LinkOptions()
        self._most_put_bytes, self._put_bytes = most_put_bytes, 0
        self._peers: dict[Connection, _Peer] = {}
        self._greeting: dict[FrameStream, asyncio.Task[None]] = {}
        self._draining = self._closed = False
        self._reader, self._looker, self._keeper = (
            ThreadPoolExecutor(1, f"lynx-serve-{what}") for what in ("read", "lookup", "keep")
        )
        self._thread = LoopThread("lynx-ucx-server")
        try:
            self.address = self._thread.wait(self._listen(host, port), CLOSE_SECONDS)
        except (OSError, OverflowError, UnicodeError) as e:  # no port, no name of a host
            self.close()
            raise TransportError(f"cannot listen on {host}:{port}: {e}") from e

    @property
    def peers(self) -> int:
        """Connections that have been greeted."""
        return len(self._peers)

    def drain(self, seconds: float) -> bool:
        """Take no new connections and requests, finish what was asked; whether all was finished."""
        return self._thread.wait(self._drain(seconds), seconds + CLOSE_SECONDS)

    def close(self) -> None:
        """Give everything up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._thread.wait(self._shut(), CLOSE_SECONDS)
        self._thread.stop(CLOSE_SECONDS)
        # A source that hangs keeps its thread longer than this.
        for pool in (self._reader, self._looker, self._keeper):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- in the thread -----------------------------------------------------------------------------

    async def _listen(self, host: str, port: int) -> tuple[str, int]:
        self._sender = Sender(self._source.get, self._reader)
        self._pump = asyncio.get_running_loop().create_task(self._sender.run())
        self._pump.add_done_callback(self._pump_ended)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: FrameStream(self._arrived), host, port)
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    def _pump_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("sending to peers has ended", exc_info=task.exception())
            for connection in list(self._peers):
                connection.abort(TransportError("this node cannot send any more"))

    def _arrived(self, stream: FrameStream) -> None:
        task = asyncio.get_running_loop().create_task(self._accept(stream))
        self._greeting[stream] = task

    async def _accept(self, stream: FrameStream) -> None:
        name = stream.remote
        why = f"it did not greet within {self._options.timeout_seconds:g} s"
        try:
            if self._draining or len(self._peers) + len(self._greeting) > MOST_CONNECTIONS:
                busy = "draining" if self._draining else f"busy with {MOST_CONNECTIONS} peers"
                stream.write(protocol.pack_text(Kind.REFUSED, f"the node is {busy}"))
                raise TransportError(busy)

            def opened() -> Channel:
                nonlocal why
                why = UCX_UNREACHABLE
                return Channel(stream.local_host)

            greeting = greet(stream, "server", self.node, self._options, opened)
            known = await asyncio.wait_for(greeting, self._options.timeout_seconds)
        except (TransportError, asyncio.TimeoutError) as e:
            metrics.ERRORS.labels("PeerRefused").inc()
            if isinstance(e, asyncio.TimeoutError):
                stream.write(protocol.pack_text(Kind.REFUSED, why))
            else:
                why = str(e)
            warn_limited(logger, "peer-refused", "refused a peer at %s: %s", name, why)
            stream.close()
            return
        finally:
            del self._greeting[stream]
        connection = Connection(stream, known, self._options)
        connection.handle = partial(self._handle, connection)
        connection.closed = partial(self._gone, connection, name)
        self._peers[connection] = _Peer()
        self._sender.add(connection)
        metrics.PEER_CONNECTIONS.set(len(self._peers))
        connection.start()
        if self._closed:
            connection.abort(TransportError("this node was closed"))

    def _gone(self, connection: Connection, name: str, error: TransportError) -> None:
        self._sender.remove(connection)
        peer = self._peers.pop(connection)
        for id_ in list(peer.puts):
            self._free(peer, id_)
        metrics.PEER_CONNECTIONS.set(len(self._peers))
        logger.info("peer at %s left: %s", name, error)

    def _handle(self, connection: Connection, kind: Kind, payload: bytes) -> None:
        if kind == Kind.LOOKUP:
            self._look_up(connection, *protocol.unpack_lookup(payload))
        elif kind == Kind.FETCH:
            self._fetch(connection, Request.unpack(payload))
        elif kind == Kind.PUT:
            self._put(connection, Request.unpack(payload))
        elif kind == Kind.CANCEL:
            self._cancel(connection, protocol.unpack_id(payload))
        else:
            raise TransportError(f"a client does not send {kind.name}")

    # -- lookups -----------------------------------------------------------------------------------

    def _look_up(self, connection: Connection, id_: int, names: list[ObjectName]) -> None:
        peer = self._peers[connection]
        if peer.lookups >= _MOST_LOOKUPS or self._draining:
            connection.write(protocol.pack_end(id_, End.REFUSED, "too many lookups, or draining"))
            return
        peer.lookups += 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._looker, self._source.sizes, names)
        future.add_done_callback(partial(self._looked_up, connection, peer, id_))

    @staticmethod
    def _looked_up(
        connection: Connection, peer: _Peer, id_: int, future: asyncio.Future[Sequence[int | None]]
    ) -> None:
        peer.lookups -= 1
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            connection.write(protocol.pack_end(id_, End.FAILED, text))
        else:
            connection.write(protocol.pack_sizes(id_, future.result()))

    # -- fetches -----------------------------------------------------------------------------------

    def _fetch(self, connection: Connection, request: Request) -> None:
        too_large = request.size > self._options.most_object_bytes
        if self._draining or too_large or self._full(connection):
            why = "draining" if self._draining else "object too large" if too_large else "too many"
            connection.write(protocol.pack_end(request.id, End.REFUSED, why))
        elif not self._sender.offer(connection, request, None, partial(self._ended, connection)):
            raise TransportError("a client asks for an object twice in one request")

    def _full(self, connection: Connection) -> bool:
        return self._sender.open(connection) >= self._options.most_open

    @staticmethod
    def _ended(connection: Connection, id_: int, end: End, why: str) -> None:
        connection.write(protocol.pack_end(id_, end, why))

    def _cancel(self, connection: Connection, id_: int) -> None:
        peer = self._peers[connection]
        if id_ in peer.puts:
            # What has begun to arrive keeps its buffer, and counts, until it is there.
            connection.give_up(id_, partial(self._free, peer, id_))
            connection.forget(id_)
        elif not self._sender.withdraw(connection, id_):
            return  # all of it is announced: the client knows by that
        connection.write(protocol.pack_end(id_, End.CANCELLED))

    # -- puts --------------------------------------------------------------------------------------

    def _put(self, connection: Connection, request: Request) -> None:
        peer = self._peers[connection]
        if request.id in peer.puts:
            raise TransportError("a client puts an object twice")
        room = self._most_put_bytes - self._put_bytes
        refusal = (
            "this node takes no puts"
            if self._sink is None
            else "draining"
            if self._draining
            else f"no room for {request.size} bytes now"
            if request.size > min(room, self._options.most_object_bytes)
            or len(peer.puts) + peer.keeping >= self._options.most_open
            else None
        )
        if refusal is not None:
            connection.write(protocol.pack_end(request.id, End.REFUSED, refusal))
            return
        peer.puts[request.id] = request.size
        self._put_bytes += request.size
        buffer = memoryview(bytearray(request.size))
        done = partial(self._keep, connection, request, buffer)
        connection.expect(request.id, request.size, buffer, done)
        connection.write(protocol.pack_id(Kind.READY, request.id))

    def _keep(self, connection: Connection, request: Request, data: memoryview) -> None:
        assert self._sink is not None
        # Its bytes are counted until it is kept, also when the client cancels it or leaves.
        peer = self._peers[connection]
        del peer.puts[request.id]
        peer.keeping += 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._keeper, self._sink, request.name, data.toreadonly())
        future.add_done_callback(partial(self._kept, connection, peer, request))

    def _kept(
        self, connection: Connection, peer: _Peer, request: Request, future: asyncio.Future[bool]
    ) -> None:
        peer.keeping -= 1
        self._put_bytes -= request.size
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, LynxError):
                logger.error("keeping %s failed", request.name, exc_info=error)
            connection.write(protocol.pack_end(request.id, End.FAILED, why))
        else:
            end = End.STORED if future.result() else End.REFUSED
            connection.write(protocol.pack_end(request.id, end))

    def _free(self, peer: _Peer, id_: int) -> None:
        self._put_bytes -= peer.puts.pop(id_)

    # -- the end -----------------------------------------------------------------------------------

    async def _drain(self, seconds: float) -> bool:
        self._draining = True
        self._server.close()
        until = time.monotonic() + seconds
        while busy := any(self._busy(c, p) for c, p in self._peers.items()):
            if time.monotonic() >= until:
                break
            await asyncio.sleep(0.01)
        return not busy

    def _busy(self, connection: Connection, peer: _Peer) -> bool:
        sending = self._sender.open(connection) or connection.window.messages
        return bool(sending or peer.puts or peer.keeping or peer.lookups)

    async def _shut(self) -> None:
        self._draining = True
        if hasattr(self, "_server"):
            self._server.close()
            self._pump.cancel()
        for stream in self._greeting:
            stream.abort()
        for connection in list(self._peers):
            connection.abort(TransportError("this node was closed"))
        while self._peers or self._greeting:
            await asyncio.sleep(0.005)


class _Peer:
    """What one peer has under way."""

    def __init__(self) -> None:
        self.lookups = 0
        #: bytes of each put that has not come yet, and how many have and are not kept yet
        self.puts: dict[int, int] = {}
        self.keeping = 0
