"""How a user names Lynx's settings inside LMCache's own configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...codec import Calibration, Codec
from ...config import LynxConfig
from ...errors import ConfigError
from ...layout import KVLayout
from ...store import ChunkStore, codec_from_config, new_cache


@dataclass(frozen=True)
class Settings:
    """What LMCache's configuration says about Lynx.

    Attributes:
        config: Lynx's own settings.
        namespace: part of every key. Give another one when weights change under the same name.
    """

    config: LynxConfig
    namespace: str = ""

    @classmethod
    def load(cls, given: object) -> Settings:
        """Read what a user wrote for Lynx.

        Args:
            given: path of a Lynx YAML file; or a mapping of Lynx's sections as in such a file,
                beside which ``config`` may name a file whose values they override, and
                ``namespace`` a text; or None for ``LYNX_CONFIG`` and ``LYNX_*`` alone.

        Raises:
            ConfigError: it is none of these, or a setting is wrong; the message names it.
        """
        if given is None or isinstance(given, str):
            return cls(LynxConfig.load(given or None))
        if not isinstance(given, Mapping):
            raise ConfigError(
                "Lynx's settings in LMCache's configuration are the path of a YAML file or a "
                f"mapping such as {{nvme: {{path: /mnt/nvme/lynx}}}}, got {given!r}"
            )
        sections: dict[str, Any] = {str(name): value for name, value in given.items()}
        texts = {name: sections.pop(name, None) for name in ("config", "namespace")}
        for name, value in texts.items():
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} beside Lynx's sections must be a text, got {value!r}")
        return cls(LynxConfig.load(texts["config"], sections), texts["namespace"] or "")


def open_store(
    config: LynxConfig,
    layout: KVLayout,
    world_size: int = 1,
    rank: int = 0,
    local_ranks: int = 1,
) -> ChunkStore:
    """The store of one tensor-parallel rank, ready for its first request.

    Args:
        config: one and the same for all ranks.
        layout: of this rank's cache.
        world_size, rank: which of how many ranks this is.
        local_ranks: how many of them share this machine's cores.

    Raises:
        ConfigError: the calibration is not of this model.
        LynxError: as ``ChunkStore.from_config``.
    """
    codec = codec_from_config(config.codec)
    calibration = rank_calibration(codec.calibration, layout, world_size, rank)
    # Engines set torch to one thread, which is no measure of the cores there are.
    threads = config.codec.threads or max(1, len(os.sched_getaffinity(0)) // local_ranks)
    codec = Codec(codec.spec, threads=threads, calibration=calibration)
    # Compiles the kernels, for which else the first request would wait.
    codec.decode(*codec.encode(new_cache(layout.with_tokens(1)).zero_()))
    return ChunkStore.from_config(config, codec=codec)


def rank_calibration(
    calibration: Calibration | None, layout: KVLayout, world_size: int, rank: int
) -> Calibration | None:
    """The part of a model's calibration that one tensor-parallel rank needs.

    Args:
        calibration: of the whole model, as ``lynx calibrate`` writes it; None stays None.
        layout: of this rank's cache.
        world_size, rank: which of how many ranks this is.

    Raises:
        ConfigError: the calibration is not of such a model.
    """
    if calibration is None:
        return None
    layers, total, head_dim = calibration.priority.shape
    heads = max(1, total // world_size)
    if (layers, heads, head_dim) != (layout.layers, layout.heads, layout.head_dim):
        raise ConfigError(
            f"codec.calibration is of a model with {layers} layers and {total} KV heads of "
            f"{head_dim}; rank {rank} of {world_size} has {layout.layers} layers and "
            f"{layout.heads} heads of {layout.head_dim}. Make one for this model with `lynx "
            "calibrate`; under pipeline parallelism leave it out"
        )
    # Where there are more ranks than heads, neighbours hold the same head.
    return calibration.of_heads(rank * total // world_size, heads)
