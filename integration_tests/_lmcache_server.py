"""A real ``lmcache server`` process with Lynx, and engines in this process that use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _redis_servers import free_port, wait_until

pytest.importorskip("lmcache", reason="LMCache is not installed: pip install --no-deps lmcache")
pytest.importorskip(
    "opentelemetry.exporter.prometheus", reason="`lmcache server` needs "
    "opentelemetry-exporter-prometheus"
)  # fmt: skip

from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

ROOT = Path(__file__).parents[1]
LAYERS, BLOCK, HEADS, DIM, BLOCKS = 2, 128, 2, 64, 16
MODULE = Path(__file__).with_name("remove_adapter.py")


@dataclass
class LMCacheServer:
    """One server process; its ports stay the same when it is started again.

    Attributes:
        folder: for its log and what Lynx keeps.
        params: ``adapter_params``.
        chunk_size: tokens of one object.
    """

    folder: Path
    params: dict[str, Any]
    l1_gb: float = 0.05
    chunk_size: int = 256

    def __post_init__(self) -> None:
        self.port, self.http_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True, parents=True)
        adapter = {
            "type": "plugin",
            "module_path": "lynx_backend.integrations.lmcache_l2",
            "class_name": "LynxL2Adapter",
            "adapter_params": self.params,
        }
        remover = {
            "module_path": "remove_adapter",
            "config": {"signal_file": str(self.folder / "remove")},
        }
        paths = [str(ROOT), str(MODULE.parent), os.environ.get("PYTHONPATH", "")]
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-port", str(self.http_port)),
            *("--l1-size-gb", str(self.l1_gb), "--l1-align-bytes", "4096"),
            *("--eviction-policy", "LRU"),
            *("--chunk-size", str(self.chunk_size), "--supported-transfer-mode", "engine_driven"),
            *("--l2-adapter", json.dumps(adapter), "--server-module", json.dumps(remover)),
        ]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "LMCACHE_TRACK_USAGE": "false",
            },
            stdout=(self.folder / "server.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: self._alive() and self.get("/healthcheck"), 90.0)
        except BaseException:
            self.kill()
            raise RuntimeError(self.log[-4000:]) from None

    def _alive(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            raise SystemExit("the server ended")  # no use to wait for it
        return True

    def get(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def metrics(self, name: str) -> float:
        """The sum of all of a metric's series."""
        url = f"http://127.0.0.1:{self.http_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    @property
    def adapter(self) -> dict[str, Any]:
        """Lynx's status, as the server shows it."""
        (status,) = self.get("/status")["storage_manager"]["l2_adapters"]
        return dict(status)

    def clear_l1(self) -> None:
        self.get("/cache/clear", "POST")

    def stop(self) -> str:
        """End it as an operator would; what it logged since it was started."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)
        return self.log.rpartition("Started server process")[2]

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(server: LMCacheServer) -> Iterator[LMCacheServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


class Engine:
    """An engine's worker: pages of its own, in host memory, behind LMCache's transfer."""

    def __init__(self, server: LMCacheServer, tokens: int) -> None:
        self.client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{server.port}",
                http_url=f"http://127.0.0.1:{server.http_port}",
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=tokens,
                kvcache_shape_spec=f"(2,{BLOCKS},{BLOCK},{HEADS},{DIM}):float32:{LAYERS}",
                num_blocks=BLOCKS,
                block_size=BLOCK,
            ),
            print,
        )
        self.client.start()

    @property
    def pages(self) -> list[torch.Tensor]:
        """Each layer's ``[2, blocks, block, heads, head_dim]``."""
        (worker,) = self.client._workers
        return list(worker.kv_caches.values())

    def request(self, prompt: int) -> Any:
        return self.client.create_request(prompt, f"request-{prompt}-{id(self)}", "test")

    def fill(self, prompt: int) -> list[torch.Tensor]:
        """Compute a prompt: numbers that look like a cache in its blocks; a copy of them."""
        g = torch.Generator().manual_seed(prompt)
        for page in self.pages:
            page.copy_(torch.randn(page.shape, generator=g))
            page[0] = page[0] * 0.2 + 3 * torch.randn(1, 1, HEADS, DIM, generator=g)
        return self.blocks(self.request(prompt))

    def blocks(self, request: Any) -> list[torch.Tensor]:
        first = request.block_offset
        return [page[:, first : first + request.num_blocks].clone() for page in self.pages]

    def store(self, prompt: int) -> bool:
        request = self.request(prompt)
        done = self.client.store(request, 0, request.num_full_tokens)
        return done is not None and done.succeeded

    def load(self, prompt: int) -> list[torch.Tensor] | None:
        """The prompt's blocks when the server has all of it, else None."""
        request = self.request(prompt)
        if not self.client.lookup(request).is_full_hit:
            return None
        for page in self.pages:
            page.zero_()
        done = self.client.retrieve(request, 0, request.num_full_tokens)
        return self.blocks(request) if done is not None and done.succeeded else None

    def close(self) -> None:
        self.client.close()


@contextmanager
def engines(server: LMCacheServer, count: int, tokens: int = 512) -> Iterator[Sequence[Engine]]:
    made: list[Engine] = []
    try:
        made.extend(Engine(server, tokens) for _ in range(count))
        yield made
    finally:
        for each in made:
            each.close()
