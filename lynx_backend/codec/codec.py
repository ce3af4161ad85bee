"""The public codec: torch tensors in, self-describing objects out, and back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .. import wire
from ..errors import CorruptObjectError, FormatMismatchError, InvalidInputError, UnsupportedError
from ..keys import Part
from ..layout import DTYPE_BYTES, KVLayout
from . import cpu
from .grid import grid_of
from .reference import choose_sinks
from .spec import PROFILES, SINK_RATIO, CodecSpec, PayloadPlan

T = TypeVar("T")
Object = torch.Tensor | bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
Ints = npt.NDArray[np.int64]
_TORCH_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}
_AXES = "[2, layers, tokens, kv_heads, head_dim] (or [1, layers, tokens, 1, latent] for MLA)"


class Codec:
    """Turns a chunk of KV cache into an anchor and a residual object, and back.

    Safe to use from several threads. Works on the caller's tensors; results are new tensors unless
    ``out`` is given.

    Args:
        spec: how to quantize; two codecs exchange objects exactly when their specs are equal.
        device: ``"cpu"``.
        threads: threads that share one call; default: ``torch.get_num_threads()``.

    Raises:
        UnsupportedError: no implementation for ``device`` in this installation.
    """

    def __init__(
        self, spec: CodecSpec | None = None, device: str = "cpu", threads: int | None = None
    ) -> None:
        if torch.device(device).type != "cpu":
            raise UnsupportedError(f"no codec for device {device!r} here; use device='cpu'")
        if threads is not None and threads < 1:
            raise InvalidInputError(f"threads must be at least 1, got {threads}")
        self.spec = spec or CodecSpec()
        self.threads = threads or torch.get_num_threads()
        grid, spec = grid_of(self.spec), self.spec
        self._wire_spec = spec.pack()
        self._bits = np.array(
            [spec.anchor_bits, spec.residual_bits, spec.levels, spec.bias], np.int64
        )
        thresholds = np.full(255, np.inf, np.float32)
        thresholds[: len(grid.thresholds)] = grid.thresholds
        codes = np.zeros(256, np.uint8)
        codes[: len(grid.codes)] = grid.codes
        self._rules = (PROFILES.index(spec.profile), self._bits, spec.chunk, spec.page_tokens)
        self._grid = (np.float32(grid.scale), grid.uniform)
        self._tables = (thresholds, codes, grid.values)

    # -- encode ------------------------------------------------------------------------------------

    def encode(
        self, kv: torch.Tensor, key: bytes = wire.NO_KEY
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode one chunk.

        Args:
            kv: ``[2, layers, tokens, kv_heads, head_dim]`` (or ``[1, layers, tokens, 1, latent]``),
                bfloat16, float16 or float32, on the CPU, any tokens >= 1; may be a strided view.
            key: 32 bytes written into both objects (``ChunkKey.digest``).

        Returns:
            anchor and residual, each a 1-D uint8 tensor: a complete self-describing object.

        Raises:
            InvalidInputError: wrong shape, dtype or device; or an element that is NaN, infinite or
                beyond ±65504, which no reader of the cache could use either.
        """
        layout, kv = _layout_of(kv), _rows_together(kv)
        plan = PayloadPlan.of(self.spec, layout)
        x, dtype, strides, shape = _memory(kv, layout)
        chosen = self._exact_tokens(x, dtype, strides, shape)
        exact = np.zeros(layout.tokens, np.bool_)
        exact[chosen] = True
        anchor = _new_object(plan.anchor_bytes(len(chosen)))
        residual = _new_object(plan.residual_bytes)
        payloads = [t.numpy()[wire.HEADER_BYTES :] for t in (anchor, residual)]

        def run(first: int, last: int) -> int:
            bad: int = cpu.encode_units(
                x, dtype, strides, shape, exact, *self._rules, *self._grid, *self._tables[:2],
                *payloads, _sections(plan), first, last,
            )  # fmt: skip
            return bad

        bad = sum(self._spread(run, plan.units))
        if bad:
            raise InvalidInputError(
                f"the cache holds NaN, infinity or values beyond ±65504 ({bad} in the first page "
                "that has any); it was computed wrongly or not filled: do not store it"
            )
        if len(chosen):
            rows = kv[:, :, torch.from_numpy(chosen)].permute(2, 1, 0, 3, 4).contiguous()
            tail = payloads[0][plan.exact_offset :]
            tail[: 4 * len(chosen)] = chosen.astype("<u4").view(np.uint8)
            tail[4 * len(chosen) :] = _bits_of(rows).reshape(-1).view(np.uint8)
        headers = wire.seal(self._wire_spec, layout, key, [p.data for p in payloads])
        for tensor, header in zip((anchor, residual), headers, strict=True):
            tensor.numpy()[: wire.HEADER_BYTES] = np.frombuffer(header, np.uint8)
        return anchor, residual

    # -- decode ------------------------------------------------------------------------------------

    def decode(
        self,
        anchor: Object,
        residual: Object | None = None,
        out: torch.Tensor | None = None,
        key: bytes | None = None,
    ) -> torch.Tensor:
        """Rebuild a chunk: Q_anchor from the anchor alone, Q_full with the residual.

        Args:
            anchor, residual: objects from :meth:`encode`: 1-D uint8 tensors on the CPU, or bytes.
            out: written in place when given: the shape and dtype of the encoded cache, may be a
                strided view. Untouched when the objects are refused.
            key: when given, the objects must carry it (``ChunkKey.digest``).

        Raises:
            CorruptObjectError: an object is damaged.
            FormatMismatchError: an object is whole but of another spec, part, key or encoding.
            InvalidInputError: an argument is not of the kind described, or ``out`` does not have
                the shape and dtype of the encoded cache.
        """
        header = self.validate(anchor, Part.ANCHOR, key)
        coded, extra = _payload(anchor), np.empty(0, np.uint8)
        if residual is not None:
            wire.expect_same_chunk(header, self.validate(residual, Part.RESIDUAL, key))
            extra = _payload(residual)
        layout = header.layout
        plan = PayloadPlan.of(self.spec, layout)
        count = plan.exact_count(header.payload_bytes, self.spec.exact_tokens)
        tail = coded[plan.exact_offset :]
        chosen = tail[: 4 * count].copy().view("<u4").astype(np.int64)
        if np.any(np.diff(chosen, prepend=-1) <= 0) or np.any(chosen >= layout.tokens):
            raise FormatMismatchError(
                f"exact token indices {chosen.tolist()} are not ascending below {layout.tokens}"
            )
        bad = cpu.count_impossible_scales(
            coded, _sections(plan), plan.units, plan.pages, layout.channels
        )
        if bad:
            raise CorruptObjectError(
                f"anchor holds {bad} page scales that no encoder writes; delete it"
            )
        kv = _target(out, layout)
        whole = _rows_together(kv)
        x, dtype, strides, shape = _memory(whole, layout)

        def run(first: int, last: int) -> None:
            cpu.decode_units(
                coded, extra, residual is not None, shape, *self._rules, *self._grid,
                self._tables[2], x, dtype, strides, _sections(plan), first, last,
            )  # fmt: skip

        self._spread(run, plan.units)
        if count:
            raw = torch.from_numpy(tail[4 * count :].copy()).view(whole.dtype)
            rows = raw.view(count, layout.layers, layout.kv, layout.heads, layout.head_dim)
            whole[:, :, torch.from_numpy(chosen)] = rows.permute(2, 1, 0, 3, 4)
        if whole is not kv:
            kv.copy_(whole)
        return kv

    def refine(
        self,
        coarse: torch.Tensor,
        anchor: Object,
        residual: Object,
        key: bytes | None = None,
    ) -> torch.Tensor:
        """Turn ``coarse`` in place into what ``decode(anchor, residual)`` gives, bit for bit.

        Raises:
            as :meth:`decode`; ``coarse`` is then unchanged.
        """
        return self.decode(anchor, residual, coarse, key)

    def bits_per_element(self, *objects: Object) -> float:
        """Bits on the wire per cache element, headers and scales included.

        Args:
            objects: the anchor, or anchor and residual, of one chunk.
        """
        if not objects:
            raise InvalidInputError("give the anchor, or anchor and residual, of one chunk")
        views = [_view(o) for o in objects]
        return 8 * sum(map(len, views)) / wire.parse(views[0]).layout.elements

    def validate(self, data: Object, part: Part, key: bytes | None = None) -> wire.Header:
        """Check that ``data`` is a whole object of this spec, of that part and (if given) key.

        Raises:
            CorruptObjectError, FormatMismatchError: it is not.
        """
        header = wire.verify(_view(data))
        wire.expect(header, part, self._wire_spec, key)
        plan = PayloadPlan.of(self.spec, header.layout)
        if part == Part.ANCHOR:
            plan.exact_count(header.payload_bytes, self.spec.exact_tokens)
        elif header.payload_bytes != plan.residual_bytes:
            raise FormatMismatchError(
                f"residual payload has {header.payload_bytes} bytes; its layout needs "
                f"{plan.residual_bytes}"
            )
        return header

    def _exact_tokens(self, x: Words, dtype: int, strides: Ints, shape: Ints) -> Ints:
        spec = self.spec
        if not spec.exact_tokens:
            return np.empty(0, np.int64)
        layers = spec.sink_layers(int(shape[1]))
        small = cpu.count_small_keys(
            x, dtype, strides, shape, layers.step, spec.page_tokens, SINK_RATIO
        )
        return choose_sinks(small, len(layers) * int(shape[3]), spec.exact_tokens)

    def _spread(self, run: Callable[[int, int], T], units: int) -> list[T]:
        """Run a kernel over all units on this codec's threads; what it returned for each range."""
        parts = min(self.threads, units)
        if parts == 1:
            return [run(0, units)]
        bounds = [units * i // parts for i in range(parts + 1)]
        pool = _pool(os.getpid(), parts)
        jobs = [pool.submit(run, a, b) for a, b in pairwise(bounds[1:])]
        try:
            return [run(0, bounds[1]), *(job.result() for job in jobs)]
        finally:
            wait(jobs)  # none may still write into the caller's memory when this returns


_pool_lock = threading.Lock()


def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """A pool kept for each thread count; keyed by pid, as threads do not survive a fork."""
    with _pool_lock:
        return _make_pool(pid, threads)


@lru_cache(maxsize=8)
def _make_pool(pid: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="lynx-codec")


def _new_object(payload_bytes: int) -> torch.Tensor:
    # NumPy asks for huge pages where torch does not, and faulting in 4 KiB pages would cost more
    # than encoding into them.
    return torch.from_numpy(np.empty(wire.HEADER_BYTES + payload_bytes, np.uint8))


def _layout_of(kv: torch.Tensor) -> KVLayout:
    if not isinstance(kv, torch.Tensor):
        raise InvalidInputError(f"a KV cache is a torch.Tensor {_AXES}, got {type(kv).__name__}")
    if kv.dim() != 5:
        raise InvalidInputError(f"a KV cache has the axes {_AXES}, got shape {tuple(kv.shape)}")
    if kv.device.type != "cpu":
        raise InvalidInputError(f"this codec works on the CPU, got a tensor on {kv.device}")
    name = _TORCH_DTYPES.get(kv.dtype, str(kv.dtype).removeprefix("torch."))
    sizes = tuple(kv.shape)
    return KVLayout(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], name)


