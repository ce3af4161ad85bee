"""The CUDA kernels compile, for the oldest GPU they are meant for and a new one.

NVRTC needs no GPU. What the kernels compute is tested where there is one:
``integration_tests/test_codec_cuda.py``.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from lynx_backend.codec.cuda_defines import (
    CHUNKED_FILES,
    DECODE_FILES,
    ENCODE_FILES,
    OPTIONS,
    chunked_defines,
    decode_defines,
    encode_defines,
)
from lynx_backend.codec.spec import CodecSpec

KERNELS = Path(__file__).parents[1] / "kernels"
SHARED = 232448  # bytes a block may have on Hopper


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    found = find_spec("nvidia")
    places = found.submodule_search_locations if found else ()
    for place in places or ():
        for builtins in sorted(Path(place).glob("c*/lib/libnvrtc-builtins.so.1*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            library = next(builtins.parent.glob("libnvrtc.so.1?"))
            return ctypes.CDLL(str(library))
    pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")


def compiled(
    nvrtc: ctypes.CDLL, files: tuple[str, ...], defines: dict[str, object], to: str
) -> int:
    """Bytes of machine code or PTX."""
    code = "\n".join((KERNELS / name).read_text() for name in files).encode()
    options = [*OPTIONS, f"--gpu-architecture={to}", *(f"-D{k}={v}" for k, v in defines.items())]
    raw = [o.encode() for o in options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"kernels.cu", 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(raw), (ctypes.c_char_p * len(raw))(*raw))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert not failed, log.value.decode()
    getter = nvrtc.nvrtcGetCUBINSize if to.startswith("sm") else nvrtc.nvrtcGetPTXSize
    getter(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return size.value


def place(dtype: int, vec: int, heads: int, dim: int, block: int = 0) -> dict[str, int]:
    return {"DTYPE": dtype, "HEADS": heads, "DIM": dim, "BLOCK": block, "VEC": vec}


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (CodecSpec("linear"), place(0, 8, 8, 128, 16)),
        (CodecSpec("linear", 3, 5, chunk=12, page_tokens=24), place(2, 1, 3, 33)),
        (CodecSpec("linear", 8, 0, alpha=15.0, page_tokens=1024), place(1, 4, 3, 20, 1)),
        (CodecSpec("paper", 2, 2, chunk=1), place(1, 2, 2, 6)),
    ],
)
def test_chunked(nvrtc: ctypes.CDLL, spec: CodecSpec, where: dict[str, int]):
    defines = chunked_defines(spec, where)
    assert compiled(nvrtc, CHUNKED_FILES, defines, "compute_80") > 10000


@pytest.mark.parametrize(
    ("spec", "where", "kv", "pairs"),
    [
        (CodecSpec("adaptive"), place(0, 8, 8, 128, 16), 2, 64),
        (CodecSpec("adaptive", 2, 6, alpha=0.0, page_tokens=8), place(2, 1, 3, 33), 2, 8),
        (CodecSpec("adaptive", 8, 0), place(0, 8, 1, 576), 1, 0),
    ],
)
def test_adaptive(nvrtc: ctypes.CDLL, spec: CodecSpec, where: dict[str, int], kv: int, pairs: int):
    for files, define in ((ENCODE_FILES, encode_defines), (DECODE_FILES, decode_defines)):
        defines, shared = define(spec, where, kv, pairs, SHARED)
        assert shared <= SHARED
        assert compiled(nvrtc, files, defines, "compute_80") > 10000


def test_machine_code_of_the_defaults(nvrtc: ctypes.CDLL):
    where = place(0, 8, 8, 128)
    encode, _ = encode_defines(CodecSpec(), where, 2, 0, SHARED)
    decode, _ = decode_defines(CodecSpec(), where, 2, 0, SHARED)
    for files, defines in (
        (CHUNKED_FILES, chunked_defines(CodecSpec("linear"), where)),
        (ENCODE_FILES, encode),
        (DECODE_FILES, decode),
    ):
        assert compiled(nvrtc, files, defines, "sm_90") > 10000
