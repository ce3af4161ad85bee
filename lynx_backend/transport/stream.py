"""The TCP stream of frames between two nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from ..errors import TransportError
from . import protocol
from .loop import detached
from .protocol import Kind

Handle = Callable[[Kind, bytes], None]


class FrameStream(asyncio.Protocol):
    """One end. Frames are read one by one with :meth:`read` until :meth:`start` is called.

    A frame is then handled in the turn of the event loop in which it comes, without a task in
    between: data whose message is not expected yet when it arrives is copied once more by UCX.

    Args:
        made: called with a stream that somebody has connected to this node.
    """

    def __init__(self, made: Callable[[FrameStream], None] = lambda stream: None) -> None:
        self.error: TransportError | None = None
        self._made = made
        self._transport: Any = None
        self._held = bytearray()
        self._wake: asyncio.Event = asyncio.Event()
        self._handle: Handle | None = None
        self._lost: Callable[[TransportError], None] = lambda error: None
        self._most = protocol.MOST_GREETING_BYTES

    @property
    def local_host(self) -> str:
        """Address of this end."""
        return str(self._transport.get_extra_info("sockname")[0])

    @property
    def remote(self) -> str:
        """Address and port of the other end, for people to read."""
        return str(self._transport.get_extra_info("peername"))

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""
        return int(self._transport.get_write_buffer_size())

    async def read(self) -> tuple[Kind, bytes]:
        """The next frame, of a greeting's size at most.

        Raises:
            TransportError: there comes none, or no frame at all.
        """
        while (found := self._next()) is None:
            if self.error is not None:
                raise self.error
            self._wake.clear()
            self._transport.resume_reading()
            await self._wake.wait()
        return found

    def start(self, handle: Handle, lost: Callable[[TransportError], None]) -> None:
        """From now on call ``handle`` with each frame, and ``lost`` when there come no more.

        Args:
            handle: what it raises, a TransportError, goes to ``lost``.
        """
        self._handle, self._lost = handle, lost
        self._most = protocol.MOST_FRAME_BYTES
        self._transport.resume_reading()
        self._deliver()
        if self.error is not None:
            lost(self.error)

    def write(self, data: bytes) -> None:
        """Send whole frames, as soon as the other end takes them."""
        self._transport.write(data)

    def close(self) -> None:
        """End it when what was written has been sent."""
        self._transport.close()

    def abort(self) -> None:
        """End it at once; nobody is told."""
        self._handle = None
        self._transport.abort()

    # -- asyncio -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        s = transport.get_extra_info("socket")
        # Let the kernel notice a peer that vanished while nobody waits for it.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        self._held += data
        if self._handle is not None:
            self._deliver()
            return
        self._wake.set()
        if len(self._held) > self._most:
            self._transport.pause_reading()  # a stranger has no more of our memory

    def connection_lost(self, exc: Exception | None) -> None:
        why = "the peer closed the connection" if exc is None else f"the connection failed: {exc}"
        self.error = TransportError(why)
        self._wake.set()
        if self._handle is not None:
            self._lost(self.error)

    # -- details -----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while self._handle is not None and (found := self._next()) is not None:
                self._handle(*found)
        except TransportError as e:
            self._lost(e)

    def _next(self) -> tuple[Kind, bytes] | None:
        head = protocol.FRAME_HEADER_BYTES
        if len(self._held) < head:
            return None
        kind, length = protocol.frame_header(self._held, self._most)
        if len(self._held) < head + length:
            return None
        payload = bytes(self._held[head : head + length])
        del self._held[: head + length]
        return kind, payload


async def open_stream(host: str, port: int) -> FrameStream:
    """A stream to a node.

    Raises:
        OSError, UnicodeError: there is no such host, or nobody who listens.
    """
    loop = asyncio.get_running_loop()
    # Not the loop's own way: a name server that does not answer would hold up the loop's end.
    found = await asyncio.wrap_future(
        detached(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    )
    error: OSError | None = None
    for family, _, _, _, address in found:
        s = socket.socket(family, socket.SOCK_STREAM)
        s.setblocking(False)
        try:
            await loop.sock_connect(s, address)
        except OSError as e:
            error = e
            s.close()
        except BaseException:
            s.close()
            raise
        else:
            _, stream = await loop.create_connection(FrameStream, sock=s)
            return stream
    raise error or OSError(f"{host} has no address")
