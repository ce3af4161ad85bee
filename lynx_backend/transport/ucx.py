"""The one file that knows UCX: a worker and an endpoint for each connection.

What UCX 1.21 was seen to do, and what follows from it:

* A request cannot be cancelled once its message has begun to arrive. Closing its endpoint by force
  was seen to leave it unfinished for ever, to write the peer's data into its buffer later, and to
  hang; but nothing is written while nobody progresses the worker. So every connection has a worker
  of its own, and one that is given up in the middle of a message is destroyed without another
  progress: that was seen to take milliseconds, to write nothing and to leave no descriptor.
* Endpoints without peer error handling end the process when the peer dies. With it, UCX leaves out
  shared memory unless ``UCX_POSIX_ERROR_HANDLING=y`` says otherwise.
* A peer that writes into our memory (rendezvous by put) may do so after we gave it up. Ours is
  always written by our own worker (``RNDV_SCHEME=get_zcopy``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from .. import metrics
from ..errors import TransportError, UnsupportedError

try:
    from ucxx._lib import libucxx as ucx_api
    from ucxx._lib.arr import Array
except ImportError as e:
    raise UnsupportedError(
        "the UCX transport needs ucxx: pip install 'lynx-backend[ucx-cu12]' (or ucx-cu13); it "
        f"works without a GPU ({e})"
    ) from e

# The very library that ucxx has loaded.
_ucp = ctypes.CDLL("libucp.so.0")
_ucp.ucp_worker_destroy.argtypes, _ucp.ucp_worker_destroy.restype = [ctypes.c_void_p], None

__all__ = [
    "Array",
    "Buffer",
    "Channel",
    "DeviceBuffer",
    "DeviceSlice",
    "defaults",
    "part_of",
    "ucx_api",
]

Buffer = Any
#: Told whether a message went through; the buffer is not touched any more.
Done = Callable[[bool], None]

#: What is set while a worker is made, unless the environment says otherwise: with peer error
#: handling all data over TCP travels in segments of this size, and 8 KiB cost a third of the rate.
_DEFAULTS = {
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
# How long a connection in full flow may keep the thread that all of them share.
_TURN_SECONDS = 0.0005
_environment = threading.Lock()
_SIOCGIFADDR = 0x8915


class DeviceBuffer(Protocol):
    """CUDA memory, as torch, CuPy and numba offer it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class DeviceSlice:
    """Bytes ``[start, start + length)`` of CUDA memory, which stays alive as long as this does."""

    def __init__(self, of: DeviceBuffer, start: int, length: int) -> None:
        interface = dict(of.__cuda_array_interface__)
        address, readonly = interface["data"]
        self._of = of
        self.device = getattr(of, "device", None)
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address + start, readonly),
            "version": 3,
            "strides": None,
        }


def part_of(buffer: Buffer, start: int, length: int) -> Buffer:
    """Bytes ``[start, start + length)`` of host or CUDA memory."""
    if isinstance(buffer, memoryview):
        return buffer[start : start + length]
    return DeviceSlice(buffer, start, length)


class Channel:
    """UCX messages to and from one peer. Not thread-safe: one thread at a time.

    Args:
        host: an address of this node; its network device (and RDMA devices, where there are any)
            is what UCX may use, unless ``UCX_NET_DEVICES`` is set. None leaves the choice to UCX.

    Raises:
        TransportError: UCX refused its settings.
    """

    def __init__(self, host: str | None = None) -> None:
        options = {"RNDV_SCHEME": "get_zcopy"}
        devices = None if host is None else _devices_of(host)
        if devices and "UCX_NET_DEVICES" not in os.environ:
            options["NET_DEVICES"] = ",".join(devices)
        try:
            with defaults():
                self._context: Any = _Context.take(options)
                self._worker = ucx_api.UCXWorker(self._context.of_ucxx)
                self._worker.init_blocking_progress_mode()
                self.address = bytes(self._worker.address.tobytes())
        except ucx_api.UCXError as e:
            raise TransportError(
                f"UCX cannot be started with {options}: {e}; check the UCX_* environment variables "
                "and the limit of open files (ulimit -n), of which a connection takes twelve"
            ) from e
        self._endpoint: Any = None
        self._pending: list[tuple[Any, Buffer, Done]] = []
        self._posted = False

    @property
    def event_fd(self) -> int:
        """Readable when :meth:`progress` has something to do and :meth:`arm` said True before."""
        return int(self._worker.epoll_file_descriptor)

    @property
    def pending(self) -> int:
        """Messages that UCX still holds a buffer of."""
        return len(self._pending)

    def connect(self, address: bytes) -> None:
        """Connect to the peer whose channel has this address."""
        try:
            remote = ucx_api.UCXAddress.create_from_buffer(np.frombuffer(address, np.uint8))
            self._endpoint = self._worker.create_endpoint_from_worker_address(remote, True)
        except (ucx_api.UCXError, ValueError) as e:
            raise TransportError(
                f"UCX finds no way to the peer: {e}; both ends need a network device or shared "
                "memory in common (UCX_TLS, UCX_NET_DEVICES)"
            ) from e

    def send(self, buffer: Buffer, tag: int, done: Done) -> None:
        """Send one message; ``buffer`` must not change until ``done`` is called."""
        self._post(self._endpoint.tag_send, buffer, tag, done)

    def receive(self, buffer: Buffer, tag: int, done: Done) -> None:
        """Receive the message with this tag. A longer one fails, and writes nothing beyond."""
        self._post(self._endpoint.tag_recv, buffer, tag, done)

    def _post(self, call: Callable[..., Any], buffer: Buffer, tag: int, done: Done) -> None:
        if not isinstance(buffer, memoryview):
            _make_current(buffer)
        try:
            request = call(Array(buffer), ucx_api.UCXXTag(tag))
        except ucx_api.UCXError as e:
            raise TransportError(f"UCX refused a message: {e}") from e
        self._pending.append((request, buffer, done))
        self._posted = True

    def progress(self, seconds: float = _TURN_SECONDS) -> bool:
        """Let UCX work and report what is done; whether there may be more to do at once.

        Args:
            seconds: about how long it may take.
        """
        worked = more = False
        until = time.monotonic() + seconds
        while self._worker.progress_once():
            worked = True
            if time.monotonic() > until:
                more = True
                break
        if not (worked or self._posted):
            return False  # nothing can have finished
        self._posted = False
        finished = [entry for entry in self._pending if entry[0].completed]
        if finished:
            self._pending = [entry for entry in self._pending if not entry[0].completed]
            for request, _, done in finished:
                done(_went_through(request))
        return more

    def arm(self) -> bool:
        """Make :attr:`event_fd` tell of the next event; False when there is one already."""
        return bool(self._worker.arm())

    def destroy(self) -> None:
        """Give everything up: from now on UCX touches no buffer. Waits for CUDA's copies alone."""
        worker, endpoint, context = self._worker, self._endpoint, self._context
        pending, self._pending = self._pending, []
        self._worker = self._endpoint = self._context = None
        if pending:
            _discard(worker, endpoint, [request for request, _, _ in pending])
            _wait_for_copies([buffer for _, buffer, _ in pending])
            context.keep()
        else:
            # Closing progresses the worker until the peer has answered or failed.
            args = (worker, endpoint, context)
            threading.Thread(target=_release, args=args, daemon=True, name="lynx-ucx-close").start()


