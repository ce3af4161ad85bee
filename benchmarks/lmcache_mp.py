"""LMCache's server with vLLM on a CPU: Lynx beside what LMCache has itself, and faults.

``compare``: the same prompts through LMCache's file system adapter as it is (naive), through its
fp8 serde, and through Lynx; each with a first engine that computes and stores, a cleared L1, and a
fresh engine that loads. ``times``: how long storing and loading take in LMCache's storage, in
alternating rounds of one process. ``faults``: requests while something is broken.

``compare`` and ``faults`` need the environment that ``make demo-vllm-mp`` makes, and the faults
redis-server and the right to mount; ``times`` needs LMCache alone.

    .venv-vllm/bin/python benchmarks/lmcache_mp.py compare --out docs/results/vllm/lmcache-mp.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lynx_backend import benchmarks
from lynx_backend.cli.demo_vllm import prepare
from lynx_backend.integrations.lmcache_server import LMCacheServer, lynx_adapter
from lynx_backend.integrations.vllm_request import Answer, Job, Result, run

TEXTS = Path(benchmarks.__file__).parent / "data"


def prompts_of(model: str, tokens: int, out: Path) -> tuple[str, list[list[int]], Path, int]:
    """The model's folder, a prompt from each text, a calibration, elements of a prompt's cache."""
    found = []
    for name in ("book", "speech"):
        text = (TEXTS / f"{name}.txt").read_text()
        place, prompt, elements, calibration = prepare(model, text, tokens, out)
        found.append(prompt)
    return str(place), found, calibration, elements


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def agreement(a: Answer, b: Answer) -> tuple[float, float]:
    """Share of equal tokens, and the KL divergence, both as long as the tokens before are equal."""
    same = [x == y for x, y in zip(a.tokens, b.tokens, strict=True)]
    alike = same.index(False) + 1 if False in same else len(same)
    p, q = (torch.tensor(each.logprobs[:alike], dtype=torch.float64) for each in (a, b))
    kl = (p.exp() * (p - q)).nan_to_num().sum(-1).mean()
    return sum(same) / len(same), float(kl)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place, prompts, calibration, elements = prompts_of(args.model, args.tokens, args.out.parent)

    def job(transfer: dict[str, Any] | None, logprobs: bool = True) -> Job:
        return Job(place, prompts, args.new, transfer, logprobs=logprobs)

    alone = run(job(None), log=folder / "alone.log")
    nvme = {"path": str(folder / "lynx"), "max_bytes": "4GiB", "min_free_bytes": 0}
    adapters = {
        "LMCache fs, naive": {"type": "fs", "base_path": str(folder / "fs")},
        "LMCache fs, fp8 serde": {
            "type": "fs", "base_path": str(folder / "fp8"), "serde": {"type": "fp8"}
        },
        "Lynx": lynx_adapter({"nvme": nvme, "codec": {"calibration": str(calibration)}}),
    }  # fmt: skip
    rows = {}
    for name, adapter in adapters.items():
        kept = Path(nvme["path"] if name == "Lynx" else adapter["base_path"])
        server = LMCacheServer(adapter, folder / f"{name}.server.log")
        with server.running():
            cold = run(job(server.connector(), False), log=folder / f"{name}.cold.log")
            server.clear_l1()
            warm = run(job(server.connector()), log=folder / f"{name}.warm.log")
            text = server.get("/metrics")
            agreed = [agreement(*pair) for pair in zip(alone.answers, warm.answers, strict=True)]
            rows[name] = {
                "stored_bytes": size_of(kept),
                "same": statistics.mean(same for same, _ in agreed),
                "kl": statistics.mean(kl for _, kl in agreed),
                "cached": [answer.cached_tokens for answer in warm.answers],
                "cold_seconds": [answer.first_token_seconds for answer in cold.answers],
                "warm_seconds": [answer.first_token_seconds for answer in warm.answers],
                "metrics": [
                    line for line in text.splitlines() if "l2_" in line and "bucket" not in line
                ],
                "server_log": [
                    line for line in server.log.read_text(errors="replace").splitlines()
                    if "Prefetch request completed" in line
                ],
            }  # fmt: skip
            print(name, rows[name], flush=True)
    return {
        "prompts": [len(prompt) for prompt in prompts],
        "elements": elements * len(prompts),
        "alone_seconds": [answer.first_token_seconds for answer in alone.answers],
        "rows": rows,
    }


# -- times -----------------------------------------------------------------------------------------


def times(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Storing and loading five chunks of a real cache, by LMCache's own controllers.

    Rounds alternate between the adapters, so that all of them see the same machine.
    """
    chunks = real_chunks(args.model)
    _, _, calibration, _ = prompts_of(args.model, 300, args.out.parent)
    nvme = {"path": str(folder / "lynx"), "max_bytes": "4GiB", "min_free_bytes": 0}
    lynx = {"nvme": nvme, "codec": {"calibration": str(calibration)}}
    managers = {
        "LMCache fs, naive": storage({"type": "fs", "base_path": str(folder / "fs")}),
        "LMCache fs, fp8 serde": storage(
            {"type": "fs", "base_path": str(folder / "fp8"), "serde": {"type": "fp8"}}
        ),
        "Lynx": storage(lynx_adapter(lynx)),
        "Lynx, in memory": storage(
            lynx_adapter({**lynx, "nvme": {}, "memory": {"enabled": True, "max_bytes": "1GiB"}})
        ),
    }
    seconds: dict[str, dict[str, list[float]]] = {n: {"store": [], "load": []} for n in managers}
    for number in range(args.rounds + 1):
        for name, manager in managers.items():
            store, load = one_round(manager, chunks, number)
            if number:  # the first one compiles
                seconds[name]["store"].append(store)
                seconds[name]["load"].append(load)
    for manager in managers.values():
        manager.close()
    raw = sum(chunk.numel() for chunk in chunks) * chunks[0].element_size()
    found = {
        name: {what: statistics.median(each) for what, each in of.items()}
        for name, of in seconds.items()
    }
    print(raw, found)
    return {"raw_bytes": raw, "median_seconds": found, "rounds": seconds}


