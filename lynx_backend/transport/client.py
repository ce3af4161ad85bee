"""Fetches objects from, and puts them into, another node over UCX."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from ..errors import InvalidInputError, TransportError
from ..keys import ObjectName
from . import protocol
from .base import Transport, already_fetching
from .connection import Connection
from .greeting import UCX_UNREACHABLE, LinkOptions, greet
from .loop import LoopThread
from .protocol import MOST_NAMES, NODE_BYTES, End, Kind, Request
from .sender import Sender
from .stream import open_stream
from .ucx import Buffer, Channel, DeviceBuffer

CLOSE_SECONDS = 5.0
#: How long data of a cancelled fetch that has begun to arrive may take to finish arriving.
_CANCEL_SECONDS = 1.0
_SETTLE_SECONDS = 0.1
#: Lookups under way; a peer refuses more than 64, and what it has not read adds up.
_MOST_ASKED = 16


class _Transfer(Future[bool]):
    """A fetch or put. Its end is decided in the transport's thread, whoever asks for it."""

    def __init__(
        self, owner: UcxTransport, request: str, name: ObjectName, buffer: Buffer, size: int
    ) -> None:
        super().__init__()
        self.request, self.name, self.size = request, name, size
        self.buffer: Buffer | None = buffer
        self.id = -1
        self.connection: Connection | None = None
        self.cancelling = self.ended = False
        self._owner = owner

    def cancel(self) -> bool:
        return self._owner._cancel([self]) or self.cancelled()

    def end(self, result: bool | TransportError) -> None:
        """Give the buffer back and tell whoever waits; ``ended`` has been set."""
        self.buffer = None
        if self.cancelling:
            super().cancel()
        # Also after cancelling: without this, concurrent.futures.wait() would not count it as done.
        if not self.set_running_or_notify_cancel():
            return
        if isinstance(result, bool):
            self.set_result(result)
        else:
            self.set_exception(result)