class _Context:
    """UCX's settings and devices. One that had a worker discarded is used again, and again.

    For ucxx knows nothing of that: to it the worker is there for ever, and the context with it.
    """

    _spare: ClassVar[list[_Context]] = []

    def __init__(self, key: object, of_ucxx: Any) -> None:
        self.key, self.of_ucxx = key, of_ucxx
        self._kept = False

    @classmethod
    def take(cls, options: dict[str, str]) -> _Context:
        """One with these options and the environment as it is; UCX reads that when it is made."""
        environ = sorted(item for item in os.environ.items() if item[0].startswith("UCX_"))
        key = (options, environ)
        for context in list(cls._spare):
            if context.key == key:
                with contextlib.suppress(ValueError):  # another thread was faster
                    cls._spare.remove(context)
                    return context
        features = (ucx_api.Feature.TAG, ucx_api.Feature.WAKEUP)
        return cls(key, ucx_api.UCXContext(options, feature_flags=features))

    def keep(self) -> None:
        """Its worker was discarded: let another have it, from now on whenever it has none."""
        self._kept = True
        self.release()

    def release(self) -> None:
        """It has no worker any more."""
        if self._kept:
            self._spare.append(self)


def _release(worker: Any, endpoint: Any, context: _Context) -> None:
    if endpoint is not None:
        with contextlib.suppress(Exception):  # an endpoint that failed is as good as closed
            endpoint.close_blocking(period=10**9, max_attempts=1)
    del endpoint, worker
    context.release()


def _discard(worker: Any, *others: Any) -> None:
    """Free a worker in the middle of messages, and with it its sockets, memory and endpoint.

    UCX's own function is called: ucxx would wait for the messages. Its objects must not notice, so
    they stay: a few kilobytes for each connection that was lost like this. UCX warns of requests
    that were "not returned to mpool".
    """
    metrics.DISCARDED_WORKERS.inc()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((worker, *others)))
    event_fd = worker.epoll_file_descriptor  # ucxx's; UCX closes its own
    _ucp.ucp_worker_destroy(worker.handle)
    os.close(event_fd)


def _wait_for_copies(buffers: list[Buffer]) -> None:
    """Let copies end that UCX had begun into CUDA memory, on streams of its own."""
    for buffer in buffers:
        if not isinstance(buffer, memoryview):
            import torch

            _make_current(buffer)
            torch.cuda.synchronize()


def _make_current(buffer: Buffer) -> None:
    """Let UCX find the CUDA context of some memory in this thread."""
    import torch

    device = getattr(buffer, "device", None)
    index = getattr(device, "index", None) or getattr(device, "id", None) or 0
    torch.cuda.set_device(index)


def _went_through(request: Any) -> bool:
    try:
        request.check_error()
    except Exception:  # ucxx raises one class for each of UCX's statuses
        return False
    return True


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Lynx's defaults in the environment, where UCX reads them, and nobody else for long."""
    with _environment:
        missing = {k: v for k, v in _DEFAULTS.items() if k not in os.environ}
        os.environ.update(missing)
        try:
            yield
        finally:
            for name in missing:
                del os.environ[name]


def _devices_of(host: str) -> list[str]:
    """The network device that has this address, and the ports of this node's RDMA devices."""
    for _, device in socket.if_nameindex():
        if host in _addresses_of(device):
            ports = Path("/sys/class/infiniband").glob("*/ports/*")
            return [device, *(f"{port.parent.parent.name}:{port.name}" for port in sorted(ports))]
    return []


def _addresses_of(device: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        raw = ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        found.append(socket.inet_ntoa(raw[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            raw6, *_, name = line.split()
            if name == device:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw6)))
    return found
