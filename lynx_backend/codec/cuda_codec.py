"""The codec on a GPU: the same objects and the same bits as on the CPU, without waiting for them.

Kernels run on torch's current stream. What only the GPU knows yet, whether a cache can be encoded
or an object is whole, it writes into pinned memory; a pending result hands nothing out before the
host has read it, and a decoder that meets a damaged object writes nothing.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import wire
from ..errors import InvalidInputError
from ..keys import Part
from ..layout import KVLayout
from .calibration import Calibration
from .codec import Codec, Object, expect_key, expect_writable, layout_of, object_bytes
from .cuda import check_device
from .cuda_adaptive import CudaAdaptive
from .cuda_chunked import CudaChunked
from .cuda_memory import Place, Records
from .cuda_scheme import CudaScheme, refusal
from .paged import Slots
from .spec import CodecSpec

Memory = torch.Tensor | Slots
_PAYLOAD_ALIGN = 16


class Pending:
    """Work on a stream whose outcome the host does not know yet."""

    def __init__(self, records: Records, record: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._record = record
        self.event = torch.cuda.Event()
        self.event.record(stream)
        weakref.finalize(self, records.give_back, record, self.event).atexit = False

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return bool(self.event.query())

    def _outcome(self) -> list[int]:
        self.event.synchronize()
        return [int(x) for x in self._record]


class Encoding(Pending):
    """Objects in the making. :meth:`wait` is the only way to them."""

    def __init__(
        self, codec: CudaCodec, layout: KVLayout, key: bytes, buffers: list[torch.Tensor],
        record: torch.Tensor, stream: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        super().__init__(codec.records, record, stream)
        self._codec, self._layout, self._key = codec, layout, key
        self._buffers, self._stream = buffers, stream

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and residual, complete, where the encoding was asked to put them.

        On the GPU they may be used on the stream that encoded them.

        Raises:
            InvalidInputError: the cache holds NaN, infinity or values beyond ±65504, or a slot
                lies outside the pages.
        """
        bad, exact, *digests = self._outcome()[:4]
        if bad:
            raise InvalidInputError(
                "the cache holds NaN, infinity or values beyond ±65504 (or a slot is none of its "
                "pages'); it was computed wrongly or not filled: do not store it"
            )
        sizes = self._codec.scheme.sizes(self._layout, exact)
        parts = [(n, (d % 2**64).to_bytes(8, "big")) for n, d in zip(sizes, digests, strict=True)]
        headers = wire.headers(self._codec._wire_spec, self._layout, self._key, parts)
        objects = []
        with torch.cuda.stream(self._stream):
            for buffer, size, header in zip(self._buffers, sizes, headers, strict=True):
                data = buffer[: wire.HEADER_BYTES + size]
                raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                if data.is_cuda:
                    raw = raw.pin_memory()
                data[: wire.HEADER_BYTES].copy_(raw, non_blocking=True)
                objects.append(data)
        anchor, residual = objects
        return anchor, residual


