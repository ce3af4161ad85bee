"""What Lynx's transport is measured beside: each a server and a client, two processes.

All send blocks of the same bytes into the same buffers, with the same settings of UCX.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..transport.ucx import Array, Channel, defaults, ucx_api

KIB, MIB = 1 << 10, 1 << 20
ROUND_BYTES = 128 * MIB
IN_FLIGHT = 8
BLOB = memoryview(np.random.default_rng(1).bytes(64 * MIB))
#: Fetches all of a round: bytes of each object, and where they go in turn.
Fetch = Callable[[int, list[bytearray]], None]


def count_of(size: int) -> int:
    return max(2, ROUND_BYTES // size)


def buffers(size: int) -> list[bytearray]:
    return [bytearray(size) for _ in range(max(1, min(count_of(size), 64 * MIB // size)))]


# -- ucxx: a loop, and its own API -----------------------------------------------------------------


def exchange(control: socket.socket, channel: Channel) -> None:
    control.sendall(struct.pack("<I", len(channel.address)) + channel.address)
    (length,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
    channel.connect(control.recv(length, socket.MSG_WAITALL))


def pump(channel: Channel, count: int, post: Callable[[int], Any]) -> None:
    """``count`` messages, ``IN_FLIGHT`` at a time.

    Waiting for events: polling was measured to carry a third of that on two cores.
    """
    requests: list[Any] = []
    for i in range(count):
        if len(requests) == IN_FLIGHT:
            first = requests.pop(0)
            while not first.completed:
                channel._worker.progress_worker_event(1)
        requests.append(post(i))
    while not all(request.completed for request in requests):
        channel._worker.progress_worker_event(1)


def serve_loop(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        control, _ = listener.accept()
    channel = Channel(host)
    exchange(control, channel)
    while raw := control.recv(8, socket.MSG_WAITALL):
        (size,) = struct.unpack("<Q", raw)
        data = Array(BLOB[:size])
        send = channel._endpoint.tag_send
        pump(channel, count_of(size), lambda i: send(data, ucx_api.UCXXTag(i)))  # noqa: B023
        # The other end may need us until it has everything.
        control.setblocking(False)
        while True:
            channel._worker.progress_worker_event(1)
            try:
                if control.recv(1):
                    break
            except BlockingIOError:
                pass
        control.setblocking(True)


@contextmanager
def loop(host: str, port: int) -> Iterator[Fetch]:
    with socket.create_connection((host, port)) as control:
        channel = Channel(host)
        exchange(control, channel)

        def fetch(size: int, outs: list[bytearray]) -> None:
            arrays = [Array(memoryview(out)) for out in outs]
            control.sendall(struct.pack("<Q", size))
            receive = channel._endpoint.tag_recv
            pump(
                channel,
                count_of(size),
                lambda i: receive(arrays[i % len(arrays)], ucx_api.UCXXTag(i)),
            )
            control.sendall(b"x")

        yield fetch


async def awaited(count: int, call: Callable[[int], Awaitable[Any]]) -> None:
    """``call`` for each of ``count`` messages, ``IN_FLIGHT`` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for i in numbers:
            await call(i)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))


async def met(control: socket.socket) -> Any:
    """ucxx's own endpoint to the process at the other end."""
    import ucxx

    mine = bytes(ucxx.get_worker_address())
    control.sendall(struct.pack("<I", len(mine)) + mine)
    (length,) = struct.unpack("<I", control.recv(4, socket.MSG_WAITALL))
    address = ucxx.get_ucx_address_from_buffer(control.recv(length, socket.MSG_WAITALL))
    return await ucxx.create_endpoint_from_worker_address(address, endpoint_error_handling=True)


def serve_ucxx(host: str) -> None:
    async def main(control: socket.socket) -> None:
        with defaults():
            endpoint = await met(control)
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        while raw := await loop.sock_recv(control, 8):
            (size,) = struct.unpack("<Q", raw)
            data = BLOB[:size]
            await awaited(count_of(size), lambda i: endpoint.send(data, i, force_tag=True))  # noqa: B023
            await loop.sock_recv(control, 1)

    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        asyncio.run(main(listener.accept()[0]))


@contextmanager
def with_ucxx(host: str, port: int) -> Iterator[Fetch]:
    running = asyncio.new_event_loop()
    with socket.create_connection((host, port)) as control:
        with defaults():
            endpoint = running.run_until_complete(met(control))

        async def read(size: int, outs: list[bytearray]) -> None:
            views = [memoryview(out) for out in outs]
            control.sendall(struct.pack("<Q", size))
            await awaited(
                count_of(size), lambda i: endpoint.recv(views[i % len(views)], i, force_tag=True)
            )
            control.sendall(b"x")

        yield lambda size, outs: running.run_until_complete(read(size, outs))


def agent(who: str, progresses: bool) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    with defaults():
        return nixl_agent(who, nixl_agent_config(enable_prog_thread=progresses, backends=["UCX"]))


