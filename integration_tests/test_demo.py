"""The demo on its real model: every promise its table makes, on a short prompt and a fast link."""

from __future__ import annotations

import json
import sys

import pytest

from lynx_backend.cli import main


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("demo")
    arguments = ["--tokens", "700", "--new", "24", "--gbps", "0.05", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lynx", "demo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
    assert exit_.value.code in (None, 0)
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((out / "demo.json").read_text())
    return {**facts, "by_name": {run["name"]: run for run in facts["runs"]}}


def test_tokens_equal_decoding_on_the_refined_cache(result):
    lynx = result["by_name"]["Lynx"]
    assert lynx["same_as_full"] == result["new_tokens"] == len(lynx["tokens"])


def test_bytes_are_those_of_the_formats(result):
    elements = 2 * 30 * 699 * 3 * 64
    assert result["by_name"]["BF16"]["wire_bytes"] == 2 * elements
    bits = {name: run["bits"] for name, run in result["by_name"].items()}
    assert bits["BF16"] == 16
    assert bits["INT8"] == pytest.approx(8 + 16 / 192)
    assert bits["INT4"] == pytest.approx(4 + 16 / 192)
    assert 8.6 < bits["Lynx"] < 8.75


def test_anchors_land_before_residuals_and_nothing_is_visible_before_it_is_verified(result):
    lynx = result["by_name"]["Lynx"]
    assert lynx["landed"]["anchor"][-1][0] <= lynx["landed"]["residual"][1][0]
    assert lynx["drafts"], "the residual takes 0.37 s: long enough to draft"
    assert lynx["landed"]["anchor"][-1][0] <= lynx["drafts"][0]
    assert lynx["landed"]["residual"][-1][0] <= lynx["visible"][0]
    assert 0 <= lynx["accepted"] <= len(lynx["drafts"])


def test_the_link_keeps_its_rate(result):
    """Never faster than set, beyond the link's small burst: times are not made up."""
    for run in result["by_name"].values():
        last = max(curve[-1][0] for curve in run["landed"].values())
        assert last >= 0.95 * run["wire_bytes"] * 8 / (result["gbps"] * 1e9)
