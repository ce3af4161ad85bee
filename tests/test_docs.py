"""What the documentation shows is run, and what it points to exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

from lynx_backend import metrics
from lynx_backend.config import LynxConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_run(page: Path, tmp_path: Path):
    for code in blocks(page, "python"):
        known = {
            "tokens": list(range(300)),
            "kv": torch.randn(2, 30, 300, 3, 64).to(torch.bfloat16),
        }
        exec(code.replace("/mnt/nvme/lynx", str(tmp_path)), known)
        if "full" in known:
            assert known["full"].shape[:2] == (2, 30)


def test_the_configuration_page_shows_the_defaults(tmp_path: Path):
    page = ROOT / "docs" / "configuration.md"
    (text,) = blocks(page, "yaml")
    shown = yaml.safe_load(text)
    assert shown.pop("nvme").keys() == {
        *("path", "max_bytes", "min_free_bytes", "max_object_bytes", "low_watermark", "direct")
    }
    assert LynxConfig.load(inline=shown, environ={}) == LynxConfig.load(environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    named = r"`((?:tests|integration_tests|benchmarks|kernels|lynx_backend|docs)/[\w/.]+\.\w+)`"
    for target in re.findall(named, text):
        assert (ROOT / target).exists(), target


def test_the_operators_page_names_every_metric():
    page = (ROOT / "docs" / "operations.md").read_text()
    assert {*re.findall(r"`(lynx_\w+)`", page)} == metrics.REGISTRY.lynx_backend_metrics.keys()


def test_tables_of_measurements_are_those_of_the_raw_numbers():
    """After new results: python benchmarks/tables.py."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count("<!-- table: ") >= 10
    assert script["page"](text, script["results"]()) == text
