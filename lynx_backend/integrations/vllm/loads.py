"""A worker's half: brings requests' caches, anchors of all before residuals of any, into pages.

Decoding goes into host memory of its own, by threads of its own; only the engine's thread writes
to pages, when a request's anchors are all decoded and, on the scheduler's order, when its cache is
refined. So a late object cannot reach blocks that were given to somebody else.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ...errors import LynxError
from ...keys import ChunkKey
from ...layout import KVLayout
from ...logs import warn_limited
from ...progressive import ProgressiveRequest
from ...states import State
from ...store import ChunkStore
from ...store_transport import StoreTransport
from ...transport import Transport
from .arrivals import Arrivals
from .orders import Load

logger = logging.getLogger(__name__)

WritePages = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class _Loading:
    """One request's cache on its way.

    Attributes:
        kv: of the chunks that are loaded, [2, layers, tokens, kv_heads, head_dim].
        part: the tokens of ``kv`` that are written to pages.
        slots: where each of them goes.
        reported: what the scheduler knows.
    """

    request: ProgressiveRequest
    kv: torch.Tensor
    part: slice
    slots: torch.Tensor
    reported: State = State.ABSENT
    refining: bool = False


class Loads:
    """All loads of one worker. Called by the engine's thread only; never raises afterwards.

    Args:
        store: where the objects are; not closed by this.
        layout: of a full chunk.
        keys: makes the keys of a prompt's chunks, from token 0 on.
        write: ``write(kv, slots)`` copies ``[2, layers, tokens, kv_heads, head_dim]`` to pages.
        block_tokens: tokens of a block.
    """

    def __init__(
        self,
        store: ChunkStore,
        layout: KVLayout,
        keys: Callable[[Load], Sequence[ChunkKey]],
        write: WritePages,
        block_tokens: int,
    ) -> None:
        self._store = store
        self._layout = layout
        self._keys = keys
        self._write = write
        self._block = block_tokens
        self.transport: Transport = StoreTransport(store)
        self._refiner = ThreadPoolExecutor(1, "lynx-refine")
        self._loads: dict[str, _Loading] = {}
        self._landed: set[str] = set()
        self._news: dict[str, Counter[State]] = {}
        self._arrivals = Arrivals()

    def start(self, load: Load) -> None:
        """Start loading a request."""
        try:
            self._loads[load.request_id] = self._started(load)
        except LynxError as e:
            self._warn("start", load.request_id, e)
            self._end(load.request_id, landed=False)

    def poll(self) -> set[str]:
        """Write to pages what can be, and return the requests whose load has ended since.

        Such a request's blocks are not written any more unless :meth:`write` is called. Whether
        they hold anything is in :meth:`news`.
        """
        self._arrivals.observe(time.monotonic(), self._requests())
        for request_id, loading in list(self._loads.items()):
            state = loading.request.state
            if loading.reported is State.ABSENT:
                if state in (State.COARSE, State.FULL):
                    self._land(request_id, loading, state)
                elif state is State.FAILED:
                    self._end(request_id, landed=False)
            elif state is State.FULL and loading.reported is State.COARSE:
                loading.reported = State.FULL
                self._say(request_id, State.FULL)
            elif state is State.FAILED or loading.request.residual_lost:
                self._end(request_id, landed=True)
            elif not loading.refining and loading.request.residual_ready():
                loading.refining = True
                self._refiner.submit(loading.request.refine)
        landed, self._landed = self._landed, set()
        return landed

    def news(self) -> dict[str, Counter[State]]:
        """What :meth:`poll` found, once."""
        news, self._news = self._news, {}
        return news

    def waits(self) -> dict[str, float]:
        """Of requests whose anchors are there, seconds until the residual is expected."""
        if not self._loads:
            return {}
        waits = self._arrivals.waits(self._requests())
        return {
            name: waits[name] for name, each in self._loads.items() if each.reported is State.COARSE
        }

    def write(self, request_id: str) -> None:
        """Write Q_full to the request's pages, unless they hold it already; its load ends."""
        loading = self._loads.pop(request_id, None)
        if loading is not None:
            assert loading.request.state is State.FULL
            self._write(loading.kv[:, :, loading.part], loading.slots)

    def drop(self, request_id: str) -> None:
        """Stop a load. One that had not landed is among those that :meth:`poll` returns next."""
        loading = self._loads.get(request_id)
        if loading is None:
            return
        loading.request.cancel()
        if loading.reported is State.ABSENT:
            self._end(request_id, landed=False)
        else:
            del self._loads[request_id]

    def close(self) -> None:
        """Stop all loads."""
        for loading in self._loads.values():
            loading.request.cancel()
        self._loads.clear()
        self._refiner.shutdown()
        self.transport.close()

    # -- details -----------------------------------------------------------------------------------

    def _requests(self) -> dict[str, ProgressiveRequest]:
        return {name: loading.request for name, loading in self._loads.items()}

    def _started(self, load: Load) -> _Loading:
        chunk = self._layout.tokens
        skipped = load.first // chunk
        start = skipped * chunk
        layout = self._layout.with_tokens(len(load.tokens) - start)
        kv = torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))
        positions = torch.arange(load.first, load.end)
        blocks = torch.tensor(load.blocks)
        slots = blocks[positions // self._block] * self._block + positions % self._block
        keys = self._keys(load)[skipped:]
        request = ProgressiveRequest(
            self._store, self.transport, load.request_id, keys, kv, chunk_tokens=chunk
        )
        return _Loading(request, kv, slice(load.first - start, load.end - start), slots)

    def _land(self, request_id: str, loading: _Loading, state: State) -> None:
        self._write(loading.kv[:, :, loading.part], loading.slots)
        loading.reported = state
        self._landed.add(request_id)
        self._say(request_id, State.COARSE)
        if state is State.FULL:
            self._say(request_id, State.FULL)
            del self._loads[request_id]

    def _end(self, request_id: str, landed: bool) -> None:
        """A load has failed; say so."""
        loading = self._loads.pop(request_id, None)
        if loading is not None:
            loading.request.cancel()
        if not landed:
            self._landed.add(request_id)
        self._say(request_id, State.FAILED)

    def _say(self, request_id: str, state: State) -> None:
        self._news.setdefault(request_id, Counter())[state] += 1

    @staticmethod
    def _warn(op: str, request_id: str, why: Exception) -> None:
        warn_limited(logger, f"vllm-{op}", "could not %s loading %s: %s", op, request_id, why)