def _rows_together(kv: torch.Tensor) -> torch.Tensor:
    """kv itself when a token's channels lie side by side in memory, else a contiguous copy."""
    heads, dim = kv.shape[3:]
    together = (dim == 1 or kv.stride(4) == 1) and (heads == 1 or kv.stride(3) == dim)
    return kv if together else kv.contiguous()


def _bits_of(x: torch.Tensor) -> Words:
    kind = torch.uint32 if x.dtype == torch.float32 else torch.uint16
    return x.detach().view(kind).numpy()


def _memory(kv: torch.Tensor, layout: KVLayout) -> tuple[Words, int, Ints, Ints]:
    """The elements' memory as one flat array, and how to walk it: what the kernels take."""
    strides = kv.stride()[:3]
    steps = zip(kv.shape[:3], strides, strict=True)
    span = sum((n - 1) * s for n, s in steps) + layout.channels
    shape = (layout.kv, layout.layers, layout.tokens, layout.channels)
    flat = _bits_of(kv.as_strided((span,), (1,)))
    code = cpu.DTYPE_CODES[layout.dtype]
    return flat, code, np.array(strides, np.int64), np.array(shape, np.int64)


def _payload(data: Object) -> Bytes:
    return _writable(np.frombuffer(_view(data), np.uint8))[wire.HEADER_BYTES :]


