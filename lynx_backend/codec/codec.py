"""The public codec: torch tensors in, self-describing objects out, and back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .. import wire
from ..errors import InvalidInputError, UnsupportedError
from ..keys import Part
from ..layout import DTYPE_BYTES, KVLayout
from . import cpu
from .adaptive import AdaptiveScheme
from .calibration import Calibration
from .chunked import ChunkedScheme
from .scheme import Bytes, CacheMemory, Scheme
from .spec import UNCALIBRATED, CodecSpec

Object = torch.Tensor | bytes | bytearray | memoryview
_TORCH_DTYPES = {getattr(torch, name): name for name in DTYPE_BYTES}
_AXES = "[2, layers, tokens, kv_heads, head_dim] (or [1, layers, tokens, 1, latent] for MLA)"


class Codec:
    """Turns a chunk of KV cache into an anchor and a residual object, and back.

    Safe to use from several threads. Works on the caller's tensors; results are new tensors unless
    ``out`` is given.

    Args:
        spec: how to quantize; two codecs exchange objects exactly when their specs are equal.
        device: ``"cpu"``, or ``"cuda"`` (``"cuda:1"``), which makes a ``CudaCodec``.
        threads: threads that share one call; default: ``torch.get_num_threads()``.
        calibration: what profile ``adaptive`` knows of the model; without it that profile works,
            at about the fidelity of ``linear``. Its fingerprint becomes part of :attr:`spec`.

    Raises:
        InvalidInputError: the profile takes no calibration, or the spec names another one.
        UnsupportedError: no implementation for ``device`` in this installation.
    """

    _device_type = "cpu"

    def __new__(
        cls, spec: CodecSpec | None = None, device: str = "cpu", *_: Any, **__: Any
    ) -> Codec:
        if cls is Codec and _device_type(device) == "cuda":
            from .cuda_codec import CudaCodec  # not everyone has CuPy

            return super().__new__(CudaCodec)
        return super().__new__(cls)

    def __init__(
        self,
        spec: CodecSpec | None = None,
        device: str = "cpu",
        threads: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        if _device_type(device) != self._device_type:
            raise UnsupportedError(f"no codec for device {device!r}; use device='cpu' or 'cuda'")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise InvalidInputError(f"threads must be a whole number from 1 on, got {threads!r}")
        if spec is None:
            spec = CodecSpec()
        _expect_type(spec, CodecSpec, "spec", "CodecSpec(profile, ...)")
        if calibration is not None:
            _expect_type(calibration, Calibration, "calibration", "Calibration.load(path)")
        mine = UNCALIBRATED if calibration is None else calibration.fingerprint
        if spec.calibration not in (UNCALIBRATED, mine):
            raise InvalidInputError(
                f"the spec names calibration {spec.calibration}, given is {mine}; give the file "
                "that the objects were made with"
            )
        self.spec = replace(spec, calibration=mine)
        self.calibration = calibration
        self.threads = threads or torch.get_num_threads()
        self._wire_spec = self.spec.pack()
        self._scheme: Scheme = (
            AdaptiveScheme(self.spec, calibration)
            if self.spec.profile == "adaptive"
            else ChunkedScheme(self.spec)
        )

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
        layout = layout_of(kv)
        _expect_cpu(kv, "a tensor")
        expect_key(key)
        objects: list[torch.Tensor] = []

        def make(size: int) -> Bytes:
            # NumPy asks for huge pages where torch does not, and faulting in 4 KiB pages would
            # cost more than encoding into them.
            data = np.empty(wire.HEADER_BYTES + size, np.uint8)
            objects.append(torch.from_numpy(data))
            return data[wire.HEADER_BYTES :]

        memory = _memory(_rows_together(kv), layout)
        payloads, bad = self._scheme.encode(memory, make, self._spread)
        if bad:
            raise InvalidInputError(
                f"the cache holds NaN, infinity or values beyond ±65504 (in {bad} channels of the "
                "first page that has any); it was computed wrongly or not filled: do not store it"
            )
        headers = wire.seal(self._wire_spec, layout, key, [p.data for p in payloads])
        for data, header in zip(objects, headers, strict=True):
            data.numpy()[: wire.HEADER_BYTES] = np.frombuffer(header, np.uint8)
        anchor, residual = objects
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
        if residual is not None:
            wire.expect_same_chunk(header, self.validate(residual, Part.RESIDUAL, key))
        coded = _payload(anchor)
        self._scheme.check_content(header.layout, coded)
        kv = _target(out, header.layout)
        whole = _rows_together(kv)
        extra = None if residual is None else _payload(residual)
        self._scheme.decode(coded, extra, _memory(whole, header.layout), self._spread)
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
        if key is not None:
            expect_key(key)
        wire.expect(header, part, self._wire_spec, key)
        self._scheme.check_size(header.layout, part, header.payload_bytes)
        return header

    def _spread(self, run: Callable[[int, int], Any], count: int) -> list[Any]:
        """Run a kernel over all work on this codec's threads; what it returned for each range."""
        parts = min(self.threads, count)
        if parts == 1:
            return [run(0, count)]
        bounds = [count * i // parts for i in range(parts + 1)]
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


def layout_of(kv: torch.Tensor) -> KVLayout:
    """The axes of a cache; raises InvalidInputError for what is none."""
    if not isinstance(kv, torch.Tensor):
        raise InvalidInputError(f"a KV cache is a torch.Tensor {_AXES}, got {type(kv).__name__}")
    if kv.layout != torch.strided or kv.is_neg():
        raise InvalidInputError(
            f"a KV cache is a dense tensor that holds its own values, got {kv.layout}"
            f"{', a negated view' if kv.is_neg() else ''}; call to_dense() or resolve_neg() on it"
        )
    if kv.dim() != 5:
        raise InvalidInputError(f"a KV cache has the axes {_AXES}, got shape {tuple(kv.shape)}")
    name = _TORCH_DTYPES.get(kv.dtype, str(kv.dtype).removeprefix("torch."))
    sizes = tuple(kv.shape)
    return KVLayout(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], name)


