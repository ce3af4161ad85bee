"""Real vLLM engines on the CPU behind a real LMCache server with Lynx, as `make demo-vllm-mp` runs.

Needs an environment with vLLM, ``.venv-vllm`` as `make demo-vllm-mp` makes it or the one that
VLLM_VENV names. Four vLLM processes, so it takes minutes: ``pytest -m slow``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "python"
HITS = 5 * 256
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"no vLLM: {PYTHON} is made by make demo-vllm-mp"
    ),
]


def test_fresh_engines_and_a_restarted_server_hit(tmp_path):
    main = "from lynx_backend.cli import main; main()"
    subprocess.run(
        [str(PYTHON), "-c", main, "demo-vllm-mp", "--new", "16", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=1800,
    )
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["cold"]["cached_tokens"] == 0
    assert len(found["rows"]) == 3
    for row in found["rows"].values():
        assert row["external_hits"] == row["cached_tokens"] == HITS
        assert row["own_hits"] == 0
        assert row["tokens"] == found["cold"]["tokens"]
    assert 0.5 < found["stored_bytes"] / found["bf16_bytes"] < 0.56
    # The server's memory was empty after its restart: Lynx was read.
    assert found["read_bytes_after_restart"] >= found["stored_bytes"]
    assert found["status"]["is_healthy"]
    assert "Traceback" not in (tmp_path / "server.log").read_text()