def serve_nixl(host: str) -> None:
    mine = agent("server", progresses=True)
    blob = np.frombuffer(BLOB, np.uint8)
    mine.register_memory([(blob.ctypes.data, blob.size, 0, "")], "DRAM")
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        control, _ = listener.accept()
    metadata = mine.get_agent_metadata()
    control.sendall(struct.pack("<QI", blob.ctypes.data, len(metadata)) + metadata)
    control.recv(1)


@contextmanager
def with_nixl(host: str, port: int) -> Iterator[Fetch]:
    """Reads of the other process's memory, ``IN_FLIGHT`` at a time, prepared beforehand."""
    mine = agent("client", progresses=False)  # it asks all the time
    prepared: dict[int, list[Any]] = {}
    kept: list[list[bytearray]] = []  # what is registered
    with socket.create_connection((host, port)) as control:
        address, length = struct.unpack("<QI", control.recv(12, socket.MSG_WAITALL))
        peer = mine.add_remote_agent(control.recv(length, socket.MSG_WAITALL))

        def prepare(size: int, outs: list[bytearray]) -> list[Any]:
            places = [np.frombuffer(out, np.uint8).ctypes.data for out in outs]
            mine.register_memory([(place, size, 0, "") for place in places], "DRAM")
            theirs = mine.get_xfer_descs([(address, size, 0)], "DRAM")
            ours = [mine.get_xfer_descs([(place, size, 0)], "DRAM") for place in places]
            return [mine.initialize_xfer("READ", each, theirs, peer) for each in ours]

        def finish(handle: Any) -> None:
            while (state := mine.check_xfer_state(handle)) != "DONE":
                assert state == "PROC", state
                time.sleep(0)

        def fetch(size: int, outs: list[bytearray]) -> None:
            if size not in prepared:  # in the round that does not count
                prepared[size] = prepare(size, outs)
                kept.append(outs)
            handles = prepared[size]
            running: list[Any] = []
            for i in range(count_of(size)):
                if len(running) == min(IN_FLIGHT, len(handles)):
                    finish(running.pop(0))
                running.append(handles[i % len(handles)])
                mine.transfer(running[-1])
            for handle in running:
                finish(handle)

        yield fetch


def serve_stream(host: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while raw := await reader.read(8):
            (size,) = struct.unpack("<Q", raw)
            for _ in range(count_of(size)):
                writer.write(BLOB[:size])
                await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, host, 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(main())


@contextmanager
def stream(host: str, port: int) -> Iterator[Fetch]:
    running = asyncio.new_event_loop()
    sock = socket.create_connection((host, port))
    sock.setblocking(False)

    async def read(size: int, outs: list[bytearray]) -> None:
        await running.sock_sendall(sock, struct.pack("<Q", size))
        for i in range(count_of(size)):
            view = memoryview(outs[i % len(outs)])
            while view:
                view = view[await running.sock_recv_into(sock, view) :]

    yield lambda size, outs: running.run_until_complete(read(size, outs))
    sock.close()
    running.close()


# -- LMCache's channel between peers ---------------------------------------------------------------


def channel_of(size: int, buffer: Any, port: int) -> Any:
    """LMCache's, over NIXL, for objects of this size; it finds NIXL by the name of the whole."""
    import nixl_cu12._api
    from lmcache.v1.transfer_channel import CreateTransferChannel

    sys.modules |= {"nixl": nixl_cu12, "nixl._api": nixl_cu12._api}
    with defaults():
        return CreateTransferChannel(
            "nixl",
            async_mode=False,
            role="both",
            buffer_ptr=buffer.ctypes.data,
            buffer_size=buffer.size,
            align_bytes=size,
            tp_rank=0,
            peer_init_url=f"127.0.0.1:{port}",
            device="cpu",
            backends=["UCX"],
        )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def serve_lmcache(size: str) -> None:
    port = free_port()
    kept = channel_of(int(size), np.frombuffer(BLOB, np.uint8), port)
    print(port, flush=True)
    sys.stdin.read()
    del kept


def lmcache(size: int, port: int, rounds: int) -> list[float]:
    """Seconds of each round: what fits into 64 MiB is read at once, as a request's chunks are."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    out = np.zeros(64 * MIB, np.uint8)
    channel = channel_of(size, out, free_port())
    channel.lazy_init_peer_connection("client", "server", f"127.0.0.1:{port}")
    indexes = list(range(out.size // size))

    def place(i: int) -> Any:
        about = (torch.Size([size]), torch.uint8, i, size, 1, 0, MemoryFormat.KV_2LTD)
        return TensorMemoryObj(torch.from_numpy(out), MemoryObjMetadata(*about), None)

    objects = [place(i) for i in indexes]
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(ROUND_BYTES // out.size):
            channel.batched_read(objects, {"sender_id": "server", "remote_indexes": indexes})
        taken.append(time.perf_counter() - started)
        assert out.data == BLOB
    return taken[1:]