class Decoding(Pending):
    """A cache being written: complete for work on the stream, but only :meth:`wait` vouches."""

    def __init__(
        self, codec: CudaCodec, out: Memory, record: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(codec.records, record, stream)
        self._out = out

    def wait(self) -> Memory:
        """What was decoded into.

        Raises:
            CorruptObjectError, FormatMismatchError: an object is damaged; nothing was written.
        """
        wrong = refusal(self._outcome()[0])
        if wrong:
            raise wrong
        return self._out


@dataclass(frozen=True)
class Loaded:
    """An object on its way to the GPU, its header already checked: see ``CudaCodec.load``.

    Attributes:
        header: the object's.
        payload: uint8 on the GPU.
        ready: when the payload is there.
    """

    header: wire.Header
    payload: torch.Tensor
    ready: torch.cuda.Event | None


class CudaCodec(Codec):
    """:class:`Codec` with ``device="cuda"``.

    Beside the methods of ``Codec``, which wait, ``start_encode`` and ``start_decode`` only launch.
    A cache is a tensor on the GPU, of any strides, or tokens of a paged cache
    (``PagedCache.at``). Kernels run on torch's current stream, and ``stream=`` names another one.
    Objects are uint8 tensors on the GPU or, for decoding, bytes in host memory, which are copied by
    a stream of the codec's own; from pinned memory the copies overlap with the kernels.
    """

    _device_type = "cuda"
    scheme: CudaScheme

    def __init__(
        self,
        spec: CodecSpec | None = None,
        device: str = "cuda",
        threads: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.device = check_device(torch.device(device))
        super().__init__(spec, device, threads, calibration)
        with torch.cuda.device(self.device):
            self.scheme = self._make_scheme()
            self.copies = torch.cuda.Stream()
        self.records = Records()
        self._launching = threading.Lock()  # the kernels of one call share scratch memory

    def _make_scheme(self) -> CudaScheme:
        if self.spec.profile == "adaptive":
            return CudaAdaptive(self.spec, self.device, self.calibration)
        return CudaChunked(self.spec, self.device)

    # -- encode ------------------------------------------------------------------------------------

    def encode(self, kv: Memory, key: bytes = wire.NO_KEY) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`Codec.encode`; the objects are on the GPU."""
        return self.start_encode(kv, key).wait()

    def start_encode(
        self,
        kv: Memory,
        key: bytes = wire.NO_KEY,
        host: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Encoding:
        """Launch an encoding.

        Args:
            kv: the cache, or tokens of a paged one; not to be written to before the stream has
                passed.
            key: 32 bytes written into both objects.
            host: the objects go to pinned host memory, copied by a stream of the codec's own.
            stream: instead of torch's current one.

        Raises:
            InvalidInputError: wrong shape, dtype or device.
        """
        layout = self._layout_of(kv)
        expect_key(key)
        with self._on(stream):
            ours = torch.cuda.current_stream()
            if isinstance(kv, torch.Tensor):
                kv = _dense(kv)
            place = Place.of(kv, layout)
            buffers = [
                _room(n, self.device) for n in self.scheme.sizes(layout, self.spec.exact_tokens)
            ]
            record = self.records.take()
            with self._launching:
                first, second = (b[wire.HEADER_BYTES :] for b in buffers)
                self.scheme.encode(place, first, second, record)
            if not host:
                return Encoding(self, layout, key, buffers, record, ours)
            self.copies.wait_stream(ours)
            with torch.cuda.stream(self.copies):
                there = [torch.empty(len(b), dtype=torch.uint8, pin_memory=True) for b in buffers]
                for to, buffer in zip(there, buffers, strict=True):
                    to.copy_(buffer, non_blocking=True)
                    buffer.record_stream(self.copies)
                return Encoding(self, layout, key, there, record, self.copies)

    # -- decode ------------------------------------------------------------------------------------

    def decode(
        self,
        anchor: Object | Loaded,
        residual: Object | Loaded | None = None,
        out: Any = None,
        key: bytes | None = None,
    ) -> Any:
        """As :meth:`Codec.decode`, into a tensor on the GPU or tokens of a paged cache."""
        return self.start_decode(anchor, residual, out, key).wait()

    def start_decode(
        self,
        anchor: Object | Loaded,
        residual: Object | Loaded | None = None,
        out: Memory | None = None,
        key: bytes | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> Decoding:
        """Launch a decoding; with a residual into a coarse cache, it is refined.

        Args:
            anchor, residual: objects, or what :meth:`load` made of them. The header of an object
                on the GPU is read first, which waits for the stream: ``load`` does not.
            out, key: as for :meth:`Codec.decode`.
            stream: instead of torch's current one.

        Raises:
            as :meth:`Codec.decode`, for what headers say. Damage is found by :meth:`Decoding.wait`.
        """
        with self._on(stream):
            ours = torch.cuda.current_stream()
            one = self._loaded(anchor, Part.ANCHOR, key)
            two = None if residual is None else self._loaded(residual, Part.RESIDUAL, key)
            layout = one.header.layout
            if two is not None:
                wire.expect_same_chunk(one.header, two.header)
            target = self._target(out, layout)
            apart = _dense(target) if isinstance(target, torch.Tensor) else target
            place = Place.of(apart, layout)
            for part in (one, two):
                if part is not None and part.ready is not None:
                    ours.wait_event(part.ready)
                    part.payload.record_stream(ours)
            record = self.records.take()
            digests = (one.header.payload_digest, two.header.payload_digest if two else bytes(8))
            extra = None if two is None else two.payload
            with self._launching:
                gate = self.scheme.verify(place, one.payload, extra, digests, record)
                self.scheme.decode(place, one.payload, extra, gate)
            if apart is not target:
                assert isinstance(target, torch.Tensor)
                assert isinstance(apart, torch.Tensor)
                target.copy_(apart)
            return Decoding(self, target, record, ours)

    def load(self, data: Object, part: Part, key: bytes | None = None) -> Loaded:
        """Start copying an object to the GPU; its header is checked before.

        Args:
            data: a 1-D uint8 tensor or bytes; in pinned memory the copy runs while other work does.
                Not to be written to before what decodes it has been waited for.
            part, key: what it must be.

        Raises:
            CorruptObjectError, FormatMismatchError: the header says that it is something else.
        """
        if isinstance(data, torch.Tensor) and data.is_cuda:
            return self._check(data[: wire.HEADER_BYTES].cpu().numpy().tobytes(), data, part, key)
        array = object_bytes(data)
        source = data if isinstance(data, torch.Tensor) else torch.from_numpy(array)
        return self._check(array[: wire.HEADER_BYTES].tobytes(), source, part, key)

    def _check(self, raw: bytes, data: torch.Tensor, part: Part, key: bytes | None) -> Loaded:
        header = wire.parse_header(raw, len(data))
        wire.expect(header, part, self._wire_spec, key)
        self._scheme.check_size(header.layout, part, header.payload_bytes)
        payload = data[wire.HEADER_BYTES :]
        if data.is_cuda:
            if data.device != self.device or payload.data_ptr() % _PAYLOAD_ALIGN:
                payload = _room(len(payload), self.device)[wire.HEADER_BYTES :].copy_(payload)
            return Loaded(header, payload, None)
        with torch.cuda.stream(self.copies):
            there = _room(len(payload), self.device)[wire.HEADER_BYTES :]
            there.copy_(payload, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(self.copies)
        return Loaded(header, there, ready)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """This device and that stream as the current ones."""
        if stream is not None:
            return torch.cuda.stream(stream)
        if torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _loaded(self, data: Object | Loaded, part: Part, key: bytes | None) -> Loaded:
        if not isinstance(data, Loaded):
            return self.load(data, part, key)
        wire.expect(data.header, part, self._wire_spec, key)
        return data

    def validate(self, data: Object, part: Part, key: bytes | None = None) -> wire.Header:
        """As :meth:`Codec.validate`; what lies on the GPU is copied to the host for it."""
        there = data.cpu() if isinstance(data, torch.Tensor) else data
        return super().validate(there, part, key)

    def _layout_of(self, kv: Memory) -> KVLayout:
        device = kv.cache.device if isinstance(kv, Slots) else getattr(kv, "device", None)
        if isinstance(kv, (Slots, torch.Tensor)) and device != self.device:
            raise InvalidInputError(f"this codec works on {self.device}, got a cache on {device}")
        return kv.layout if isinstance(kv, Slots) else layout_of(kv)

    def _target(self, out: Memory | None, layout: KVLayout) -> Memory:
        if out is None:
            return torch.empty(layout.shape, dtype=getattr(torch, layout.dtype), device=self.device)
        found = self._layout_of(out)
        if found != layout:
            raise InvalidInputError(
                f"the objects hold a cache of shape {layout.shape} {layout.dtype}, the target is "
                f"{found.shape} {found.dtype}"
            )
        if isinstance(out, torch.Tensor):
            expect_writable(out)
        return out


def _dense(kv: torch.Tensor) -> torch.Tensor:
    """kv itself when a head's elements lie side by side, else a contiguous copy."""
    return kv if kv.shape[4] == 1 or kv.stride(4) == 1 else kv.contiguous()


def _room(payload: int, device: torch.device) -> torch.Tensor:
    """Memory for an object whose payload begins at a multiple of ``_PAYLOAD_ALIGN``."""
    before = -wire.HEADER_BYTES % _PAYLOAD_ALIGN
    return torch.empty(before + wire.HEADER_BYTES + payload, dtype=torch.uint8, device=device)[
        before:
    ]