def real_chunks(model: str) -> list[torch.Tensor]:
    """Five chunks of a text's cache in float32, as LMCache's server gets them from vLLM's CPU."""
    from lynx_backend.engines.kv_buffer import KVBuffer
    from lynx_backend.integrations.lmcache.page_layouts import PageLayout
    from lynx_backend.models import load_model
    from lynx_backend.texts import prompt_tokens

    loaded, tokenizer = load_model(model)
    buffer = KVBuffer(loaded, 1280)
    buffer.prefill(prompt_tokens(tokenizer, (TEXTS / "book.txt").read_text(), 1280))
    _, layers, _, heads, head_dim = buffer.data.shape
    pages = PageLayout("vllm_cpu", heads, head_dim, 128)
    chunks = []
    for start in range(0, 1280, 256):
        rows = torch.empty(layers, 256, pages.row)
        pages.pack(buffer.data[:, :, start : start + 256].contiguous(), rows)
        chunks.append(rows)
    return chunks


def storage(adapter: dict[str, Any]) -> Any:
    """The storage half of LMCache's server with one adapter."""
    from lmcache.v1.distributed import config
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdaptersConfig,
        parse_args_to_l2_adapters_config,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    given = argparse.Namespace(l2_adapter=[json.dumps(adapter)])
    memory = config.L1MemoryManagerConfig(256 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        config.StorageManagerConfig(
            config.L1ManagerConfig(memory_config=memory),
            config.EvictionConfig(eviction_policy="LRU"),
            L2AdaptersConfig(parse_args_to_l2_adapters_config(given).adapters),
        )
    )


def one_round(manager: Any, chunks: list[torch.Tensor], number: int) -> tuple[float, float]:
    """Seconds to store new chunks into L2, and to load them after L1 was cleared."""
    from lmcache.v1.distributed import api

    desc = api.MemoryLayoutDesc([chunks[0].shape], [chunks[0].dtype])
    rank = api.ObjectKey.ComputeKVRank(1, 0, 1, 0)
    keys = [api.ObjectKey(bytes([number, i]) * 16, "smollm2", rank) for i in range(len(chunks))]
    objects = manager.reserve_write(keys, desc)
    for key, chunk in zip(keys, chunks, strict=True):
        objects[key].tensor.copy_(chunk)
    ((_, adapter),) = manager.l2_adapters()
    before = adapter.get_usage().total_bytes_used
    start = time.perf_counter()
    manager.finish_write(keys)
    while adapter.get_usage().total_bytes_used == before:  # one task, counted at its end
        time.sleep(0.001)
    stored = time.perf_counter() - start
    manager.clear(force=True)
    rows = [api.GroupedObjectKeys(keys, 0, desc, api.FULL_ATTENTION_WINDOW_CHUNKS)]
    start = time.perf_counter()
    handle = manager.submit_prefetch_task(api.PrefetchTaskSpec(rows))
    assert manager.wait_prefetch_status(handle, 60.0)
    loaded = time.perf_counter() - start
    hits = manager.query_prefetch_status(handle).hit_cells[0].get_indices_list()
    assert len(hits) == len(keys), hits
    manager.finish_read_prefetched(keys)
    manager.clear(force=True)
    return stored, loaded


