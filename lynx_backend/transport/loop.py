"""A thread that owns an event loop, and how other threads use it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from ..errors import TransportError

_T = TypeVar("_T")


def detached(call: Callable[..., _T], *args: object) -> Future[_T]:
    """Run ``call`` in a daemon thread of its own, which nothing ever waits for.

    For what may hang for minutes and cannot be told to stop, such as a connection or a name that a
    firewall swallows: an executor's threads would run out, and hold up the end of the process.
    """
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only ignored

    def run() -> None:
        try:
            result = call(*args)
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name="lynx-detached").start()
    return future


class LoopThread:
    """An asyncio event loop in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def soon(self, call: Callable[..., object], *args: object) -> bool:
        """Run ``call`` in the thread, some time; False when the thread has ended."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # closed
            return False
        return True

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run ``work`` in the thread."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise TransportError("the link is closed; open another transport") from None

    def wait(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """The result of ``work``; TransportError when it takes longer than ``seconds``."""
        future = self.start(asyncio.wait_for(work, seconds))
        try:
            # The loop keeps the limit; a little more time only in case the loop itself hangs.
            return future.result(seconds + 1.0)
        except (asyncio.TimeoutError, FutureTimeout):
            future.cancel()
            raise TransportError(f"no answer within {seconds:g} s") from None

    def stop(self, seconds: float) -> None:
        """End the loop and, from another thread, wait for it."""
        self.soon(self.loop.stop)
        if not self.current:
            self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
