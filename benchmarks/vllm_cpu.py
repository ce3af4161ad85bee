"""LMCache's own formats and Lynx inside a real vLLM on the CPU, on the same prompts.

    .venv-vllm/bin/python benchmarks/vllm_cpu.py --out out/lmcache.json

Each contestant, a process of its own, stores all prompts, lets vLLM forget them, and loads them
from a folder on disk; LMCache's own memory cache is off. The reference is vLLM without any cache.
Agreement is counted on the new tokens; the divergence, KL(reference || contestant) in nats over the
whole vocabulary, at all positions up to and including the first where the outputs part, as only
there both have read the same tokens. Store and load are the seconds for which LMCache keeps vLLM
waiting for one prompt, medians over the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from lynx_backend.benchmarks.texts import TEXTS
from lynx_backend.integrations.vllm_request import CPU_CONNECTOR, Answer, Job, Result, run
from lynx_backend.models import model_folder
from lynx_backend.texts import prompt_tokens

PLUGIN = {
    "storage_plugin.lynx.module_path": "lynx_backend.integrations.lmcache_plugin",
    "storage_plugin.lynx.class_name": "LynxBackend",
}


def contestants(calibration: Path | None) -> dict[str, Any]:
    """What differs in LMCache's configuration, from the folder to store in."""

    def remote(serde: str) -> Any:
        return lambda folder: {"remote_url": f"fs://localhost:0{folder}", "remote_serde": serde}

    def lynx(**sections: Any) -> Any:
        def settings(folder: Path) -> dict[str, Any]:
            place = {"path": str(folder), "max_bytes": "4GiB", "min_free_bytes": 0}
            given = {"memory": {"enabled": False}, "nvme": place, **sections}
            return {"storage_plugins": ["lynx"], "extra_config": {**PLUGIN, "lynx": given}}

        return settings

    found = {
        "LMCache naive": remote("naive"),
        "LMCache cachegen": remote("cachegen"),
        "Lynx, uncalibrated": lynx(),
    }
    if calibration is not None:
        found["Lynx, calibrated"] = lynx(codec={"calibration": str(calibration)})
    return found


def stored_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f.name != "lock")


def calibrate(model: str, tokens: int, path: Path) -> None:
    from lynx_backend.engines.calibrate import calibrate
    from lynx_backend.models import load_model

    loaded, tokenizer = load_model(model)
    calibrate(loaded, prompt_tokens(tokenizer, TEXTS["chat"](), tokens)).save(path)


def compare(reference: Answer, answer: Answer) -> tuple[int, list[float]]:
    """Equal new tokens, and the divergence at each position that has the same context."""
    pairs = list(zip(reference.tokens, answer.tokens, strict=True))
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
    p = np.array(reference.logprobs[: parted + 1])
    q = np.array(answer.logprobs[: parted + 1])
    return sum(a == b for a, b in pairs), list((np.exp(p) * (p - q)).sum(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/lmcache.json"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1450)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--settle", type=float, default=30, help="seconds for LMCache's own writes")
    parser.add_argument("--texts", default="book,speech,chat_held_out")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    folder = model_folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    prompts = [prompt_tokens(tokenizer, TEXTS[n](), args.tokens) for n in args.texts.split(",")]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def ask(name: str, lmcache: dict[str, Any] | None, settle: float = 0.0) -> Result:
        job = Job(str(folder), prompts, args.new, logprobs=True)
        if lmcache is not None:
            job.transfer = CPU_CONNECTOR
            job.lmcache = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 1.0}
            job.lmcache.update(lmcache)
            job.settle_seconds, job.passes = settle, 2
        return run(job, seconds=1800, log=args.out.with_suffix(f".{name.replace(' ', '-')}.log"))

    reference = ask("reference", None).answers
    elements = json.loads((folder / "config.json").read_text())
    heads, layers = elements["num_key_value_heads"], elements["num_hidden_layers"]
    head_dim = elements.get("head_dim") or (
        elements["hidden_size"] // elements["num_attention_heads"]
    )
    whole = sum(len(p) // 256 * 256 for p in prompts)
    bf16 = 2 * 2 * layers * heads * head_dim * whole
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lynx-bench-") as temporary:
        calibration = Path(temporary) / "calibration.npz"
        calibrate(args.model, 1024, calibration)
        for i, (name, settings) in enumerate(contestants(calibration).items()):
            place = Path(temporary) / f"store-{i}"
            place.mkdir()
            result = ask(name, settings(place), 0.0 if "Lynx" in name else args.settle)
            first, second = result.answers[: len(prompts)], result.answers[len(prompts) :]
            if second[-1].external_hits != whole:
                raise SystemExit(f"{name} loaded {second[-1].external_hits} tokens of {whole}")
            compared = [compare(a, b) for a, b in zip(reference, second, strict=True)]
            size = stored_bytes(place)
            rows[name] = {
                "bytes": size,
                "of_bf16": size / bf16,
                "hits": second[-1].external_hits,
                "store_seconds": statistics.median(a.store_seconds for a in first),
                "load_seconds": statistics.median(a.retrieve_seconds for a in second),
                "same": sum(same for same, _ in compared),
                "kl": float(np.mean([kl for _, each in compared for kl in each])),
                "kl_positions": sum(len(each) for _, each in compared),
                "errors": result.errors,
            }
            print(name, rows[name], flush=True)
    facts = {
        "model": args.model,
        "prompts": [len(p) for p in prompts],
        "new_tokens": args.new * len(prompts),
        "whole_chunk_tokens": whole,
        "bf16_bytes": bf16,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    args.out.write_text(json.dumps(facts, indent=1))
    same = f"same of {facts['new_tokens']}"
    print(f"\n| | MB | of BF16 | store, s | load, s | {same} | KL |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['bytes'] / 1e6:.1f} | {row['of_bf16']:.0%} "
            f"| {row['store_seconds']:.2f} | {row['load_seconds']:.2f} | {row['same']} "
            f"| {row['kl']:.1e} |"
        )


if __name__ == "__main__":
    main()
