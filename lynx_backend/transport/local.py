"""A link inside one process: a source of objects behind a set bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..errors import InvalidInputError, TransportError
from ..keys import ObjectName
from .base import ObjectSource, Transport, already_fetching
from .pacing import Pacer
from .scheduler import FRAGMENT_BYTES, Fragment, Scheduler

CLOSE_SECONDS = 5.0


class _Fetch(Future[bool]):
    """A future that owns its two buffers until it ends; whoever takes them away ends it."""

    def __init__(
        self, request: str, name: ObjectName, out: memoryview, forget: Callable[[_Fetch], None]
    ) -> None:
        super().__init__()
        self.request = request
        self.name = name
        self.size = len(out)
        self._out: memoryview | None = out
        self._data: memoryview | None = None
        self._forget = forget
        self._lock = threading.Lock()

    def load(self, data: memoryview) -> None:
        """Hold the object until the future ends."""
        with self._lock:
            if self._out is not None:
                self._data = data

    def copy(self, start: int, length: int) -> None:
        """Copy a piece of the object to where it belongs, unless the future has ended."""
        with self._lock:
            if self._out is not None and self._data is not None:
                self._out[start : start + length] = self._data[start : start + length]

    def finish(self, result: bool | TransportError) -> None:
        """End with a result or an error, unless the future has ended."""
        if self._take():
            self.set_running_or_notify_cancel()
            if isinstance(result, bool):
                self.set_result(result)
            else:
                self.set_exception(result)

    def cancel(self) -> bool:
        if self._take():
            super().cancel()
            # Without this, concurrent.futures.wait() would not count the future as done.
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def _take(self) -> bool:
        # Once the buffer is gone nothing writes to it; only then may anybody see the future end.
        with self._lock:
            mine = self._out is not None
            self._out = self._data = None
        if mine:
            self._forget(self)
        return mine


class LocalTransport(Transport):
    """Fetches objects from ``source`` as a link of ``bytes_per_second`` would bring them.

    One thread sends; the time in which it reads an object from the source counts as the link's.

    Args:
        source: where the objects are, e.g. a tier. Not closed by this transport.
        bytes_per_second: rate of the link, None for unlimited.
        fragment_bytes: most bytes an anchor waits for when residuals are under way.
    """

    def __init__(
        self,
        source: ObjectSource,
        bytes_per_second: float | None = None,
        fragment_bytes: int = FRAGMENT_BYTES,
    ) -> None:
        self._source = source
        self._scheduler = Scheduler(fragment_bytes)
        self._pacer = (
            None if bytes_per_second is None else Pacer(bytes_per_second, 2 * fragment_bytes)
        )
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._fetches: dict[tuple[str, ObjectName], _Fetch] = {}
        self._thread = threading.Thread(target=self._run, name="lynx-local-link", daemon=True)
        self._thread.start()

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        self._check_open()
        try:
            return self._source.sizes(names)
        except Exception as e:
            raise TransportError(f"the far end could not look up {len(names)} objects: {e}") from e

    def fetch(self, request: str, name: ObjectName, out: memoryview) -> Future[bool]:
        if out.readonly or not out.c_contiguous:
            raise InvalidInputError(
                f"the buffer for {name} must be writable and contiguous; pass the memoryview of a "
                "bytearray or of a contiguous uint8 tensor"
            )
        fetch = _Fetch(request, name, out.cast("B"), self._forget)
        with self._lock:
            self._check_open()
            if (request, name) in self._fetches:
                raise already_fetching(request, name)
            if self._pacer is not None and not self._fetches:
                self._pacer.resume(time.monotonic())
            self._scheduler.submit(request, name, fetch.size)
            self._fetches[request, name] = fetch
            self._work.notify()
        return fetch

    def cancel(self, request: str) -> None:
        with self._lock:
            mine = [f for f in self._fetches.values() if f.request == request]
        for fetch in mine:
            fetch.cancel()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._work.notify()
            unfinished = list(self._fetches.values())
        for fetch in unfinished:
            fetch.finish(TransportError(f"the link was closed before {fetch.name} had arrived"))
        # A callback may close the link from its own thread. A source that hangs keeps the thread
        # longer than this, but no buffer any more.
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise TransportError("the link is closed; open another transport")

    def _forget(self, fetch: _Fetch) -> None:
        key = fetch.request, fetch.name
        with self._lock:
            del self._fetches[key]
            self._scheduler.cancel(*key)

    def _next(self) -> tuple[Fragment, _Fetch] | None:
        """Wait for something to send; None when closing."""
        with self._lock:
            while not self._closing.is_set():
                fragment = self._scheduler.next()
                if fragment is not None:
                    return fragment, self._fetches[fragment.request, fragment.name]
                self._work.wait()
            return None

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._send(*work)
            del work  # an idle link holds no buffers

    def _send(self, fragment: Fragment, fetch: _Fetch) -> None:
        if fragment.offset == 0:
            # Whatever the source raises concerns this object only: the link must live on.
            try:
                data = self._source.get(fetch.name)
            except Exception as e:
                error = TransportError(f"the far end could not read {fetch.name}: {e}")
                error.__cause__ = e
                fetch.finish(error)
                return
            if data is None or len(data) != fetch.size:
                fetch.finish(False)
                return
            fetch.load(data)
        if self._pacer is not None:
            now = time.monotonic()
            if self._closing.wait(self._pacer.send(fragment.length, now) - now):
                return
        fetch.copy(fragment.offset, fragment.length)
        if fragment.last:
            fetch.finish(True)
