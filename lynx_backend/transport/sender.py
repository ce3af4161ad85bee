"""Sends objects to any number of connections, in the scheduler's order and within their windows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from .. import metrics
from ..keys import ObjectName, Part
from .connection import Connection
from .protocol import MOST_PIECES, End, Piece, Request
from .scheduler import FRAGMENT_BYTES, Fragment, Scheduler
from .ucx import Buffer, part_of

# What is read at once: handing a batch to the thread that reads costs more than a read from memory.
# An anchor that arrives now waits for it, so it is no more than was lately read in so much time.
_READ_SECONDS = 0.001
_LEAST_READ_BYTES, _MOST_READ_BYTES = 1 << 20, 16 << 20
# As the tier "peers", a store counts the other end: what it has got of other nodes.
_SERVED = "served"
_SENT = {
    part: (
        metrics.OBJECTS.labels(part.label, _SERVED, "send", "ok"),
        metrics.BYTES.labels(part.label, _SERVED, "out"),
    )
    for part in Part
}

Load = Callable[[ObjectName], "memoryview | None"]
#: Told how an offer ended, unless all of it was sent: id, how, why.
Ended = Callable[[int, End, str], None]


@dataclass(slots=True)
class _Offer:
    connection: Connection
    request: Request
    flow: str
    data: Buffer | None
    ended: Ended
    early: bool = False
    over: bool = False


_Batch = list[tuple[Fragment, _Offer]]


class Sender:
    """The one who sends on this node: its link is shared by all connections.

    Small objects that go to one peer travel in one message. Objects are read by one thread, about
    in the order of sending and a little ahead of it; reading does not wait for what is under way.

    Args:
        load: reads an object whose offer came without data.
        reader: where ``load`` runs.
    """

    def __init__(self, load: Load | None = None, reader: Executor | None = None) -> None:
        self._load, self._reader = load, reader
        self._scheduler = Scheduler()
        self._offers: dict[tuple[str, ObjectName], _Offer] = {}
        self._by_id: dict[Connection, dict[int, _Offer]] = {}
        # A flow of the scheduler is named after its connection's number and its request.
        self._connections: dict[str, Connection] = {}
        self._numbers: dict[Connection, str] = {}
        self._made = 0
        self._read_bytes = _LEAST_READ_BYTES
        self._early_bytes = 0  # of objects that were read before their turn and are not all sent
        self._work = asyncio.Event()

    def add(self, connection: Connection) -> None:
        """Take part in sending to this connection."""
        self._made += 1
        number = str(self._made)
        self._numbers[connection], self._connections[number] = number, connection
        self._by_id[connection] = {}
        connection.acknowledged = self._work.set

    def remove(self, connection: Connection) -> None:
        """Forget a connection and all its offers."""
        for offer in list(self._by_id.get(connection, {}).values()):
            self._drop(offer)
        self._by_id.pop(connection, None)
        self._connections.pop(self._numbers.pop(connection, ""), None)

    def open(self, connection: Connection) -> int:
        """Number of offers to this connection that are not all sent."""
        return len(self._by_id[connection])

    def offer(
        self, connection: Connection, request: Request, data: Buffer | None, ended: Ended
    ) -> bool:
        """Queue an object; False when this request already waits for this name."""
        flow = f"{self._numbers[connection]}.{request.request}{'!' * request.alone}"
        mine = self._by_id[connection]
        if (flow, request.name) in self._offers or request.id in mine:
            return False
        offer = _Offer(connection, request, flow, data, ended)
        self._offers[flow, request.name] = mine[request.id] = offer
        self._scheduler.submit(flow, request.name, request.size)
        self._work.set()
        return True

    def withdraw(self, connection: Connection, id_: int) -> bool:
        """Send no more of an offer; False when all of it was sent, or it never was."""
        offer = self._by_id[connection].get(id_)
        if offer is not None:
            self._drop(offer)
        return offer is not None

    async def run(self) -> None:
        """Send, for ever."""
        while True:
            batches = self._gather()
            if not batches:
                self._work.clear()
                await self._work.wait()
                continue
            await self._read([offer for batch in batches for _, offer in batch])
            for batch in batches:
                self._transmit(batch)
            await asyncio.sleep(0)  # frames that came meanwhile go first: there may be an anchor

    def _drop(self, offer: _Offer) -> None:
        self._scheduler.cancel(offer.flow, offer.request.name)
        self._forget(offer)

    def _forget(self, offer: _Offer) -> None:
        offer.over = True
        self._early_bytes -= offer.request.size * offer.early
        self._offers.pop((offer.flow, offer.request.name), None)
        self._by_id[offer.connection].pop(offer.request.id, None)

    def _end(self, offer: _Offer, end: End, why: str) -> None:
        self._drop(offer)
        part = offer.request.name.part.label
        metrics.OBJECTS.labels(part, _SERVED, "send", end.name.lower()).inc()
        offer.ended(offer.request.id, end, why)

    def _connection(self, flow: str) -> Connection:
        return self._connections[flow.split(".", 1)[0]]

    def _room(self, flow: str, part: Part) -> int:
        connection = self._connection(flow)
        return connection.window.room(part) if connection.error is None else 0

    def _gather(self) -> list[_Batch]:
        """The next messages, as far as reading them is short work."""
        batches: list[_Batch] = []
        unread = 0
        while unread < self._read_bytes:
            batch = self._message()
            if not batch:
                break
            batches.append(batch)
            unread += sum(o.request.size for f, o in batch if f.offset == 0 and o.data is None)
            batch[0][1].connection.window.reserved += sum(f.length for f, _ in batch)
        return batches

    def _message(self) -> _Batch:
        """What goes into the next message: one fragment, or several small ones."""
        first = self._scheduler.next(self._room)
        if first is None:
            return []
        batch = [self._owned(first)]
        free = FRAGMENT_BYTES - first.length
        connection, part = self._connection(first.request), first.name.part

        def room(flow: str, wanted: Part) -> int:
            same = self._connection(flow) is connection and wanted == part
            return free if same and not flow.endswith("!") else 0

        while free > 0 and not first.request.endswith("!") and len(batch) < MOST_PIECES:
            fragment = self._scheduler.next(room)
            if fragment is None:
                break
            batch.append(self._owned(fragment))
            free -= fragment.length
        return batch

    def _owned(self, fragment: Fragment) -> tuple[Fragment, _Offer]:
        return fragment, self._offers[fragment.request, fragment.name]

    async def _read(self, offers: list[_Offer]) -> None:
        missing = [offer for offer in offers if offer.data is None]
        if not missing or self._load is None:
            return
        missing += self._early(missing)
        names = [offer.request.name for offer in missing]
        loop = asyncio.get_running_loop()
        results, seconds = await loop.run_in_executor(self._reader, self._load_all, names)
        lately = sum(offer.request.size for offer in missing) * _READ_SECONDS / max(seconds, 1e-6)
        most = min(int(lately), 2 * self._read_bytes, _MOST_READ_BYTES)
        self._read_bytes = max(most, _LEAST_READ_BYTES)
        for offer, data in zip(missing, results, strict=True):
            if offer.over:
                continue
            if isinstance(data, Exception):
                self._end(offer, End.FAILED, f"{type(data).__name__}: {data}")
            elif data is None or data.nbytes != offer.request.size:
                self._end(offer, End.ABSENT, "")
            else:
                offer.data = data.cast("B") if data.nbytes else data

    def _early(self, missing: list[_Offer]) -> list[_Offer]:
        """What to read together with what is ``missing``, because its turn comes soon."""
        chosen: list[_Offer] = []
        taken = {id(offer) for offer in missing}
        free = self._read_bytes - self._early_bytes - sum(offer.request.size for offer in missing)
        for key in self._scheduler.upcoming():
            if free <= 0:
                break
            offer = self._offers[key]
            if offer.data is None and id(offer) not in taken and offer.request.size <= free:
                offer.early = True
                chosen.append(offer)
                self._early_bytes += offer.request.size
                free -= offer.request.size
        return chosen

    def _load_all(
        self, names: list[ObjectName]
    ) -> tuple[list[memoryview | Exception | None], float]:
        started = time.monotonic()
        results = [self._load_one(name) for name in names]
        return results, time.monotonic() - started

    def _load_one(self, name: ObjectName) -> memoryview | Exception | None:
        assert self._load is not None
        # Whatever a source raises concerns this object only: the others must go on.
        try:
            return self._load(name)
        except Exception as e:
            return e

    def _transmit(self, batch: _Batch) -> None:
        connection = batch[0][1].connection
        connection.window.reserved -= sum(f.length for f, _ in batch)
        # While the batch was read, some of it may have been withdrawn or have failed.
        batch = [(f, o) for f, o in batch if not o.over]
        if not batch:
            return
        pieces = [Piece(o.request.id, f.offset, f.length) for f, o in batch]
        buffers = [part_of(o.data, f.offset, f.length) for f, o in batch]
        message = buffers[0] if len(batch) == 1 else memoryview(b"".join(buffers))
        connection.send(pieces, message)
        whole = [offer for fragment, offer in batch if fragment.last]
        for offer in whole:
            self._forget(offer)
        sent_objects, sent_bytes = _SENT[batch[0][0].name.part]  # a message is of one part
        sent_objects.inc(len(whole))
        sent_bytes.inc(sum(fragment.length for fragment, _ in batch))
