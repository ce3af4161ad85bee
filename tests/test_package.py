"""The package as users get it: a wheel in a clean environment, an editable install, the command."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import lynx_backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_packaged():
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "lynx_backend").rglob("*.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == folders | {"lynx_backend.kernels"}


def test_one_version():
    assert lynx_backend.__version__ == PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {lynx_backend.__version__}" in changelog


def test_kernels_are_found_where_the_package_is_installed():
    kernels = pytest.importorskip(
        "lynx_backend.kernels", reason="lynx-backend is on the path but not installed"
    )
    assert "bit plane" in kernels.source("README.md")
    with pytest.raises(FileNotFoundError):
        kernels.source("nothing.cu")


def run(*command: str | Path, **options: Any) -> str:
    """Run a command that sees nothing of this environment's packages; its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LYNX_"))}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_in_a_clean_environment(tmp_path: Path):
    """Built, installed without its sources, and used; dependencies are borrowed from here."""
    sources = tmp_path / "sources"
    for name in ("lynx_backend", "kernels"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, sources)
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = (home / "lib").glob("python*/site-packages")
    borrowed = [p for p in site.getsitepackages() if "site-packages" in p]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    script = """
import sys, torch, lynx_backend, lynx_backend.kernels
assert lynx_backend.__file__.startswith(sys.prefix), lynx_backend.__file__
assert "bit plane" in lynx_backend.kernels.source("README.md")
from lynx_backend.benchmarks.texts import TEXTS, draft_prompts
assert all(text() for text in TEXTS.values()) and len(draft_prompts()) == 224
codec = lynx_backend.Codec()
kv = torch.randn(2, 1, 40, 2, 8)
assert codec.decode(*codec.encode(kv)).shape == kv.shape
"""
    run(python, "-c", script, cwd=tmp_path)
    version = run(home / "bin" / "lynx", "--version", cwd=tmp_path)
    assert version == f"lynx-backend {lynx_backend.__version__}\n"
