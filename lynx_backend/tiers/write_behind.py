"""Work for a slow tier, done later by threads of its own, in a queue of bounded bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError
from ..keys import ChunkKey, ObjectName
from ..logs import warn_limited

logger = logging.getLogger(__name__)


def _nothing() -> None: ...


@dataclass(frozen=True)
class _Job:
    names: tuple[ObjectName, ...]
    size: int
    run: Callable[[], object]
    dropped: Callable[[], object]


class WriteBehind:
    """Runs jobs about objects in the order they come.

    What does not fit is refused at once: whoever computes KV cache must never wait for a disk.

    Args:
        name: of the threads.
        max_bytes: most that waiting and running jobs hold on to.
        workers: number of threads; they start with the first job, and are daemons.
    """

    def __init__(self, name: str, max_bytes: int, workers: int = 2) -> None:
        if max_bytes < 1 or workers < 1:
            raise InvalidInputError(
                f"a queue needs max_bytes and workers of at least 1, got {max_bytes} and {workers}"
            )
        self._name = name
        self._max_bytes = max_bytes
        self._workers = workers
        self._threads: list[threading.Thread] = []
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[tuple[ObjectName, ...]] = set()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """Held on to now."""
        return self._bytes

    def submit(
        self,
        names: Sequence[ObjectName],
        size: int,
        run: Callable[[], object],
        wait_seconds: float = 0.0,
        dropped: Callable[[], object] = _nothing,
    ) -> bool:
        """Run ``run()`` later, unless a job for the same objects is unfinished: that will do.

        Args:
            wait_seconds: most time to wait for room.
            dropped: called instead of ``run`` when an accepted job is given up, also because
                another one will do. It must not block.

        Returns:
            False when there is no room for ``size`` bytes more, or after :meth:`close`.
        """
        job = _Job(tuple(names), size, run, dropped)
        with self._changed:
            if wait_seconds and size <= self._max_bytes:
                self._changed.wait_for(
                    lambda: self._closed or self._bytes + size <= self._max_bytes, wait_seconds
                )
            if self._closed:
                return False
            if job.names in self._unfinished:
                dropped()
                return True
            if self._bytes + size > self._max_bytes:
                return False
            self._unfinished.add(job.names)
            self._bytes += size
            self._waiting.append(job)
            if len(self._threads) < min(self._workers, len(self._unfinished)):
                name = f"{self._name}-{len(self._threads) + 1}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()
            return True

    def discard(self, keys: Container[ChunkKey]) -> None:
        """Forget jobs of these chunks; when this returns none of them runs."""
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            for job in waiting:
                if _about(job.names, keys):
                    self._drop(job)
                else:
                    self._waiting.append(job)
            self._changed.wait_for(
                lambda: not any(_about(names, keys) for names in self._unfinished)
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted so far and meanwhile is done; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout)

    def close(self, timeout: float) -> int:
        """Refuse new jobs, finish the others for so many seconds; how many were given up.

        The threads have ended when this returns, except one whose job takes longer than that.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(timeout)
        with self._changed:
            left = len(self._waiting)
            while self._waiting:
                self._drop(self._waiting.popleft())
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return left

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                job.run()
            except Exception as e:  # nobody waits for the job; the next one must run all the same
                warn_limited(logger, f"{self._name}-failed", "%s: %r", self._name, e)
            with self._changed:
                self._finish(job)
            del job  # and with it the bytes, while this waits for the next

    def _drop(self, job: _Job) -> None:
        self._finish(job)
        job.dropped()

    def _finish(self, job: _Job) -> None:
        self._unfinished.discard(job.names)
        self._bytes -= job.size
        self._changed.notify_all()


def _about(names: Sequence[ObjectName], keys: Container[ChunkKey]) -> bool:
    return any(name.key in keys for name in names)
