"""How two nodes begin: who they are, that they know the secret, and a UCX channel between them."""

from __future__ import annotations

import asyncio
import hmac
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..errors import TransportError
from . import protocol
from .loop import detached
from .protocol import Hello, Kind, Terms
from .stream import FrameStream
from .ucx import Channel
from .window import ANCHOR_WAIT_SECONDS

#: Connections that UCX is making at a time, those that nobody waits for any more among them.
MOST_CONNECTING = 64
_places = threading.BoundedSemaphore(MOST_CONNECTING)


@dataclass(frozen=True)
class LinkOptions:
    """How a node treats its peers.

    Attributes:
        timeout_seconds: silence of a peer that something is wanted from, connecting included,
            after which it counts as dead. A peer that answers but moves no data is given up after
            six times as long.
        anchor_wait_seconds: most time that residuals under way may cost an arriving anchor.
        most_object_bytes: largest object that is taken or given.
        most_open: most unfinished fetches and puts of one peer.
        secret: shared by all nodes; None where anybody who can connect may.
        terms: what the peer has to agree with.
    """

    timeout_seconds: float = 5.0
    anchor_wait_seconds: float = ANCHOR_WAIT_SECONDS
    most_object_bytes: int = 1 << 30
    most_open: int = 16384
    secret: bytes | None = field(default=None, repr=False)
    terms: Terms = field(default_factory=Terms)

    def hello(self, node: bytes) -> Hello:
        """The first frame of a new connection."""
        nonce = os.urandom(protocol.NONCE_BYTES)
        return Hello(node, nonce, self.most_object_bytes, self.most_open, self.terms)


@dataclass(frozen=True)
class Greeting:
    """What was learnt of a peer before the first object.

    Attributes:
        peer: its hello.
        round_trip: seconds a frame and its answer took.
        channel: connected; whoever takes it destroys it.
    """

    peer: Hello
    round_trip: float
    channel: Channel


#: What a peer that answers, and to whom there is no connection all the same, is told or said of.
UCX_UNREACHABLE = (
    "UCX did not connect in time: it has ports of its own, and each node must reach the other's "
    "(UCX_TCP_PORT_RANGE says which they are)"
)


class _RefusedError(TransportError):
    """The peer refused; it need not be told."""


async def greet(
    stream: FrameStream,
    side: str,
    node: bytes,
    options: LinkOptions,
    open_channel: Callable[[], Channel],
) -> Greeting:
    """Exchange hellos, prove the secret, and connect a channel.

    Args:
        side: ``"client"``, which speaks first, or ``"server"``.
        open_channel: called once the peer may be talked to, in a thread.

    Raises:
        TransportError: the peer is another kind of program, of another version, does not agree, or
            does not know the secret. It has been told why.
    """
    mine = options.hello(node).pack()
    server = side == "server"
    try:
        started = time.monotonic()
        if not server:
            stream.write(mine)
        payload = await _read(stream, Kind.HELLO)
        peer = Hello.unpack(payload)
        mismatch = options.terms.mismatch(peer.terms)
        if mismatch is not None:
            raise TransportError(f"{mismatch}; connect nodes that serve the same caches")
        theirs = protocol.frame(Kind.HELLO, payload)
        hellos = (theirs, mine) if server else (mine, theirs)
        round_trip = time.monotonic() - started
        if server:
            started = time.monotonic()
            stream.write(mine)
            # Nothing of UCX is touched before the client has proved that it knows the secret.
            address = await _read_proof(stream, "client", hellos, options)
            round_trip = time.monotonic() - started
        channel = await asyncio.wrap_future(detached(open_channel))
        connecting: Future[None] | None = None
        try:
            mac = protocol.proof(options.secret or b"", side, hellos, channel.address)
            stream.write(protocol.pack_proof(mac, channel.address))
            if not server:
                address = await _read_proof(stream, "server", hellos, options)
            connecting = _connecting(channel, address)
            await asyncio.wrap_future(connecting)
        except BaseException:
            if connecting is None:
                channel.destroy()
            else:
                connecting.add_done_callback(lambda _: channel.destroy())
            raise
    except _RefusedError:
        raise
    except TransportError as e:
        stream.write(protocol.pack_text(Kind.REFUSED, str(e)))
        raise
    return Greeting(peer, round_trip, channel)


def _connecting(channel: Channel, address: bytes) -> Future[None]:
    """Connect in a thread: where a firewall drops UCX's packets, that takes two minutes."""
    if not _places.acquire(blocking=False):
        raise TransportError(
            f"UCX has been connecting to {MOST_CONNECTING} peers for a while; it has ports of its "
            "own, and each node must reach the other's (UCX_TCP_PORT_RANGE says which they are)"
        )
    connecting = detached(channel.connect, address)
    connecting.add_done_callback(lambda _: _places.release())
    return connecting


async def _read_proof(
    stream: FrameStream, side: str, hellos: tuple[bytes, bytes], options: LinkOptions
) -> bytes:
    mac, address = protocol.unpack_proof(await _read(stream, Kind.PROOF))
    expected = protocol.proof(options.secret or b"", side, hellos, address)
    if not hmac.compare_digest(mac, expected):
        raise TransportError(
            f"the {side} has another shared secret, or none; give all nodes the same one"
        )
    return address


async def _read(stream: FrameStream, wanted: Kind) -> bytes:
    kind, payload = await stream.read()
    if kind == Kind.REFUSED:
        raise _RefusedError(f"the peer refused: {protocol.unpack_text(payload)}")
    if kind != wanted:
        raise TransportError(f"the peer sent {kind.name} where {wanted.name} was expected")
    return payload
