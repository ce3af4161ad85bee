"""CUDA kernels from ``kernels/``, compiled by NVRTC for a spec and launched on torch's streams.

The only file that knows CuPy. Machine code is kept on disk (``CUPY_CACHE_DIR``), so that a machine
compiles a spec once; importing this fails with ``UnsupportedError`` where CuPy or a GPU is missing.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
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
        self._options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines))
        # A folder of its own in the repository, part of this package when installed.
        folder = importlib.import_module("lynx_backend.kernels")
        self._code = "\n".join(folder.source(name) for name in files)
        self._modules: dict[str, Any] = {}
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
        stream = _stream(torch.cuda.current_stream(device).cuda_stream, device)
        run = self._function(name, device, shared)
        run((blocks,), (threads,), args, shared_mem=shared, stream=stream)

    def _function(self, name: str, device: int, shared: int) -> Any:
        found = self._functions.get((name, device))
        if found is None:
            with _compiling:
                major, minor = torch.cuda.get_device_capability(device)
                target = f"sm_{major}{minor}"
                if target not in self._modules:
                    path = _compiled(self._code, self._options, target)
                    self._modules[target] = cupy.RawModule(path=str(path))
                found = self._modules[target].get_function(name)
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


# CuPy would compile, too, but always flushes denormals to zero: other bits than the CPU's.
def _compiled(code: str, options: tuple[str, ...], target: str) -> Path:
    """A file with machine code, compiled unless it is there from before."""
    version = cupy.cuda.nvrtc.getVersion()
    key = hashlib.sha256(repr((code, options, target, version)).encode()).hexdigest()
    path = _cache_folder() / f"lynx-{key[:40]}.cubin"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
            f.write(_compile(code, options, target))
        os.replace(f.name, path)
    return path


def _compile(code: str, options: tuple[str, ...], target: str) -> bytes:
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(code, "lynx.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={target}"))
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as e:
        raise UnsupportedError(
            f"NVRTC {nvrtc.getVersion()} cannot compile the kernels for {target} ({e}): install "
            f"the CuPy that fits the driver, or use device='cpu'\n{nvrtc.getProgramLog(program)}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)


@lru_cache(maxsize=1)
def _cache_folder() -> Path:
    """CuPy's folder for machine code, or one for this process where that cannot be written."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="lynx-kernels-"))