def _rows_together(kv: torch.Tensor) -> torch.Tensor:
    """kv itself when a token's channels lie side by side in memory, else a contiguous copy."""
    heads, dim = kv.shape[3:]
    together = (dim == 1 or kv.stride(4) == 1) and (heads == 1 or kv.stride(3) == dim)
    return kv if together else kv.contiguous()


def _memory(kv: torch.Tensor, layout: KVLayout) -> CacheMemory:
    """Where the elements lie; kv has its rows together."""
    strides = kv.stride()[:3]
    steps = zip(kv.shape[:3], strides, strict=True)
    span = sum((n - 1) * s for n, s in steps) + layout.channels
    kind = torch.uint32 if kv.dtype == torch.float32 else torch.uint16
    words = kv.detach().as_strided((span,), (1,)).view(kind).numpy()
    return CacheMemory(words, cpu.DTYPE_CODES[layout.dtype], np.array(strides, np.int64), layout)


def object_bytes(data: Object) -> Bytes:
    """An object in host memory as an array, which is not to be written to."""
    return _writable(np.frombuffer(_view(data), np.uint8))


def _payload(data: Object) -> Bytes:
    return object_bytes(data)[wire.HEADER_BYTES :]


def _view(data: Object) -> memoryview:
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(data)
        if not view.c_contiguous:
            raise InvalidInputError(f"an object is contiguous bytes, got strides {view.strides}")
        return view.cast("B")
    if not isinstance(data, torch.Tensor):
        raise InvalidInputError(
            f"an object is a 1-D uint8 tensor from encode(), or bytes; got {type(data).__name__}"
        )
    dense = data.layout == torch.strided
    if data.dtype != torch.uint8 or data.dim() != 1 or not (dense and data.is_contiguous()):
        raise InvalidInputError(
            "an object is a contiguous 1-D uint8 tensor from encode(), got "
            f"{data.dtype} of shape {tuple(data.shape)}{'' if dense else f', {data.layout}'}"
        )
    _expect_cpu(data, "an object")
    return data.numpy().data


def _device_type(device: str) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as e:
        raise InvalidInputError(
            f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}: {e}"
        ) from None


def _expect_type(value: object, kind: type, name: str, like: str) -> None:
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name} must be a {kind.__name__}, got {value!r}; give {like}")


def expect_key(key: object) -> None:
    """Raise InvalidInputError unless ``key`` is the digest of a chunk's key."""
    if not isinstance(key, bytes) or len(key) != wire.KEY_BYTES:
        found = len(key) if isinstance(key, bytes) else type(key).__name__
        raise InvalidInputError(
            f"a chunk key is {wire.KEY_BYTES} bytes (ChunkKey.digest), got {found}"
        )


def _expect_cpu(data: torch.Tensor, what: str) -> None:
    if data.device.type != "cpu":
        raise InvalidInputError(f"this codec works on the CPU, got {what} on {data.device}")


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
    found = layout_of(out)
    _expect_cpu(out, "a tensor")
    if found != layout:
        raise InvalidInputError(
            f"the objects hold a cache of shape {layout.shape} {layout.dtype}, the target is "
            f"{found.shape} {found.dtype}"
        )
    expect_writable(out)
    return out


def expect_writable(out: torch.Tensor) -> None:
    """Raise InvalidInputError unless each element of ``out`` has a place of its own."""
    if out.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError("the target needs a gradient; give target.detach()")
    # Sorted by stride, each axis must step over all that the smaller ones reach.
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                raise InvalidInputError(
                    f"elements of the target share memory: shape {tuple(out.shape)}, strides "
                    f"{out.stride()}; give a tensor of its own, or a view without expand()"
                )
            reach += stride * (size - 1)
