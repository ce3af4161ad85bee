"""How the codec's functions for the CPU are compiled, and kept for the next process.

numba refuses to decorate a function when no folder can hold what it compiles, and a full disk fails
the call that was to be compiled. Here both cost time only, and one line in the log.

Raises:
    UnsupportedError: an x86 processor that does not convert float16; LLVM would end the process.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache
from numba.core.codegen import get_host_cpu_features

from ..errors import UnsupportedError

_log = logging.getLogger(__name__)
_warned = threading.Event()
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def _check_processor() -> None:
    features = config.CPU_FEATURES
    if features is None:
        features = get_host_cpu_features()
    if platform.machine() in ("x86_64", "AMD64", "i686") and "+f16c" not in features.split(","):
        raise UnsupportedError(
            "the codec needs a processor with F16C, which this one lacks or hides. In a virtual "
            "machine choose a CPU model that shows it (host-passthrough, or x86-64-v3; qemu64 does "
            "not); where NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set, unset it"
        )


_check_processor()


def _warn(cause: str) -> None:
    if _warned.is_set():
        return
    _warned.set()
    _log.warning(
        "compiled code is not kept, so each process compiles the codec anew at first use, some "
        "seconds each time: %s; set NUMBA_CACHE_DIR to a folder that can be written to",
        cause,
    )


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """numba's own, for which a folder that cannot be read or written is no error."""

    def load_overload(self, *args: Any) -> Any:
        try:
            return super().load_overload(*args)
        except OSError:
            return None

    def save_overload(self, *args: Any) -> None:
        try:
            super().save_overload(*args)
        except OSError as e:
            _warn(str(e.strerror))


def _kept(function: Any) -> Any:
    """What ``cache=True`` does to a compiled function, with :class:`_Cache`."""
    try:
        function._cache = _Cache(function.py_func)
    except RuntimeError as e:  # "no locator available"
        _warn(str(e).rsplit(": ", 1)[-1])
    return function


def jit(function: Callable[..., Any]) -> Any:
    """A compiled function that releases the GIL."""
    return _kept(njit(**_OPTIONS)(function))


def inline(function: Callable[..., Any]) -> Any:
    """A function that becomes part of each compiled one that calls it."""
    return _kept(njit(**_OPTIONS, inline="always")(function))
