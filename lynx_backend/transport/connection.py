"""One peer: the stream of frames, the UCX channel, what is expected from it and what it owes us.

Everything here runs on the event loop of the thread that owns the connection. Whatever goes wrong
ends the connection, and only when its channel has been given up does anybody learn of it: from then
on no buffer is written any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import TransportError
from . import protocol
from .greeting import Greeting, LinkOptions
from .protocol import Kind, Piece
from .scheduler import FRAGMENT_BYTES
from .stream import FrameStream
from .ucx import Buffer, part_of
from .window import MOST_FRAGMENT_BYTES, Window

_TICKS = 4
_GRACE_SECONDS = 0.05
# What is queued towards a peer that does not read; frames are small.
_MOST_UNSENT_BYTES = 8 << 20
# How often messages that have come are acknowledged, so that many share what a frame costs.
_ACK_SECONDS = 0.0005


@dataclass(slots=True)
class Incoming:
    """An object on its way to us.

    Attributes:
        buffer: where it goes; None once it was given up, and then it goes nowhere.
        done: called when all of it is in.
        released: called once nothing more can be written to the buffer of an object given up.
    """

    size: int
    buffer: Buffer | None
    done: Callable[[], None]
    announced: int = 0
    landed: int = 0
    under_way: int = 0
    released: Callable[[], None] | None = None


class Connection:
    """A peer that has proved itself.

    Args:
        stream: the stream of frames, greeted.
        greeting: what :func:`greet` learnt; its channel is destroyed with the connection.

    Attributes:
        handle: called with every frame that is not about data under way.
        acknowledged: called when the window has room again.
        closed: called once, with the reason, when the connection is over and no buffer is held.
    """

    def __init__(self, stream: FrameStream, greeting: Greeting, options: LinkOptions) -> None:
        self.peer = greeting.peer
        self.window = Window(options.anchor_wait_seconds, greeting.round_trip)
        self.incoming: dict[int, Incoming] = {}
        #: whether other answers are waited for
        self.awaiting: Callable[[], bool] = lambda: False
        self.error: TransportError | None = None
        self.handle: Callable[[Kind, bytes], None] = lambda kind, payload: None
        self.acknowledged: Callable[[], None] = lambda: None
        self.closed: Callable[[TransportError], None] = lambda error: None
        self._stream, self._channel = stream, greeting.channel
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._sent = self._received = 0
        self._progressing = self._scheduled = False
        self._landed: list[int] = []
        self._acknowledged_at = 0.0
        self._spares: list[bytearray] = []
        self._unsent: list[bytes] = []
        self._outgoing: list[tuple[Buffer, int]] = []
        self._heard = True
        self._quiet = self._stuck = 0
        self._moved = 0

    def start(self) -> None:
        """Begin to read and to watch."""
        self._loop.add_reader(self._channel.event_fd, self._progress)
        self._watching = self._loop.create_task(self._watch())
        self._stream.start(self._take, self.abort)
        self._soon()

    # -- frames ------------------------------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        """Send one frame; nothing happens on a connection that is over."""
        if self.error is not None:
            return
        if not self._unsent and not self._progressing:
            self._loop.call_soon(self._flush)  # what is written together is sent together
        self._unsent.append(frame)

    def _flush(self) -> None:
        frames, self._unsent = self._unsent, []
        messages, self._outgoing = self._outgoing, []
        if self.error is not None:
            return
        self._stream.write(b"".join(frames))
        if self._stream.unsent > _MOST_UNSENT_BYTES:
            self.abort(TransportError("the peer does not read what it is sent"))
            return
        try:
            for buffer, sequence in messages:
                self._channel.send(buffer, sequence, self._sent_message)
        except TransportError as e:
            self.abort(e)
        if messages:
            self._soon()

    def _take(self, kind: Kind, payload: bytes) -> None:
        """A frame has come."""
        self._heard = True
        if kind == Kind.DATA:
            self._expect_message(*protocol.unpack_data(payload))
        elif kind == Kind.ACK:
            now = time.monotonic()
            for sequence in protocol.unpack_acks(payload):
                if not self.window.acknowledged(sequence, now):
                    raise TransportError("the peer acknowledged what was not sent")
            self._moved += 1
            self.acknowledged()
        elif kind == Kind.PING:
            self.write(protocol.frame(Kind.PONG))
        elif kind != Kind.PONG:
            self.handle(kind, payload)

    # -- data --------------------------------------------------------------------------------------

    def expect(self, id_: int, size: int, buffer: Buffer, done: Callable[[], None]) -> None:
        """Allow the peer to send an object of ``size`` bytes into ``buffer``."""
        self.incoming[id_] = Incoming(size, buffer, done)

    def give_up(self, id_: int, released: Callable[[], None]) -> None:
        """Want an expected object no more; ``released`` is called when its buffer is free."""
        incoming = self.incoming[id_]
        if incoming.under_way == 0:
            incoming.buffer = None
            released()
        else:
            incoming.released = released

    def forget(self, id_: int) -> Incoming | None:
        """The peer said that no more of this object comes; None when it was not expected."""
        incoming = self.incoming.get(id_)
        if incoming is not None:
            incoming.size = incoming.announced  # what is under way ends it
            if incoming.under_way == 0:
                del self.incoming[id_]
        return incoming

    def _expect_message(self, sequence: int, pieces: list[Piece]) -> None:
        total = sum(piece.length for piece in pieces)
        if sequence != self._received or total > MOST_FRAGMENT_BYTES:
            raise TransportError("the peer announced a message out of order or too large")
        self._received += 1
        targets = [self._claim(piece) for piece in pieces]
        single = targets[0] if len(pieces) == 1 else None
        if single is not None and single.buffer is not None and single.released is None:
            buffer, staged = part_of(single.buffer, pieces[0].offset, total), False
        else:
            # For many, or for nobody any more: bounded by the limit above.
            buffer, staged = self._spare(total), True

        def land(ok: bool) -> None:
            if ok:
                self._land(sequence, pieces, targets, buffer if staged else None)
                if staged and len(buffer.obj) == FRAGMENT_BYTES:
                    self._spares.append(buffer.obj)
            else:
                self.abort(TransportError("UCX lost a message on its way from the peer"))

        if total:
            self._channel.receive(buffer, sequence, land)
            self._soon()
        else:
            land(True)

    def _spare(self, size: int) -> memoryview:
        """Memory for one message, mostly memory that held another before."""
        if size > FRAGMENT_BYTES:
            return memoryview(bytearray(size))
        return memoryview(self._spares.pop() if self._spares else bytearray(FRAGMENT_BYTES))[:size]

    def _claim(self, piece: Piece) -> Incoming:
        incoming = self.incoming.get(piece.id)
        if incoming is None:
            raise TransportError("the peer announced data that was not asked for")
        end = piece.offset + piece.length
        if piece.offset != incoming.announced or end > incoming.size:
            raise TransportError(
                f"the peer announced bytes {piece.offset} to {end} of an object of "
                f"{incoming.size}, of which {incoming.announced} were announced before"
            )
        incoming.announced = end
        incoming.under_way += 1
        return incoming

    def _land(
        self, sequence: int, pieces: list[Piece], targets: list[Incoming], staged: Buffer | None
    ) -> None:
        self._acknowledge(sequence)
        self._moved += 1
        at = 0
        for piece, incoming in zip(pieces, targets, strict=True):
            if staged is not None and incoming.buffer is not None and incoming.released is None:
                into = incoming.buffer[piece.offset : piece.offset + piece.length]
                into[:] = staged[at : at + piece.length]
            at += piece.length
            incoming.landed += piece.length
            incoming.under_way -= 1
            whole = incoming.landed == incoming.size
            if whole:
                self.incoming.pop(piece.id, None)
            if incoming.released is not None and incoming.under_way == 0:
                incoming.buffer, released, incoming.released = None, incoming.released, None
                released()
            elif whole and incoming.buffer is not None and incoming.released is None:
                incoming.done()

    def send(self, pieces: list[Piece], buffer: Buffer) -> None:
        """Send one message that holds ``pieces``; their bytes must not change until it is over."""
        if self.error is not None:
            return
        size = sum(piece.length for piece in pieces)
        sequence, self._sent = self._sent, self._sent + 1
        self.write(protocol.pack_data(sequence, pieces))
        self.window.sent(sequence, size, time.monotonic())
        if size:
            self._outgoing.append((buffer, sequence))  # once it is announced

    def _sent_message(self, ok: bool) -> None:
        if not ok:
            self.abort(TransportError("UCX lost a message on its way to the peer"))

    def _soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._progress_soon)

    def _progress_soon(self) -> None:
        self._scheduled = False
        self._progress()

    def _progress(self) -> None:
        if self.error is not None:
            return
        self._progressing = True
        try:
            more = self._channel.progress()
        finally:
            self._progressing = False
            if self._unsent:
                self._flush()
        if self.error is not None:
            return  # by what was done just now
        # No spinning in between: it was measured to cost more of a busy processor than it gains.
        if more or not self._channel.arm():
            self._soon()

    def _acknowledge(self, sequence: int) -> None:
        self._landed.append(sequence)
        if len(self._landed) > 1:
            return  # with the first of them
        wait = self._acknowledged_at + _ACK_SECONDS - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._write_acks)
        else:
            self._write_acks()

    def _write_acks(self) -> None:
        self._acknowledged_at = self._loop.time()
        landed, self._landed = self._landed, []
        self.write(protocol.pack_acks(landed))

    # -- the end -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Give up a peer that is silent, or answers but moves nothing, while we wait for it."""
        # Ticks are counted, not time: a process that was stopped itself must not blame its peer.
        while True:
            await asyncio.sleep(self._options.timeout_seconds / _TICKS)
            self._soon()
            moving = bool(self.incoming or self.window.messages)
            waiting = moving or self.awaiting()
            self._quiet = 0 if self._heard or not waiting else self._quiet + 1
            self._stuck = 0 if self._moved or not moving else self._stuck + 1
            self._heard, self._moved = False, 0
            seconds = self._options.timeout_seconds
            if self._quiet > _TICKS:
                self.abort(TransportError(f"the peer has been silent for {seconds:g} s"))
            elif self._stuck > 6 * _TICKS:
                self.abort(TransportError(f"the peer has moved no data for {6 * seconds:g} s"))
            elif waiting:
                self.write(protocol.frame(Kind.PING))

    def abort(self, error: TransportError) -> None:
        """End the connection. Idempotent; ``closed`` is called when no buffer is held any more."""
        if self.error is not None:
            return
        self.error = error
        self._loop.remove_reader(self._channel.event_fd)
        self._watching.cancel()
        # Not close(): what is unsent to a peer that does not read would keep the socket open.
        self._stream.abort()
        # Soon, not now: this may be called from within the channel.
        self._loop.call_soon(self._over, time.monotonic() + _GRACE_SECONDS)

    def _over(self, until: float) -> None:
        assert self.error is not None
        # UCX may notice the end by itself, and finish what it has begun.
        if self._channel.pending and time.monotonic() < until:
            self._channel.progress()
            self._loop.call_later(0.002, self._over, until)
            return
        self._channel.destroy()
        self.incoming.clear()
        self.closed(self.error)

    async def settle(self, seconds: float) -> None:
        """Let what has begun to arrive or to leave finish, at most for so long."""
        until = time.monotonic() + seconds
        while self.error is None and self._channel.pending and time.monotonic() < until:
            await asyncio.sleep(0.001)
