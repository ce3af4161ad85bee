"""The axes of a KV cache and the sizes that follow from them. No I/O, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import InvalidInputError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LIMITS = {
    "kv": 2,
    "layers": 1 << 12,
    "tokens": 1 << 24,
    "heads": 1 << 12,
    "head_dim": 1 << 16,
}


@dataclass(frozen=True)
class KVLayout:
    """Axes ``[kv, layers, tokens, heads, head_dim]`` of one chunk and its element type.

    Attributes:
        kv: 2 for separate keys and values, 1 for a latent cache (MLA), which has one tensor.
        layers: number of layers in the chunk.
        tokens: number of tokens, at least 1.
        heads: KV heads of this rank; 1 for MLA.
        head_dim: elements a head; the latent width for MLA.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    """

    kv: int
    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for axis, most in _LIMITS.items():
            size = getattr(self, axis)
            if not 1 <= size <= most:
                raise InvalidInputError(
                    f"a KV cache is [kv 1|2, layers, tokens, kv_heads, head_dim]: {axis} must be "
                    f"between 1 and {most}, got {size} in {self.shape}"
                )
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInputError(
                f"a KV cache must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype}; an fp8 "
                "cache is already quantized and is not encoded again"
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The five axes as a tuple."""
        return (self.kv, self.layers, self.tokens, self.heads, self.head_dim)

    @property
    def channels(self) -> int:
        """Elements of one token in one layer's K or V."""
        return self.heads * self.head_dim

    @property
    def elements(self) -> int:
        """Elements of the whole chunk."""
        return self.kv * self.layers * self.tokens * self.channels

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all layers, K and V, unquantized."""
        return self.kv * self.layers * self.channels * DTYPE_BYTES[self.dtype]

    @property
    def signature(self) -> str:
        """The axes that every chunk of one cache shares (all but the token count), as text."""
        return f"kv{self.kv}-layers{self.layers}-heads{self.heads}-dim{self.head_dim}"

    @property
    def bytes(self) -> int:
        """Bytes of the whole chunk, unquantized."""
        return self.tokens * self.row_bytes

    def with_tokens(self, tokens: int) -> KVLayout:
        """The layout of a shorter or longer chunk of the same cache."""
        return replace(self, tokens=tokens)

    def pages(self, page_tokens: int) -> int:
        """Pages of ``page_tokens`` tokens along the token axis, the last one possibly shorter."""
        return -(-self.tokens // page_tokens)
