"""What scheduler and workers tell each other, once a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...states import State


@dataclass(frozen=True)
class Load:
    """Bring a request's cache, anchors first.

    Attributes:
        tokens: the prompt's tokens that the store has.
        first, end: the part of them that vLLM has no cache of; written to ``blocks``.
        blocks: the request's blocks, from token 0 on.
        tags: LMCache's configuration of the request, a part of its keys.
    """

    request_id: str
    tokens: list[int]
    first: int
    end: int
    blocks: list[int]
    tags: dict[str, Any] | None = None


@dataclass
class Orders(KVConnectorMetadata):
    """From the scheduler.

    Attributes:
        lmcache: what LMCache's own connector said.
        loads: requests to start loading.
        writes: requests whose pages become Q_full before this step's forward pass.
        drops: requests whose load is of no use any more.
    """

    lmcache: KVConnectorMetadata | None = None
    loads: list[Load] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """From the workers.

    Attributes:
        ranks: by request, how many ranks have newly reached each state.
        waits: by request whose anchors are there, seconds until the slowest rank is expected to
            have its residual.
    """

    ranks: dict[str, Counter[State]] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        assert isinstance(other, Reports)
        for request_id, counts in other.ranks.items():
            self.ranks.setdefault(request_id, Counter()).update(counts)
        for request_id, wait in other.waits.items():
            self.waits[request_id] = max(wait, self.waits.get(request_id, 0.0))
        return self
