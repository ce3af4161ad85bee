"""LMCache's server as a process of its own. For demos and benchmarks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError

_START_SECONDS = 120.0
_IDLE_SECONDS = 120.0


def lynx_adapter(params: Mapping[str, Any]) -> dict[str, Any]:
    """The server's ``--l2-adapter`` for Lynx with some ``adapter_params``."""
    return {
        "type": "plugin",
        "module_path": "lynx_backend.integrations.lmcache_l2",
        "class_name": "LynxL2Adapter",
        "adapter_params": dict(params),
    }


@dataclass
class LMCacheServer:
    """Starts and stops one server; its ports stay the same.

    Attributes:
        adapter: its L2, as ``--l2-adapter`` takes it.
        log: a file that its output is added to.
        l1_gb: memory of its own.
    """

    adapter: Mapping[str, Any]
    log: Path
    l1_gb: float = 1.0
    port: int = field(default_factory=lambda: _free_port())
    http_port: int = field(default_factory=lambda: _free_port())

    def connector(self, cpu: bool = True) -> dict[str, Any]:
        """What vLLM is told to use this server with (``KVTransferConfig``)."""
        path = {"kv_connector_module_path": "lynx_backend.integrations.lmcache_mp_cpu"}
        return {
            "kv_connector": "LMCacheMPConnectorCPU" if cpu else "LMCacheMPConnector",
            **(path if cpu else {}),
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    @contextmanager
    def running(self) -> Iterator[LMCacheServer]:
        """The server until the end of the block; L1 is empty at its start.

        Raises:
            UnsupportedError: it did not start; the message has the end of its log.
        """
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-port", str(self.http_port)),
            *("--l1-size-gb", str(self.l1_gb), "--l1-align-bytes", "4096"),
            *("--eviction-policy", "LRU", "--chunk-size", "256"),
            *("--supported-transfer-mode", "engine_driven"),
            *("--l2-adapter", json.dumps(self.adapter)),
        ]
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        with self.log.open("ab") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            self._wait_started(process)
            yield self
        finally:
            process.terminate()
            process.wait()

    def _wait_started(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                self.get("/healthcheck")
                return
            time.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-3000:]
        raise UnsupportedError(f"LMCache's server did not start; the end of its log:\n{tail}")

    def get(self, path: str, method: str = "GET") -> Any:
        """What the server's HTTP interface answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        return text if path == "/metrics" else json.loads(text)

    def clear_l1(self) -> None:
        """Leave nothing but what L2 has."""
        self.wait_idle()
        self.get("/cache/clear", "POST")

    def wait_idle(self) -> None:
        """Return once nothing waits to be stored.

        Raises:
            UnsupportedError: something still does after two minutes.
        """
        deadline = time.monotonic() + _IDLE_SECONDS
        idle = 0  # in a row: keys that the server has just picked up are in neither count
        while time.monotonic() < deadline:
            store = self.get("/status")["storage_manager"]["store_controller"]
            busy = store["pending_keys_count"] or store["in_flight_task_count"]
            idle = 0 if busy else idle + 1
            if idle == 3:
                return
            time.sleep(0.1)
        raise UnsupportedError(f"LMCache's server is still busy: see {self.log}")

    @property
    def status(self) -> dict[str, Any]:
        """Of the L2 adapter."""
        (found,) = self.get("/status")["storage_manager"]["l2_adapters"]
        return dict(found)

    def metrics(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with some labels."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            found = re.fullmatch(r"(\w+)(\{.*\})? (\S+)", line)
            if found and found[1] == name and all(
                f'{key}="{value}"' in (found[2] or "") for key, value in labels.items()
            ):  # fmt: skip
                total += float(found[3])
        return total


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