# -- faults ----------------------------------------------------------------------------------------


def faults(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place, prompts, calibration, _ = prompts_of(args.model, args.tokens, args.out.parent)
    codec = {"calibration": str(calibration)}
    good = folder / "good"
    nvme = {"path": str(good), "max_bytes": "4GiB", "min_free_bytes": 0}
    first = LMCacheServer(lynx_adapter({"nvme": nvme, "codec": codec}), folder / "good.log")
    with first.running():
        # Nothing is found here, so these are the tokens without a cache.
        alone = run(Job(place, prompts, args.new, first.connector()), log=folder / "store.log")
        first.wait_idle()

    def case(
        name: str, params: dict[str, Any], during: Callable[[LMCacheServer], None] | None = None
    ) -> dict[str, Any]:
        server = LMCacheServer(lynx_adapter({"codec": codec, **params}), folder / f"{name}.log")
        with server.running():
            watcher = threading.Thread(target=during or (lambda _: None), args=(server,))
            watcher.start()
            job = Job(place, prompts, args.new, server.connector())
            result = run(job, log=folder / f"{name}.engine.log")
            watcher.join()
            server.wait_idle()
            row = report(server, alone, result)
        print(name, row, flush=True)
        return row

    def copy(name: str) -> Path:
        shutil.copytree(good, folder / name)  # keeps the times of the files
        return folder / name

    def at(path: Path, **more: Any) -> dict[str, Any]:
        return {"nvme": {**nvme, "path": str(path), **more}}

    rows = {}
    broken = copy("broken")
    paths = objects(broken)
    flipped, swapped = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    for path in flipped:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    for part in (".0", ".1"):
        same_part = [path for path in swapped if path.name.endswith(part)]
        contents = [path.read_bytes() for path in same_part]
        for path, data in zip(same_part, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(data)
    rows["objects damaged (prompt 1), under each other's names (prompt 2)"] = case(
        "broken", at(broken)
    )
    rows["the cache of another model"] = case(
        "model", {**at(copy("model")), "namespace": "another model"}
    )

    full = folder / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "lynx", str(full)], check=True)
    try:
        rows["the disk is full"] = case("full", at(full / "kv", direct=False))
    finally:
        subprocess.run(["umount", "-l", str(full)], check=True)

    redis = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(redis), "--save", ""]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(process.kill)
        while not redis.exists():
            time.sleep(0.05)

        def kill(server: LMCacheServer) -> None:
            """Once the first prompt's store has begun."""
            while server.metrics("lynx_bytes_total", direction="in") == 0:
                time.sleep(0.05)
            process.kill()

        rows["Redis is killed during the first store"] = case(
            "redis", {"redis": {"url": f"unix://{redis}"}}, kill
        )
    return {"prompts": [len(prompt) for prompt in prompts], "rows": rows}


def objects(folder: Path) -> list[Path]:
    """In the order in which they were written."""
    paths = [path for path in folder.rglob("*.[01]") if path.is_file()]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def report(server: LMCacheServer, alone: Result, result: Result) -> dict[str, Any]:
    answers = result.answers
    results = ("hit", "corrupt", "mismatch", "miss", "error")
    return {
        "answered": len(answers),
        "same": sum(
            a.tokens == b.tokens for a, b in zip(alone.answers, answers, strict=True)
        ),
        "cached": [answer.cached_tokens for answer in answers],
        "errors": int(server.metrics("lynx_errors_total")),
        "gets": {
            each: int(server.metrics("lynx_objects_total", op="get", result=each))
            for each in results
        },
        "puts": {
            each: int(server.metrics("lynx_objects_total", op="put", result=each))
            for each in ("ok", "error")
        },
        "healthy": server.status["is_healthy"],
        "failing": server.status["failing"],
        "answers": [asdict(answer) for answer in answers],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["compare", "times", "faults"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1450)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/lmcache-mp.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lynx-mp-", ignore_cleanup_errors=True) as folder:
        found = {"compare": compare, "times": times, "faults": faults}[args.what](
            args, Path(folder)
        )
    args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
