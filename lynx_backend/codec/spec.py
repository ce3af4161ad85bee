"""What a codec does, as plain validated numbers, and the sizes that follow from them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..errors import FormatMismatchError, InvalidInputError
from ..layout import KVLayout
from ..wire import SPEC_BYTES

#: Profiles by wire number. ``linear``: chunk minimum and maximum on a uniform grid, the fastest.
#: ``paper``: chunk mean and largest deviation with a logarithmic (α-law) magnitude grid.
#: ``adaptive``, the default: one scale a page and channel, bits that follow what a channel needs.
PROFILES = ("linear", "paper", "adaptive")
_DEFAULTS: dict[str, dict[str, float | int]] = {
    "linear": {"chunk": 32, "alpha": 0.0, "exact_tokens": 4},
    "paper": {"chunk": 32, "alpha": 255.0, "exact_tokens": 0},
    "adaptive": {"alpha": 0.35, "exact_tokens": 0},
}
#: A token is a sink when, in at least SINK_SHARE of the sampled key channels, it is smaller than
#: the page's mean magnitude over SINK_RATIO. Measured: 0.33 to 0.38 for token 0 of SmolLM2 and
#: Gemma-3, at most 0.14 and 0.27 for any other token.
SINK_RATIO = 16
SINK_SHARE = (5, 16)
_WIRE = struct.Struct("<BBBxHHHxxd8s4x")
#: The smallest alpha but 0. A grid divides by it: near 0 float32 cancels, and the cache with it.
LEAST_ALPHA = 1e-3
UNCALIBRATED = "0" * 16
_HEX = re.compile(r"[0-9a-f]{16}")
SECTION_ALIGN = 16
assert _WIRE.size == SPEC_BYTES


@dataclass(frozen=True)
class CodecSpec:
    """How a KV cache is quantized. Two codecs agree exactly when their specs are equal.

    Attributes:
        profile: ``"adaptive"``, ``"linear"`` or ``"paper"``; see ``docs/codec.md``.
        anchor_bits: bits an element in the anchor, 2 to 8.
        residual_bits: bits an element in the residual, 0 to 8 - anchor_bits.
        chunk: tokens that share a scale; divides page_tokens. ``adaptive`` has one scale a page.
            None for the profile's default.
        alpha: companding strength, 0 for a uniform grid or 0.001 to 1e6; None for the profile's
            default. ``adaptive``: the share of the quadratic term, at most 0.9.
        page_tokens: tokens of one page, 8 to 1024 in steps of 8; ``adaptive``: at most 256.
        exact_tokens: most tokens of one object kept unquantized (attention sinks found in the
            data); None for the profile's default. ``adaptive`` has one in every head and page.
        calibration: fingerprint of the model's calibration that ``adaptive`` uses, 16 hex digits;
            set by ``Codec``.
    """

    profile: str = "adaptive"
    anchor_bits: int = 4
    residual_bits: int = 4
    chunk: int = None  # type: ignore[assignment]  # filled in below, like alpha and exact_tokens
    alpha: float = None  # type: ignore[assignment]
    page_tokens: int = 256
    exact_tokens: int = None  # type: ignore[assignment]
    calibration: str = UNCALIBRATED

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise InvalidInputError(
                f"unknown codec profile {self.profile!r}; available: {', '.join(PROFILES)}"
            )
        for field, value in _DEFAULTS[self.profile].items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)
        if self.profile == "adaptive":
            self._check_adaptive()
        elif self.calibration != UNCALIBRATED:
            raise InvalidInputError(f"profile {self.profile} takes no calibration")
        self._check("anchor_bits", 2, 8)
        self._check("residual_bits", 0, 8 - self.anchor_bits)
        self._check("page_tokens", 8, 1024)
        self._check("chunk", 1, self.page_tokens)
        self._check("exact_tokens", 0, 64)
        if self.page_tokens % 8 or self.page_tokens % self.chunk:
            raise InvalidInputError(
                f"page_tokens must be a multiple of 8 and of chunk, got {self.page_tokens} and "
                f"chunk {self.chunk}"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)):
            raise InvalidInputError(f"alpha must be a number, got {self.alpha!r}")
        object.__setattr__(self, "alpha", float(self.alpha) or 0.0)  # -0.0 is 0.0
        most = 0.9 if self.profile == "adaptive" else 1e6
        if self.alpha and not LEAST_ALPHA <= self.alpha <= most:
            raise InvalidInputError(
                f"alpha must be 0 (uniform) or between {LEAST_ALPHA} and {most:g}, got "
                f"{self.alpha}; below {LEAST_ALPHA} it changes nothing but the rounding errors"
            )

    def _check_adaptive(self) -> None:
        self._check("page_tokens", 8, 256)
        if self.chunk is None:
            object.__setattr__(self, "chunk", self.page_tokens)
        if self.chunk != self.page_tokens or self.exact_tokens:
            raise InvalidInputError(
                "profile adaptive has one scale a page and one exact token in every head and page: "
                "leave chunk and exact_tokens out, or take profile linear"
            )
        if not _HEX.fullmatch(self.calibration):
            raise InvalidInputError(
                f"calibration must be 16 lower-case hex digits, got {self.calibration!r}"
            )

    def _check(self, field: str, least: int, most: int) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidInputError(
                f"{field} must be an integer in [{least}, {most}], got {value!r}"
            )

    def pack(self) -> bytes:
        """The spec as the bytes that every object carries."""
        return _WIRE.pack(
            PROFILES.index(self.profile), self.anchor_bits, self.residual_bits,
            self.chunk, self.page_tokens, self.exact_tokens, self.alpha,
            bytes.fromhex(self.calibration),
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> CodecSpec:
        """Read a spec back from an object's header.

        Raises:
            FormatMismatchError: the bytes are no spec this version knows.
        """
        number, anchor, residual, chunk, page, exact, alpha, calibration = _WIRE.unpack(raw)
        profile = PROFILES[number] if number < len(PROFILES) else f"#{number}"
        try:
            spec = cls(profile, anchor, residual, chunk, alpha, page, exact, calibration.hex())
        except InvalidInputError as e:
            raise FormatMismatchError(f"object's codec is not one this version has: {e}") from None
        if spec.pack() != raw:
            raise FormatMismatchError("object's codec spec has unknown extra fields")
        return spec

    @property
    def fingerprint(self) -> str:
        """The spec as hex: equal exactly when objects are interchangeable."""
        return self.pack().hex()

    # The integer grid: q in [0, levels], anchor a = (q + bias) >> residual_bits, residual
    # r = q - (a << residual_bits) in [-bias, 2**(residual_bits-1)], stored as r + bias.

    @property
    def levels(self) -> int:
        """Largest grid index q; index 0 and this one are anchor values, so extremes stay exact."""
        return ((1 << self.anchor_bits) - 1) << self.residual_bits

    @property
    def bias(self) -> int:
        """Added to q before the shift, so that the residual is a centred correction."""
        return max(0, (1 << self.residual_bits >> 1) - 1)

    @staticmethod
    def sink_layers(layers: int) -> range:
        """The layers in which attention sinks are looked for: about eight, evenly spread."""
        return range(0, layers, max(1, layers // 8))

    def chunks(self, page_len: int) -> int:
        """Chunks of a page that holds ``page_len`` tokens."""
        return -(-page_len // self.chunk)


def packed_rows(tokens: int, bits: int) -> int:
    """Byte rows of a bit plane of ``tokens`` codes of ``bits`` bits a channel."""
    return (tokens * bits + 7) // 8


@dataclass(frozen=True)
class PayloadPlan:
    """Where everything lies in the payloads of one chunk. Sizes in bytes.

    A *unit* is one layer's K or V: unit ``layer * kv + k``. Units follow each other, each as its
    pages in token order; a page's section is padded to ``SECTION_ALIGN``. After all units the
    anchor holds the exact tokens: their indices (u32, ascending), then their rows
    ``[token][layer][kv][channel]`` in the cache's own dtype.

    Attributes:
        units: layers times kv.
        pages: pages of a unit; all but the last have ``page_tokens`` tokens.
        last_len: tokens of the last page.
        anchor_page, residual_page: bytes of a full page's section.
        anchor_unit, residual_unit: bytes of all pages of one unit.
        exact_row: bytes one exact token adds to the anchor.
    """

    units: int
    pages: int
    last_len: int
    anchor_page: int
    residual_page: int
    anchor_unit: int
    residual_unit: int
    exact_row: int

    @classmethod
    def of(cls, spec: CodecSpec, layout: KVLayout) -> PayloadPlan:
        """The plan for one chunk."""
        pages = layout.pages(spec.page_tokens)
        last = layout.tokens - spec.page_tokens * (pages - 1)

        def pad(size: int) -> int:
            return -(-size // SECTION_ALIGN) * SECTION_ALIGN

        def anchor(tokens: int) -> int:
            scales = 4 + 2 * spec.chunks(tokens)
            return pad(layout.channels * (scales + packed_rows(tokens, spec.anchor_bits)))

        def residual(tokens: int) -> int:
            return pad(layout.channels * packed_rows(tokens, spec.residual_bits))

        full = spec.page_tokens
        return cls(
            units=layout.layers * layout.kv,
            pages=pages,
            last_len=last,
            anchor_page=anchor(full),
            residual_page=residual(full),
            anchor_unit=anchor(full) * (pages - 1) + anchor(last),
            residual_unit=residual(full) * (pages - 1) + residual(last),
            exact_row=4 + layout.row_bytes,
        )

    @property
    def exact_offset(self) -> int:
        """Where the exact tokens begin in the anchor's payload."""
        return self.units * self.anchor_unit

    def anchor_bytes(self, exact_count: int) -> int:
        """Size of the anchor's payload."""
        return self.exact_offset + exact_count * self.exact_row

    @property
    def residual_bytes(self) -> int:
        """Size of the residual's payload."""
        return self.units * self.residual_unit

    def exact_count(self, anchor_bytes: int, most: int) -> int:
        """Exact tokens in an anchor payload of this size.

        Raises:
            FormatMismatchError: no count up to ``most`` gives this size.
        """
        count, rest = divmod(anchor_bytes - self.exact_offset, self.exact_row)
        if rest or not 0 <= count <= most:
            raise FormatMismatchError(
                f"anchor payload has {anchor_bytes} bytes; its layout needs {self.exact_offset} "
                f"and up to {most} exact tokens of {self.exact_row}"
            )
        return count