def _view(data: Object) -> memoryview:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return memoryview(data).cast("B")
    if not isinstance(data, torch.Tensor):
        raise InvalidInputError(
            f"an object is a 1-D uint8 tensor from encode(), or bytes; got {type(data).__name__}"
        )
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
        raise InvalidInputError(
            "an object is a contiguous 1-D uint8 tensor from encode(), got "
            f"{data.dtype} of shape {tuple(data.shape)}"
        )
    if data.device.type != "cpu":
        raise InvalidInputError(f"this codec works on the CPU, got an object on {data.device}")
    return data.numpy().data


class _Alias:
    """The same memory as a read-only array, not marked so."""

    def __init__(self, array: Bytes) -> None:
        self.array = array
        place = (array.ctypes.data, False)
        self.__array_interface__ = {**array.__array_interface__, "data": place}


def _writable(array: Bytes) -> Bytes:
    # numba would compile each kernel once more for read-only arrays; the decoder writes to none.
    return array if array.flags.writeable or not array.size else np.asarray(_Alias(array))


def _target(out: torch.Tensor | None, layout: KVLayout) -> torch.Tensor:
    dtype = getattr(torch, layout.dtype)
    if out is None:
        return torch.empty(layout.shape, dtype=dtype)
    found = _layout_of(out)
    if found != layout:
        raise InvalidInputError(
            f"the objects hold a cache of shape {layout.shape} {layout.dtype}, the target is "
            f"{found.shape} {found.dtype}"
        )
    return out


def _sections(plan: PayloadPlan) -> Ints:
    return np.array(
        [plan.anchor_page, plan.anchor_unit, plan.residual_page, plan.residual_unit], np.int64
    )
