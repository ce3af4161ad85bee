"""``lynx demo-vllm-mp``: vLLM engines that share one LMCache server with Lynx as its L2."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import UnsupportedError
from ..integrations.lmcache_server import LMCacheServer, lynx_adapter
from ..integrations.vllm_request import Answer, Job, run
from .demo_vllm import ModelOption, NewOption, OutOption, TokensOption, prepare
from .options import TextOption, read_text


def demo_vllm_mp(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    tokens: TokensOption = 1450,
    new: NewOption = 32,
    out: OutOption = Path("out/demo-vllm-mp"),
) -> None:
    """Answer a long prompt in one vLLM process, and again in others behind the same LMCache server.

    The first engine computes everything, and the server hands its cache to Lynx. Then the server's
    memory is cleared and a fresh engine asks; then the server is started again, and two fresh
    engines ask at the same time. Only what Lynx keeps on disk can answer them.
    """
    console = Console()
    if find_spec("vllm") is None or find_spec("lmcache") is None:
        raise UnsupportedError("this demo needs vLLM for CPUs and LMCache: run `make demo-vllm-mp`")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lynx-demo-") as folder:
        with console.status("load the model, calibrate the codec on another text"):
            place, prompt, elements, calibration = prepare(model, read_text(text), tokens, out)
        params = {
            "nvme": {"path": f"{folder}/nvme", "max_bytes": "1GiB", "min_free_bytes": 0},
            "codec": {"calibration": str(calibration)},
        }
        server = LMCacheServer(lynx_adapter(params), out / "server.log")

        def answer(name: str) -> Answer:
            job = Job(str(place), [prompt], new, server.connector())
            return run(job, log=out / f"{name}.log").answers[0]

        rows: dict[str, Answer] = {}
        with console.status("an engine that computes everything"), server.running():
            cold = answer("cold")
            server.wait_idle()
            stored = server.metrics("lynx_bytes_total", direction="in")
            server.clear_l1()
            console.print("the server's memory is cleared")
            rows["a fresh engine"] = answer("fresh")
        with console.status("the server again, and two engines at once"), server.running():
            with ThreadPoolExecutor(2) as pool:
                names = ["after a restart, engine 1", "after a restart, engine 2"]
                found = pool.map(answer, ["restart-1", "restart-2"])
                rows.update(zip(names, found, strict=True))
            read = server.metrics("lynx_bytes_total", direction="out")
            status = server.status
    facts = {
        "model": model,
        "prompt_tokens": len(prompt),
        "bf16_bytes": 2 * elements,
        "stored_bytes": stored,
        "read_bytes_after_restart": read,
        "status": status,
        "cold": asdict(cold),
        "rows": {name: asdict(row) for name, row in rows.items()},
    }
    (out / "demo.json").write_text(json.dumps(facts, indent=1))
    _show(console, facts, cold, rows)
    console.print(f"Raw numbers and the logs of every process: {out}")


def _show(console: Console, facts: dict[str, Any], cold: Answer, rows: dict[str, Answer]) -> None:
    stored, bf16 = facts["stored_bytes"], facts["bf16_bytes"]
    console.print(
        f"\n{facts['prompt_tokens']} tokens of prompt. Their cache's whole chunks take "
        f"{bf16 / 1e6:.1f} MB in BF16; Lynx stored {stored / 1e6:.1f} MB ({stored / bf16:.0%}, "
        f"{16 * stored / bf16:.2f} bits an element).\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("engine")
    headings = ("prompt\ncached", "from\nLMCache", "from\nvLLM", "first\ntoken, s", "same\ntokens")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in {"computes everything": cold, **rows}.items():
        same = sum(a == b for a, b in zip(row.tokens, cold.tokens, strict=True))
        table.add_row(
            name,
            str(row.cached_tokens),
            str(row.external_hits),
            str(row.own_hits),
            f"{row.first_token_seconds:.2f}",
            f"{same}/{len(cold.tokens)}",
        )
    console.print(table)
    console.print("\nEach row is a fresh process. The last two ran at the same time.\n")
