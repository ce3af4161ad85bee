"""CUDA kernels from ``kernels/``, compiled by NVRTC for a spec and launched on torch's streams.

The only file that knows CuPy. CuPy keeps what it compiled on disk, so that a machine compiles a
spec once; importing this fails with ``UnsupportedError`` where CuPy or a GPU is missing.
"""

from __future__ import annotations

import importlib
import threading
from functools import lru_cache
from typing import Any

import torch

from ..errors import UnsupportedError
from .cuda_defines import OPTIONS

try:
    import cupy
except ImportError as e:
    raise UnsupportedError(
        'device "cuda" needs CuPy: pip install "lynx-backend[cuda12]" or "lynx-backend[cuda13]", '
        f"as the driver has it; or use device='cpu' ({e})"
    ) from None

if not torch.cuda.is_available():
    raise UnsupportedError(
        "torch sees no CUDA GPU here (torch.cuda.is_available() is False); use device='cpu'"
    )

_OLDEST = (8, 0)
#: A kernel that needs more shared memory must say so.
_SHARED_BY_DEFAULT = 47 << 10


def check_device(device: torch.device) -> torch.device:
    """The device with its index; raises UnsupportedError for one that cannot run the kernels."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UnsupportedError(f"there are {torch.cuda.device_count()} GPUs here, not cuda:{index}")
    found = torch.cuda.get_device_capability(index)
    if found < _OLDEST:
        raise UnsupportedError(
            f"cuda:{index} has compute capability {found[0]}.{found[1]}; the kernels need "
            f"{_OLDEST[0]}.{_OLDEST[1]} (Ampere) or newer; use device='cpu'"
        )
    return torch.device("cuda", index)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may have."""
    return int(cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"])


class Kernels:
    """The kernels of some source files under one set of definitions.

    Args:
        files: names in ``kernels/``, in order of inclusion.
        defines: preprocessor definitions.
    """

    def __init__(self, files: tuple[str, ...], defines: tuple[tuple[str, object], ...]) -> None:
        options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines))
        # A folder of its own in the repository, part of this package when installed.
        folder = importlib.import_module("lynx_backend.kernels")
        code = "\n".join(folder.source(name) for name in files)
        self._module = cupy.RawModule(code=code, options=options)
        self._functions: dict[tuple[str, int], Any] = {}

    @staticmethod
    def of(files: tuple[str, ...], defines: dict[str, object]) -> Kernels:
        """The same object for the same arguments."""
        return _kernels(files, tuple(defines.items()))

    def launch(
        self, name: str, blocks: int, threads: int, args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """Launch on torch's current device and stream.

        Args:
            name: of the kernel.
            blocks, threads: of the grid, of a block.
            args: NumPy scalars.
            shared: bytes of dynamic shared memory.
        """
        device = torch.cuda.current_device()
        stream = torch.cuda.current_stream(device).cuda_stream
        with cupy.cuda.Device(device), _stream(stream, device):
            self._function(name, device, shared)((blocks,), (threads,), args, shared_mem=shared)

    def _function(self, name: str, device: int, shared: int) -> Any:
        found = self._functions.get((name, device))
        if found is None:
            with _compiling:
                found = self._module.get_function(name)
                if shared > _SHARED_BY_DEFAULT:
                    found.max_dynamic_shared_size_bytes = shared
            self._functions[name, device] = found
        return found


_compiling = threading.Lock()


@lru_cache(maxsize=256)
def _kernels(files: tuple[str, ...], defines: tuple[tuple[str, object], ...]) -> Kernels:
    return Kernels(files, defines)


@lru_cache(maxsize=256)
def _stream(pointer: int, device: int) -> Any:
    return cupy.cuda.ExternalStream(pointer, device)