class UcxTransport(Transport):
    """One peer. Made unconnected; :meth:`connect` connects, also after the connection was lost.

    A lost connection fails all that is unfinished, and what is asked for next, at once. Nothing is
    retried and nothing waits for a peer to come back: whoever owns the transport decides that.

    Every method may be called from any thread. Futures end, and their callbacks run, in the
    transport's own thread, in which :meth:`connect` and :meth:`sizes` cannot be used.

    Args:
        host, port: where the peer listens.
        expected: identity that the peer must have, as :attr:`node` in hexadecimal; another process
            at that address is not connected to. None when any will do.
    """

    def __init__(
        self,
        host: str,
        port: int,
        options: LinkOptions | None = None,
        expected: str | None = None,
    ) -> None:
        self.host, self.port = host, port
        self._options = options or LinkOptions()
        self._expected = expected
        self._node = os.urandom(NODE_BYTES)
        self._lock = threading.Lock()
        self._closed = False
        self._connection: Connection | None = None
        self._lost: TransportError | None = None
        self._fetches: dict[tuple[str, ObjectName], _Transfer] = {}
        self._begun: list[tuple[_Transfer, Kind]] = []
        # Of the thread alone from here on.
        self._transfers: dict[int, _Transfer] = {}
        self._lookups: dict[int, tuple[int, asyncio.Future[list[int | None]]]] = {}
        self._asking = asyncio.Semaphore(_MOST_ASKED)
        self._greeted = True
        self._requests: dict[str, list[int]] = {}
        self._counter = 0
        self._sender: Sender | None = None
        self._thread = LoopThread(f"lynx-ucx-{host}:{port}")

    def __repr__(self) -> str:
        return f"UcxTransport({self.host}:{self.port})"

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        connection = self._connection
        return connection is not None and connection.error is None

    @property
    def node(self) -> bytes | None:
        """Identity of the peer's process. Another one after reconnecting is another peer."""
        connection = self._connection
        return None if connection is None else connection.peer.node

    def connect(self) -> None:
        """Connect unless connected.

        Raises:
            TransportError: the peer is not there, refuses (the message says why) or is too slow.
        """
        self._check_open()
        try:
            self._thread.wait(self._connect(), self._options.timeout_seconds)
        except (OSError, UnicodeError, TransportError) as e:  # UnicodeError: no name of a host
            why = e if self._greeted else UCX_UNREACHABLE
            raise TransportError(f"cannot connect to {self.host}:{self.port}: {why}") from e

    def abort(self) -> None:
        """Drop the connection, if any: all that is unfinished fails, and one may connect again."""
        self._thread.soon(self._drop, TransportError("the connection was aborted by its owner"))

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        self._check_open()
        return self._thread.wait(self._look_up(names), self._options.timeout_seconds)

    def look_up(self, names: Sequence[ObjectName]) -> Future[list[int | None]]:
        """As :meth:`sizes`, without waiting; whoever waits for it brings a limit."""
        self._check_open()
        return self._thread.start(self._look_up(names))

    def fetch(self, request: str, name: ObjectName, out: memoryview | DeviceBuffer) -> Future[bool]:
        """As ``Transport.fetch``; ``out`` may also be CUDA memory, which UCX then writes to.

        Nothing on the device may still be using that memory, on whatever stream.
        """
        buffer, size = _checked(name, out, writable=True)
        transfer = _Transfer(self, request, name, buffer, size)
        with self._lock:
            self._check_open()
            if (request, name) in self._fetches:
                raise already_fetching(request, name)
            self._fetches[request, name] = transfer
        self._start(transfer, Kind.FETCH)
        return transfer

    def put(self, request: str, name: ObjectName, data: memoryview | DeviceBuffer) -> Future[bool]:
        """Start putting an object into the peer's store.

        The future resolves to True when the peer keeps it and to False when it does not want to;
        it raises TransportError when it could not.

        Args:
            data: must not change until the future has ended.
        """
        buffer, size = _checked(name, data, writable=False)
        with self._lock:
            self._check_open()
        transfer = _Transfer(self, request, name, buffer, size)
        self._start(transfer, Kind.PUT)
        return transfer

    def cancel(self, request: str) -> None:
        with self._lock:
            mine = [t for (r, _), t in self._fetches.items() if r == request]
        self._cancel(mine)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        error = TransportError("the link was closed before the object had arrived")
        if self._thread.current:
            self._drop(error)
            self._thread.loop.create_task(self._stop())
            return
        try:
            self._thread.wait(self._shut(error), CLOSE_SECONDS)
        finally:
            self._thread.stop(CLOSE_SECONDS)

    # -- any thread --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the link is closed; open another transport")

    def _start(self, transfer: _Transfer, kind: Kind) -> None:
        with self._lock:
            idle = not self._begun
            self._begun.append((transfer, kind))
        # Waking the thread costs more than starting a transfer: once for all that came together.
        if idle and not self._thread.soon(self._begin_all):
            self._begin_all()  # the thread has ended: each of them fails

    def _cancel(self, transfers: Iterable[_Transfer]) -> bool:
        with self._lock:
            mine = [t for t in transfers if not (t.ended or t.cancelling)]
            for transfer in mine:
                transfer.cancelling = True
                self._forget(transfer)
        if mine:
            self._thread.soon(self._give_up, mine)
        return bool(mine)

    def _forget(self, transfer: _Transfer) -> None:
        key = transfer.request, transfer.name
        if self._fetches.get(key) is transfer:
            del self._fetches[key]

    def _end(self, transfer: _Transfer, result: bool | TransportError) -> None:
        with self._lock:
            if transfer.ended:
                return
            transfer.ended = True
            self._forget(transfer)
        if self._transfers.pop(transfer.id, None) is not None:
            numbered = self._requests[transfer.request]
            numbered[1] -= 1
            if not numbered[1]:
                del self._requests[transfer.request]
        transfer.end(result)

    # -- in the thread -----------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self.connected:
            return
        while self._connection is not None:  # the old one holds buffers for a moment more
            await asyncio.sleep(0.002)
        self._greeted = True
        stream = await open_stream(self.host, self.port)

        def opened() -> Channel:
            self._greeted = False
            return Channel(stream.local_host)

        try:
            greeting = await greet(stream, "client", self._node, self._options, opened)
            self._greeted = True
            if self._expected not in (None, greeting.peer.node.hex()):
                greeting.channel.destroy()
                raise TransportError("another process than the one expected has that address now")
        except BaseException as e:
            self._greeted |= not isinstance(e, asyncio.CancelledError)  # which is for want of time
            stream.abort()
            raise
        connection = Connection(stream, greeting, self._options)
        connection.handle = self._handle
        connection.closed = partial(self._gone, connection)
        connection.awaiting = lambda: bool(self._transfers or self._lookups)
        if self._sender is None:
            self._sender = Sender()
            self._pump = asyncio.get_running_loop().create_task(self._sender.run())
        self._sender.add(connection)
        self._connection, self._lost = connection, None
        connection.start()

    def _gone(self, connection: Connection, error: TransportError) -> None:
        assert self._sender is not None
        self._sender.remove(connection)
        self._connection = None
        self._lost = error
        for transfer in [t for t in self._transfers.values() if t.connection is connection]:
            failure = TransportError(
                f"{self.host}:{self.port} did not give {transfer.name}: {error}"
            )
            self._end(transfer, failure)
        for _, answer in self._lookups.values():
            if not answer.done():
                answer.set_exception(TransportError(f"{self.host}:{self.port}: {error}"))
        self._lookups.clear()

    def _drop(self, error: TransportError) -> None:
        if self._connection is not None:
            self._connection.abort(error)

    def _require(self) -> Connection:
        if self._connection is None or self._connection.error is not None:
            lost = self._lost if self._connection is None else self._connection.error
            why = f"; the last connection ended: {lost}" if lost else ""
            raise TransportError(f"not connected to {self.host}:{self.port}{why}")
        return self._connection

    def _number(self) -> int:
        """The next id: unique among what is unfinished, and an unsigned 32-bit integer."""
        taken = self._connection.incoming if self._connection is not None else {}
        while True:
            self._counter = (self._counter + 1) % 2**32
            id_ = self._counter
            if id_ not in self._transfers and id_ not in self._lookups and id_ not in taken:
                return id_

    async def _look_up(self, names: Sequence[ObjectName]) -> list[int | None]:
        self._require()
        sizes: list[int | None] = []
        for start in range(0, len(names), MOST_NAMES):
            async with self._asking:
                sizes += await self._ask(names[start : start + MOST_NAMES])
        return sizes

    async def _ask(self, names: Sequence[ObjectName]) -> list[int | None]:
        id_ = self._number()
        answer: asyncio.Future[list[int | None]] = self._thread.loop.create_future()
        connection = self._require()
        self._lookups[id_] = len(names), answer
        connection.write(protocol.pack_lookup(id_, names))
        return await answer

    def _begin_all(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, []
        for transfer, kind in begun:
            self._begin(transfer, kind)

    def _begin(self, transfer: _Transfer, kind: Kind) -> None:
        try:
            connection = self._require()
        except TransportError as e:
            self._end(transfer, e)
            return
        if transfer.cancelling:
            self._end(transfer, False)
            return
        allows = connection.peer
        if transfer.size > allows.most_object_bytes or len(self._transfers) >= allows.most_open:
            why = (
                f"{self.host}:{self.port} would refuse {transfer.name}: it allows "
                f"{allows.most_object_bytes} bytes an object and {allows.most_open} at a time"
            )
            self._end(transfer, TransportError(why) if kind == Kind.FETCH else False)
            return
        transfer.id, transfer.connection = self._number(), connection
        self._transfers[transfer.id] = transfer
        # The peer numbers a request's flow; all of a request's unfinished transfers share it.
        numbered = self._requests.setdefault(transfer.request, [transfer.id, 0])
        numbered[1] += 1
        if kind == Kind.FETCH:
            done = partial(self._end, transfer, True)
            connection.expect(transfer.id, transfer.size, transfer.buffer, done)
        connection.write(self._describe(transfer).pack(kind))

    def _describe(self, transfer: _Transfer) -> Request:
        alone = not isinstance(transfer.buffer, memoryview)
        number = self._requests[transfer.request][0]
        return Request(transfer.id, number, alone, transfer.name, transfer.size)

    def _give_up(self, transfers: list[_Transfer], result: bool | TransportError = False) -> None:
        for transfer in transfers:
            connection = transfer.connection
            if transfer.ended or connection is None or connection.error is not None:
                continue  # it ends, or ended, by itself
            connection.write(protocol.pack_id(Kind.CANCEL, transfer.id))
            released = partial(self._end, transfer, result)
            if transfer.id in connection.incoming:
                connection.give_up(transfer.id, released)
                if not transfer.ended:
                    self._thread.loop.call_later(_CANCEL_SECONDS, self._insist, transfer)
            else:
                assert self._sender is not None
                self._sender.withdraw(connection, transfer.id)
                released()

    def _insist(self, transfer: _Transfer) -> None:
        if not transfer.ended and transfer.connection is not None:
            why = f"what had begun to arrive of {transfer.name} did not within {_CANCEL_SECONDS} s"
            transfer.connection.abort(TransportError(why))

    def _handle(self, kind: Kind, payload: bytes) -> None:
        if kind == Kind.SIZES:
            id_, sizes = protocol.unpack_sizes(payload)
            count, answer = self._answered(id_)
            if len(sizes) != count:
                raise TransportError(f"the peer answered {len(sizes)} sizes to {count} names")
            if not answer.done():
                answer.set_result(sizes)
        elif kind == Kind.END:
            self._handle_end(*protocol.unpack_end(payload))
        elif kind == Kind.READY:
            self._send(protocol.unpack_id(payload))
        elif kind == Kind.REFUSED:
            raise TransportError(f"the peer refused: {protocol.unpack_text(payload)}")
        else:
            raise TransportError(f"a server does not send {kind.name}")

    def _answered(self, id_: int) -> tuple[int, asyncio.Future[list[int | None]]]:
        if id_ not in self._lookups:
            raise TransportError("the peer answered what was not asked")
        return self._lookups.pop(id_)

    def _handle_end(self, id_: int, end: End, why: str) -> None:
        error = TransportError(f"{self.host}:{self.port}: {end.name.lower()}: {why or 'no reason'}")
        connection = self._require()
        if id_ in self._lookups:
            _, answer = self._answered(id_)
            if not answer.done():
                answer.set_exception(error)
            return
        transfer = self._transfers.get(id_)
        incoming = connection.incoming.get(id_)
        if incoming is not None:
            fetch_result = False if end == End.ABSENT else error
            if transfer is not None and not transfer.cancelling:
                connection.give_up(id_, partial(self._end, transfer, fetch_result))
            connection.forget(id_)
        elif transfer is not None:
            known = {End.STORED: True, End.REFUSED: False}
            self._end(transfer, known.get(end, error))

    def _send(self, id_: int) -> None:
        transfer = self._transfers.get(id_)
        connection = self._require()
        if transfer is None or id_ in connection.incoming:
            return  # cancelled meanwhile
        assert self._sender is not None
        self._sender.offer(connection, self._describe(transfer), transfer.buffer, _unread)

    async def _shut(self, error: TransportError) -> None:
        if self._connection is not None:
            self._give_up(list(self._transfers.values()), error)
            await self._connection.settle(_SETTLE_SECONDS)
        self._drop(error)
        while self._connection is not None:
            await asyncio.sleep(0.002)

    async def _stop(self) -> None:
        while self._connection is not None:
            await asyncio.sleep(0.002)
        self._thread.stop(0)


def _unread(id_: int, end: End, why: str) -> None:
    raise AssertionError("data that is at hand needs no reading")


def _checked(
    name: ObjectName, buffer: memoryview | DeviceBuffer, writable: bool
) -> tuple[Buffer, int]:
    """A buffer as UCX takes it, and its size in bytes."""
    if isinstance(buffer, memoryview):
        if (writable and buffer.readonly) or not buffer.c_contiguous:
            raise InvalidInputError(
                f"the buffer for {name} must be {'writable and ' * writable}contiguous; pass the "
                "memoryview of a bytearray or of a contiguous uint8 tensor"
            )
        return (buffer.cast("B") if buffer.nbytes else memoryview(bytearray())), buffer.nbytes
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None or interface["typestr"] != "|u1" or interface.get("strides") is not None:
        raise InvalidInputError(
            f"the buffer for {name} must be a memoryview or a contiguous uint8 array in CUDA "
            f"memory, got {type(buffer).__name__}"
        )
    (size,) = interface["shape"] if len(interface["shape"]) == 1 else (-1,)
    if size < 0:
        raise InvalidInputError(f"the buffer for {name} must have one dimension; use .view(-1)")
    return buffer, size
