"""LMCache's MP connector for vLLM on a CPU, whose start it otherwise prevents.

In vLLM's configuration, in the place of ``"kv_connector": "LMCacheMPConnector"``::

    {"kv_connector": "LMCacheMPConnectorCPU",
     "kv_connector_module_path": "lynx_backend.integrations.lmcache_mp_cpu", "kv_role": "kv_both"}
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi


def _without_dunders() -> None:
    """Have llvmlite's handle of its library deny special attributes.

    It answers to every name, so that vLLM's search for kernels, which asks each loaded module's
    values for a ``__dict__``, gets a function from it and fails. LMCache loads llvmlite with numba.
    """
    answer = ffi._lib_wrapper.__getattr__

    def only_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    ffi._lib_wrapper.__getattr__ = only_functions


_without_dunders()

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import (  # noqa: E402
    LMCacheMPConnector,
)


class LMCacheMPConnectorCPU(LMCacheMPConnector):
    """LMCache's connector as it is."""
