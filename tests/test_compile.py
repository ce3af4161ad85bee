"""The codec works where what numba compiles cannot be kept, and says where it cannot work."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lynx_backend"
USE = """
import torch
from lynx_backend import Codec, CodecSpec
codec, kv = Codec(CodecSpec("linear", exact_tokens=0)), torch.ones(1, 1, 8, 1, 8)
assert torch.equal(codec.decode(*codec.encode(kv)), kv)
"""


def run(script: str, root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the package below ``root`` and nothing of this process's numba settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    return subprocess.run(
        [sys.executable, "-c", script], env=kept | {"PYTHONPATH": str(root)} | env,
        cwd=root,  # which comes first on Python's path
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the package, nothing of it compiled."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "lynx_backend", ignore=ignore)
    return tmp_path


def test_no_folder_for_compiled_code_costs_time_only(copy: Path):
    """As with a read-only installation and no home, but such that root cannot write either."""
    (copy / "lynx_backend" / "codec" / "__pycache__").write_text("a file")
    done = run(USE, copy, HOME="/dev/null", XDG_CACHE_HOME="/dev/null")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1, done.stderr


def test_a_disk_that_takes_nothing_costs_time_only(copy: Path, tmp_path: Path):
    """The folder can be written to until something is: here no file may have a byte."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    done = run(limit + USE, copy, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1, done.stderr
    assert not [*(tmp_path / "cache").rglob("*.nb*")]


def test_compiled_code_is_kept(copy: Path, tmp_path: Path):
    done = run(USE, copy, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nbc")}
    assert kept
    assert run(USE, copy, NUMBA_CACHE_DIR=str(tmp_path / "cache")).returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.nbc")} == kept


@pytest.mark.skipif(platform.machine() != "x86_64", reason="F16C is a feature of x86")
@pytest.mark.parametrize("env", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "-f16c"}])
def test_a_processor_without_f16c_is_told_before_llvm_aborts(env: dict[str, str]):
    done = run(USE, PACKAGE.parent, **env)
    assert done.returncode == 1, done.stderr
    assert "UnsupportedError: the codec needs a processor with F16C" in done.stderr
