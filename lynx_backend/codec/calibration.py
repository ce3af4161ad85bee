"""What the ``adaptive`` profile may know of a model, so that bits go where its queries look.

Two things, neither of which costs a bit on the wire: the model's rotary angles, to store keys
without their rotation, and for each key channel how large the queries are that will be multiplied
with it. Both sides must have the same calibration; its fingerprint is part of the codec's spec.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptObjectError, InvalidInputError
from ..layout import KVLayout

#: Steps of ``priority`` in one doubling of a channel's size.
OCTAVE = 8
_POSITIONS = 256


@dataclass(frozen=True)
class Calibration:
    """Tables of one model.

    Attributes:
        cos, sin: float32 [tables, 256, pairs]: of the rotary angle of each pair of channels at each
            token of a page, the first token's angle being 0. Channel i < pairs is paired with
            channel i + pairs; channels from 2·pairs on are not rotated. No pairs: no rotation.
        table: uint8 [layers]: which of the tables a layer uses.
        priority: int8 [layers, kv_heads, head_dim]: log2 of the queries' size at each key channel,
            in steps of 1/8, relative to the head's mean.
        fingerprint: 16 hex digits of all of this; :meth:`of_heads` keeps the whole model's.

    Raises:
        InvalidInputError: the tables do not fit each other, or an angle's is not finite.
    """

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]
    table: npt.NDArray[np.uint8]
    priority: npt.NDArray[np.int8]
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if not (
            self.cos.ndim == self.priority.ndim == 3
            and self.sin.shape == self.cos.shape
            and self.cos.shape[1] == _POSITIONS
            and 2 * self.cos.shape[2] <= self.priority.shape[2]
            and self.table.shape == self.priority.shape[:1]
            and int(self.table.max(initial=0)) < len(self.cos)
        ):
            raise InvalidInputError(
                f"calibration tables do not fit: cos {self.cos.shape}, sin {self.sin.shape}, table "
                f"{self.table.shape}, priority {self.priority.shape}; expected [tables, 256, "
                "pairs] twice, [layers], [layers, kv_heads, head_dim] with 2·pairs <= head_dim"
            )
        if not (np.isfinite(self.cos).all() and np.isfinite(self.sin).all()):
            raise InvalidInputError(
                "calibration tables hold NaN or infinity, and every key would: make them again "
                "with `lynx calibrate`"
            )
        digest = xxhash.xxh3_64()
        for array, kind in zip(self._arrays().values(), _KINDS.values(), strict=True):
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array, kind).tobytes())
        object.__setattr__(self, "fingerprint", digest.hexdigest())

    def _arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {name: getattr(self, name) for name in _KINDS}

    @classmethod
    def none(cls, layout: KVLayout) -> Calibration:
        """No knowledge of the model: no rotation undone, all channels alike."""
        shape = (layout.layers, layout.heads, layout.head_dim)
        empty = np.zeros((1, _POSITIONS, 0), np.float32)
        return cls(empty, empty, np.zeros(layout.layers, np.uint8), np.zeros(shape, np.int8))

    @classmethod
    def of(
        cls,
        inv_freq: list[npt.NDArray[np.float64]],
        table: list[int],
        query_power: npt.NDArray[np.float64],
    ) -> Calibration:
        """From what a model says of itself.

        Args:
            inv_freq: of each table, the angle between neighbouring tokens, [pairs].
            table: of each layer, which of them.
            query_power: [layers, kv_heads, head_dim], mean square of the queries, after their
                rotation, that a KV head serves.

        Raises:
            InvalidInputError: frequencies of unequal length or more pairs than the head has, or a
                number that is not finite.
        """
        lengths = {len(f) for f in inv_freq}
        if len(lengths) != 1 or 2 * max(lengths) > query_power.shape[-1]:
            raise InvalidInputError(
                f"a head of {query_power.shape[-1]} channels needs inverse frequencies of one "
                f"length, at most half of that, got lengths {sorted(lengths)}"
            )
        if not all(np.isfinite(x).all() for x in (*inv_freq, query_power)):
            raise InvalidInputError(
                "queries or inverse frequencies are NaN or infinite: the model computes wrongly in "
                "this dtype; calibrate it in bfloat16 or float32"
            )
        angles = np.arange(_POSITIONS)[None, :, None] * np.stack(inv_freq)[:, None, :]
        pairs = angles.shape[-1]
        power = query_power.copy()
        # A rotation mixes the two channels of a pair, so they share one size.
        mean = (power[..., :pairs] + power[..., pairs : 2 * pairs]) / 2
        power[..., :pairs] = power[..., pairs : 2 * pairs] = mean
        # 15 octaves below the head's largest is nothing; so all steps fit into int8.
        least = np.maximum(power.max(-1, keepdims=True) * 2.0**-30, 1e-300)
        level = np.log2(np.maximum(power, least)) / 2
        level -= level.mean(-1, keepdims=True)
        priority = np.rint(OCTAVE * level)
        return cls(
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            np.array(table, np.uint8),
            priority.astype(np.int8),
        )

    def of_heads(self, first: int, count: int) -> Calibration:
        """The tables of some KV heads, as a tensor-parallel rank needs them.

        The fingerprint stays the whole model's: all ranks share one spec, and a node that only
        keeps objects can check those of every rank.

        Raises:
            InvalidInputError: no heads, or some that the model does not have.
        """
        heads = self.priority.shape[1]
        if not (count >= 1 and 0 <= first <= heads - count):
            raise InvalidInputError(
                f"the calibration has {heads} KV heads, asked for {count} from {first} on"
            )
        part = replace(self, priority=self.priority[:, first : first + count])
        object.__setattr__(part, "fingerprint", self.fingerprint)
        return part

    def check(self, layout: KVLayout, part: bool = False) -> None:
        """Raise InvalidInputError when this is not the calibration of such a cache's model.

        Args:
            part: whether some of the model's heads will do.
        """
        wanted = (layout.layers, layout.heads, layout.head_dim)
        layers, heads, head_dim = self.priority.shape
        if wanted != (layers, min(heads, layout.heads) if part else heads, head_dim):
            raise InvalidInputError(
                f"the calibration is of a cache with {self.priority.shape} layers, kv_heads and "
                f"head_dim, this one has {wanted}; make one for this model with `lynx calibrate`"
            )

    def save(self, path: str | Path) -> None:
        """Write the tables to a file, which :meth:`load` reads."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **self._arrays())  # type: ignore[arg-type]
        Path(path).write_bytes(buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file written by :meth:`save`.

        Raises:
            CorruptObjectError: it is not one, or damaged.
            OSError: it cannot be read.
        """
        raw = Path(path).read_bytes()
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as file:
                return cls(**{n: np.asarray(file[n], kind) for n, kind in _KINDS.items()})
        except Exception as e:  # zip and array headers fail in many ways
            raise CorruptObjectError(
                f"{path} is not a calibration file, or it is damaged: {e}; make it again with "
                "`lynx calibrate`"
            ) from e


_KINDS = {"cos": np.float32, "sin": np.float32, "table": np.uint8, "priority": np.int8}
