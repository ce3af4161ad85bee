"""One request's cache on its way: ABSENT -> COARSE -> FULL, or FAILED and recomputed.

Knows no engine. The engine owns the tensor, decides when to look, and says when nothing reads the
cache so that it may be refined; everything that can go wrong on the way ends in FAILED.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from . import metrics
from .errors import InvalidInputError, TransportError
from .keys import ChunkKey, ObjectName, Part
from .logs import warn_limited
from .states import State
from .store import ChunkStore
from .transport import Transport

__all__ = ["ProgressiveRequest", "State", "Timeline"]

logger = logging.getLogger(__name__)


@dataclass
class Timeline:
    """When things happened, in ``time.monotonic()`` seconds; None for what has not.

    Attributes:
        started: the request was made.
        anchors, residuals: each chunk's object landed, decoded or not.
        coarse: the cache could first be used.
        residual: the last residual was in and checked.
        full: the cache was Q_full.
    """

    started: float
    anchors: list[float | None]
    residuals: list[float | None]
    coarse: float | None = None
    residual: float | None = None
    full: float | None = None


class ProgressiveRequest:
    """Fetches the chunks of one prompt and decodes them into a tensor the caller owns.

    Starts at once and never raises afterwards: what fails is :attr:`state` FAILED, a metric and a
    log line. Until FULL or FAILED the tensor is written by this object only. One thread decodes
    each anchor when it lands, while the next ones are on their way; it ends by itself.

    Args:
        store: whose codec made the objects and checks them.
        transport: brings the objects.
        request_id: unique among the transport's unfinished requests.
        keys: of the prompt's chunks, in order.
        kv: ``[2 | 1, layers, tokens, kv_heads, head_dim]`` of the whole prompt, on the codec's
            device, of the dtype the cache was encoded from.
        chunk_tokens: tokens of each chunk but the last, which may have fewer.

    Attributes:
        timeline: when things happened.
        bytes_received: by part, bytes of objects that landed whole.
        bytes_expected: by part, bytes of all objects; 0 until they are asked for.
        residual_lost: True once it is known that FULL will not be reached because a residual is
            absent or did not arrive. The cache stays COARSE.
        error: why the state is FAILED, else None.

    Raises:
        InvalidInputError: ``kv`` is not such a tensor or the number of keys does not fit it.
    """

    def __init__(
        self,
        store: ChunkStore,
        transport: Transport,
        request_id: str,
        keys: Sequence[ChunkKey],
        kv: torch.Tensor,
        chunk_tokens: int = 256,
    ) -> None:
        if kv.dim() != 5 or kv.shape[2] < 1 or chunk_tokens < 1:
            raise InvalidInputError(
                "kv must be [2 | 1, layers, tokens, kv_heads, head_dim] with at least one token "
                f"and chunk_tokens at least 1, got shape {tuple(kv.shape)} and {chunk_tokens}"
            )
        starts = range(0, kv.shape[2], chunk_tokens)
        slices = [kv[:, :, start : start + chunk_tokens] for start in starts]
        if len(keys) != len(slices):
            raise InvalidInputError(
                f"{kv.shape[2]} tokens are {len(slices)} chunks of {chunk_tokens}, got {len(keys)} "
                "keys; make them with chunk_keys() of the same tokens and chunk_tokens"
            )
        self.request_id = request_id
        self.timeline = Timeline(time.monotonic(), [None] * len(keys), [None] * len(keys))
        self.bytes_received = dict.fromkeys(Part, 0)
        self.bytes_expected = dict.fromkeys(Part, 0)
        self.residual_lost = False
        self.error: str | None = None
        self._codec = store.codec
        self._store = store
        self._transport = transport
        self._keys = tuple(keys)
        self._slices = slices
        self._objects: dict[ObjectName, npt.NDArray[np.uint8]] = {}
        self._futures: list[Future[bool]] = []
        self._missing = dict.fromkeys(Part, len(keys))
        self._state = State.ABSENT
        self._changed = threading.Condition()
        self._stop: str | None = None
        # Held by whoever writes to the tensor; taken before _changed when both are needed.
        self._writing = threading.RLock()
        self._inbox: SimpleQueue[tuple[Part, int, Future[bool]]] = SimpleQueue()
        threading.Thread(target=self._run, name=f"lynx-{request_id}", daemon=True).start()

    # -- for the engine ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """How much of the cache is in the tensor now."""
        return self._state

    def wait(self, state: State, timeout: float | None = None) -> bool:
        """Wait until the cache is at least ``state`` (COARSE or FULL), at most ``timeout`` seconds.

        FULL comes only from :meth:`refine`, or by itself when all residuals were there before the
        anchors had been decoded.

        Returns:
            whether it is; False at once when it never will be.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._state >= state or (state == State.FULL and self.residual_lost),
                timeout,
            )
            return state <= self._state < State.FAILED

    def residual_ready(self, timeout: float = 0.0) -> bool:
        """Whether :meth:`refine` has all it needs, waiting for it at most ``timeout`` seconds.

        False at once when it never will have, and when there is nothing left to refine.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._refinable or self.residual_lost or self._state >= State.FULL, timeout
            )
            return self._refinable

    def refine(self) -> bool:
        """Turn the coarse cache into Q_full, in place. Nothing may be reading it.

        Returns:
            whether the cache is FULL now. False leaves it as it was when the residuals are not
            all there, and FAILED when they turn out not to belong to their anchors.
        """
        if self._refinable:
            self._refine()
        return self._state == State.FULL

    def cancel(self) -> None:
        """Give up unless FULL: FAILED, and when this returns the tensor is not written any more."""
        self._end("cancelled")

    @property
    def _refinable(self) -> bool:
        return self._state == State.COARSE and self.timeline.residual is not None

    # -- the request's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._fetch()
            while self._stop is None and not self._settle():
                self._accept(*self._inbox.get())
        except Exception as e:
            self._fail(e)
        # What is still on its way is of no use: residuals after one was lost, or everything.
        for future in self._futures:
            future.cancel()
        self._futures.clear()

    def _fetch(self) -> None:
        """Ask for everything, anchors first."""
        names = [key.object(part) for part in Part for key in self._keys]
        sizes = self._transport.sizes(names)
        absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
        for name, size in zip(names, sizes, strict=True):
            self.bytes_expected[name.part] += size or 0
        for name in absent:
            self._count(name.part, "miss")
        if absent and absent[0].part == Part.ANCHOR:
            self._end(f"{absent[0]} is not there")
        elif absent:
            self._lose_residual()
        for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
            if self._stop is not None or (absent and name.part == Part.RESIDUAL):
                break
            self._objects[name] = data = np.empty(size or 0, np.uint8)
            future = self._transport.fetch(self.request_id, name, data.data)
            self._futures.append(future)
            future.add_done_callback(partial(self._land, name.part, at % len(self._keys)))

    def _land(self, part: Part, index: int, future: Future[bool]) -> None:
        """Note that a fetch has ended; called by the transport."""
        if not future.cancelled() and future.exception() is None and future.result():
            at = self.timeline
            (at.anchors if part == Part.ANCHOR else at.residuals)[index] = time.monotonic()
        self._inbox.put((part, index, future))

    def _accept(self, part: Part, index: int, future: Future[bool]) -> None:
        """Check an object that landed; decode it if it is an anchor."""
        name = self._keys[index].object(part)
        if future.cancelled():
            self._end("cancelled")
            return
        try:
            arrived = future.result()
        except TransportError as e:
            self._count(part, "error")
            if part == Part.ANCHOR:
                raise
            self._report(e)
            self._lose_residual()
            return
        if not arrived:
            self._count(part, "miss")
            if part == Part.ANCHOR:
                self._end(f"{name} is gone")
            else:
                self._lose_residual()
            return
        data = self._objects.get(name)
        if data is None:
            return  # failed meanwhile
        self.bytes_received[part] += data.size
        metrics.BYTES.labels(part.label, "link", "in").inc(data.size)
        try:
            if part == Part.ANCHOR:
                self._decode(index, data)
            else:
                self._store.validate(name, data.data)
        except Exception:
            self._count(part, "refused")
            raise
        self._count(part, "hit")
        self._missing[part] -= 1

    def _decode(self, index: int, anchor: npt.NDArray[np.uint8]) -> None:
        key = self._keys[index].digest
        with self._writing:
            if self._state == State.ABSENT:
                self._codec.decode(anchor.data, out=self._slices[index], key=key)

    def _settle(self) -> bool:
        """Move to the state that what is in allows; whether nothing more can come."""
        if self._missing[Part.ANCHOR]:
            return False
        at = self.timeline
        # With all residuals landed, the time to check them is short, and COARSE is not worth it.
        if self._state == State.ABSENT and None in at.residuals:
            self._move(State.COARSE)
        if self.residual_lost:
            return True
        if self._missing[Part.RESIDUAL]:
            return False
        lead = max(filter(None, at.residuals)) - max(filter(None, at.anchors))
        metrics.ANCHOR_LEAD_SECONDS.observe(max(0.0, lead))
        with self._changed:
            at.residual = time.monotonic()
            self._changed.notify_all()
        if self._state == State.ABSENT:
            self._refine()
        return True

    # -- any thread --------------------------------------------------------------------------------

    def _refine(self) -> None:
        with self._writing:
            try:
                for key, part in zip(self._keys, self._slices, strict=True):
                    if self._state >= State.FULL:
                        return
                    if self._stop is not None:
                        self._end(self._stop)
                        return
                    anchor, residual = (self._objects[key.object(p)].data for p in Part)
                    self._codec.refine(part, anchor, residual, key.digest)
            except Exception as e:
                self._fail(e)
                return
            self._move(State.FULL)
            self._objects.clear()

    def _move(self, state: State) -> None:
        with self._changed:
            if self._state >= State.FULL:
                return
            now = time.monotonic()
            if self.timeline.coarse is None:
                self.timeline.coarse = now
            if state == State.FULL:
                self.timeline.full = now
            self._state = state
            self._changed.notify_all()

    def _lose_residual(self) -> None:
        with self._changed:
            self.residual_lost = True
            self._changed.notify_all()

    def _end(self, why: str) -> bool:
        """FAILED unless FULL; whether this call was the first to ask for it."""
        with self._changed:
            first = self._stop is None and self._state < State.FULL
            if first:
                self._stop = why
        if first:
            # This also wakes the request's thread, with the ends of its fetches.
            self._transport.cancel(self.request_id)
        # Only when nobody writes may anybody see FAILED: the tensor is then reused.
        with self._writing, self._changed:
            if self._state < State.FULL:
                self.error = self._stop
                self._state = State.FAILED
                self._objects.clear()
                self._changed.notify_all()
        return first

    def _fail(self, why: Exception) -> None:
        if self._end(f"{type(why).__name__}: {why}"):
            self._report(why)

    def _report(self, why: Exception) -> None:
        kind = type(why).__name__
        metrics.ERRORS.labels(kind).inc()
        warn_limited(
            logger, f"request-{kind}", "request %s has to be recomputed: %s", self.request_id, why
        )

    @staticmethod
    def _count(part: Part, result: str) -> None:
        metrics.OBJECTS.labels(part.label, "link", "fetch", result).inc()
