"""LMCache inside vLLM on a CPU, for which LMCache has no connector of its own.

In vLLM's configuration, in the place of ``"kv_connector": "LMCacheConnectorV1"``::

    {"kv_connector": "LMCacheConnectorCPU",
     "kv_connector_module_path": "lynx_backend.integrations.lmcache_cpu", "kv_role": "kv_both"}
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheConnectorCPU(LMCacheConnectorV1):
    """LMCache's connector, told how to read and write vLLM's pages in host memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not above: vLLM rebinds Triton's kernels while it imports this module, and fails when
        # LMCache or numba come in then.
        from .lmcache.cpu_pages import register

        register()
        super().__init__(*args, **kwargs)
