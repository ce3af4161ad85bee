"""A tier that fails is left alone for a while, so that it costs time once and not at every call."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .. import metrics
from ..errors import TierError, TierFullError, TierUnavailableError
from ..keys import ObjectName
from ..logs import warn_limited
from .base import Buffer, Tier, TierStats, failing_as_tier_error, flat

logger = logging.getLogger(__name__)

FAILURES = 3
PATIENCE_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class Breaker:
    """Opens when calls fail one after the other, and lets one call try when its pause is over.

    It opens after :data:`FAILURES` failures in a row, or as soon as they took
    :data:`PATIENCE_SECONDS` together: a server that refuses connections is given more tries than
    one that lets every call wait for its timeout. The pause doubles with every try that fails, with
    jitter, so that the processes that share a server do not come back at the same instant.

    Args:
        what: for messages, e.g. ``"reading from tier redis"``.
        changed: called with True when it opens and False when it closes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        what: str,
        changed: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._lost = 0.0
        self._pause = FIRST_PAUSE_SECONDS
        self._open_until: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for one that tries now and then."""
        return self._open_until is not None

    @property
    def is_paused(self) -> bool:
        """Whether even a call that tries would be refused."""
        until = self._open_until
        return until is not None and self._clock() < until

    @contextmanager
    def call(self, ignored: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Around a call. What it raises counts as a failure unless it is one of the ``ignored``.

        Raises:
            TierUnavailableError: the breaker is open; the call was not made.
        """
        start = self.enter()
        failure: BaseException | None = None
        try:
            yield
        except BaseException as e:  # also one that no tier should raise: it was no answer
            failure = None if isinstance(e, ignored) else e
            raise
        finally:
            self.leave(start, failure)

    def enter(self) -> float:
        """Begin a call that is no block of code; :meth:`leave` or :meth:`release` ends it.

        Returns:
            when it began, for :meth:`leave`.

        Raises:
            TierUnavailableError: as :meth:`call`.
        """
        with self._lock:
            now = self._clock()
            if self._open_until is not None:
                if now < self._open_until or self._trying:
                    raise TierUnavailableError(
                        f"{self._what} failed {self._failures} times in a row; tried again in "
                        f"{max(0.0, self._open_until - now):.1f} s"
                    )
                self._trying = True
            return now

    def release(self) -> None:
        """End a call that told nothing, neither good nor bad."""
        with self._lock:
            self._trying = False

    def leave(self, start: float, failure: BaseException | None) -> None:
        """End a call that failed, or did not (None)."""
        with self._lock:
            now = self._clock()
            was_open = self.is_open
            if failure is None:
                self._failures, self._lost = 0, 0.0
                self._pause = FIRST_PAUSE_SECONDS
                self._open_until = None
                self._trying = False
            else:
                self._failures += 1
                self._lost += now - start
                if self._trying or (
                    not was_open and (self._failures >= FAILURES or self._lost >= PATIENCE_SECONDS)
                ):
                    self._open_until = now + self._pause * random.uniform(0.75, 1.25)
                    self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
                    self._trying = False
            is_open = self.is_open
        if is_open and not was_open:
            why = failure if isinstance(failure, TierError) else repr(failure)
            warn_limited(logger, f"{self._what}-open", "%s is paused: %s", self._what, why)
        elif was_open and not is_open:
            warn_limited(logger, f"{self._what}-closed", "%s works again", self._what)
        if is_open != was_open:
            self._changed(is_open)


class GuardedTier(Tier):
    """A tier behind three breakers: for reading, for writing and for deleting.

    A full server refuses writes, answers reads, and gets well by deleting.

    Args:
        tier: closed with this.
        full_is_failure: whether TierFullError counts, as it does when finding out costs sending
            the object.
    """

    def __init__(self, tier: Tier, full_is_failure: bool = False) -> None:
        self.name = tier.name
        self.keeps_capacity = tier.keeps_capacity
        self._tier = tier
        self._ignored = () if full_is_failure else (TierFullError,)
        self._reading = Breaker(f"reading from tier {self.name}", self._show)
        self._writing = Breaker(f"writing to tier {self.name}", self._show)
        self._deleting = Breaker(f"deleting from tier {self.name}", self._show)
        self._closed = False
        self._show(False)

    @property
    def paused(self) -> tuple[str, ...]:
        breakers = {
            "reading": self._reading, "writing": self._writing, "deleting": self._deleting
        }  # fmt: skip
        return tuple(what for what, breaker in breakers.items() if breaker.is_open)

    def put(self, name: ObjectName, data: Buffer) -> None:
        view = flat(data)  # what is wrong with the input says nothing about the tier
        self._tier.check_size(view.nbytes)
        with self._call(self._writing, self._ignored):
            self._tier.put(name, view)

    def check_size(self, size: int) -> None:
        self._tier.check_size(size)

    def get(self, name: ObjectName) -> memoryview | None:
        with self._call(self._reading):
            return self._tier.get(name)

    def get_many(self, names: Sequence[ObjectName]) -> list[memoryview | None]:
        with self._call(self._reading):
            return self._tier.get_many(names)

    def sizes(self, names: Sequence[ObjectName]) -> list[int | None]:
        with self._call(self._reading):
            return self._tier.sizes(names)

    def delete(self, names: Sequence[ObjectName]) -> None:
        with self._call(self._deleting):
            self._tier.delete(names)

    def names(self) -> Iterator[ObjectName]:
        with self._call(self._reading):
            return self._tier.names()

    def stats(self) -> TierStats:
        with self._call(self._reading):
            return self._tier.stats()

    def close(self) -> None:
        self._closed = True
        self._tier.close()

    @contextmanager
    def _call(self, breaker: Breaker, ignored: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        if self._closed:
            raise TierError(f"tier {self.name} is closed; open a new one")
        with breaker.call(ignored), failing_as_tier_error(self.name):
            yield

    def _show(self, _: bool) -> None:
        metrics.BREAKER_OPEN.labels(self.name).set(float(bool(self.paused)))
