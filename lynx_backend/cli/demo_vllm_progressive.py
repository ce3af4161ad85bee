"""``lynx demo-vllm-progressive``: prefill in one vLLM, decode in another, a slow link between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import UnsupportedError
from ..integrations.vllm_request import (
    CPU_CONNECTOR,
    PROGRESSIVE_CONNECTOR,
    PROGRESSIVE_ENGINE,
    Answer,
    Job,
    Result,
    run,
)
from ..shaped_link import Link, shaped_link
from .demo_vllm import ModelOption, NewOption, OutOption, TokensOption, prepare, process, wait
from .options import TextOption, read_text

_CHUNK = 256
_REDIS_PORT = 6379
_PLUGIN = "lynx_backend.integrations"
_BASELINES = {"BF16": "Bf16Backend", "INT8": "Int8Backend", "INT4": "Int4Backend"}
_WITHOUT, _WITH = "Lynx", "Lynx drafting"
_CACHEGEN = "CacheGen"
#: A plain load of BF16 takes as long as the link needs; nobody gives up before.
_PATIENCE_SECONDS = 300.0
_ENGINE = {"async_scheduling": False, "enable_prefix_caching": False}


@dataclass(frozen=True)
class _Scene:
    """What all rows share.

    Attributes:
        place: the model's folder.
        stored: the folder of the prefill side's objects.
        out: where logs go.
    """

    place: str
    prompt: list[int]
    new: int
    codec: dict[str, Any]
    stored: Path
    out: Path
    link: Link

    def decode(self, name: str, lmcache: dict[str, Any], draft: str | None = None) -> Result:
        """Ask a fresh decode engine that has never seen the prompt.

        Args:
            draft: "always" or "never", as ``lynx.draft``; None for LMCache's own connector.
        """
        transfer: dict[str, Any] = CPU_CONNECTOR
        if draft is not None:
            transfer = PROGRESSIVE_CONNECTOR | {
                "kv_connector_extra_config": {
                    "lynx.draft": draft,
                    "lynx.anchor_seconds": _PATIENCE_SECONDS,
                    "lynx.residual_seconds": _PATIENCE_SECONDS,
                },
            }
        job = Job(self.place, [self.prompt], self.new, transfer if lmcache else None, lmcache)
        job.engine = _ENGINE if draft is None else _ENGINE | PROGRESSIVE_ENGINE
        # What else crosses the loopback is not this job's.
        job.device = self.link.device if self.link.shaped else None
        job.environment = {"OMP_NUM_THREADS": str(_threads())}
        job.settle_seconds = 1.0 if "remote_url" in lmcache else 0.0
        return run(job, log=self.out / f"decode-{name.replace(' ', '-')}.log".lower())


def demo_vllm_progressive(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    tokens: TokensOption = 4100,
    mbps: Annotated[
        float,
        typer.Option(
            min=1,
            help="Rate of the link in Mbit/s. By default the residual of the default prompt takes "
            "some fifty decode steps of the default model on two cores.",
        ),
    ] = 50.0,
    new: NewOption = 64,
    cachegen: Annotated[
        bool, typer.Option(help="With LMCache's CacheGen, whose codec takes long on a CPU.")
    ] = True,
    out: OutOption = Path("out/demo-vllm-progressive"),
) -> None:
    """Prefill a long prompt in one vLLM, send its cache over a slow link, and decode in another.

    The prefill engine runs in a network namespace of its own, behind a link that the kernel shapes
    (tc tbf), and stores the cache in every form at once. Then for each form a fresh decode engine
    on this side fetches it and decodes: over UCX from a peer or, for CacheGen, from Redis through
    LMCache's own remote backend. All is real: engines, model, bytes, link and clock. Without the
    right to make namespaces (root), the link is the loopback, and the sender keeps to the rate.
    """
    console = Console()
    missing = [name for name in ("vllm", "lmcache", "ucxx") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"this demo needs {', '.join(missing)}: run `make demo-vllm-progressive`"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lynx-demo-") as folder, shaped_link(mbps) as link:
        with console.status("load the model, calibrate the codec on another text"):
            place, prompt, elements, calibration = prepare(model, read_text(text), tokens, out)
        codec = {"codec": {"calibration": str(calibration)}, "memory": {"enabled": False}}
        scene = _Scene(str(place), prompt, new, codec, Path(folder) / "objects", out, link)
        kind = "two network namespaces, tc tbf" if link.shaped else "loopback, paced by the sender"
        console.print(f"The link: {mbps:g} Mbit/s, {kind}.")
        rows: dict[str, Result] = {}
        with console.status("vLLM alone computes the prompt: what no transfer would cost"):
            rows["computed"] = scene.decode("computed", {})
        with _redis(scene, cachegen) as redis:
            with console.status("the prefill engine computes the prompt and stores its cache"):
                _prefill(scene, redis)
            with _node(scene, mbps) as address:
                for name in (*_BASELINES, _CACHEGEN, _WITHOUT, _WITH):
                    if name == _CACHEGEN and redis is None:
                        continue
                    with console.status(f"{name}: start a decode engine, ask"):
                        rows[name] = _row(scene, name, address, redis)
                    if not rows[name].answers[0].external_hits:
                        raise UnsupportedError(
                            f"{name}: the decode engine loaded nothing; its log in {out} says why"
                        )
    facts = {
        "model": model,
        "prompt_tokens": len(prompt),
        "bf16_bytes": 2 * elements,
        "mbps": mbps,
        "link": kind,
        "rows": {name: asdict(row) for name, row in rows.items()},
    }
    (out / "demo.json").write_text(json.dumps(facts, indent=1))
    _show(console, facts, rows, elements)
    console.print(f"Raw numbers and the logs of every process: {out}")


def _threads() -> int:
    """Of an engine: a core is left for the network and the codec, for which its threads spin."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _prefill(scene: _Scene, redis: str | None) -> None:
    """One engine at the far end, which keeps the cache in all forms."""
    nvme = {"path": str(scene.stored), "max_bytes": "4GiB", "min_free_bytes": 0}
    classes = {
        "lynx": ("lmcache_plugin", "LynxBackend"),
        **{name.lower(): ("lmcache_baseline", cls) for name, cls in _BASELINES.items()},
    }
    lmcache = _lmcache(classes, {**scene.codec, "nvme": nvme})
    if redis is not None:
        lmcache |= {"remote_url": redis, "remote_serde": "cachegen"}
    job = Job(scene.place, [scene.prompt], 1, CPU_CONNECTOR, lmcache, engine=_ENGINE)
    job.environment = {"VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": str(_threads())}
    # LMCache's own remote backend has no way to say when it has written.
    job.settle_seconds = 5.0 if redis else 0.0
    result = run(job, log=scene.out / "prefill.log", prefix=scene.link.prefix)
    if result.errors:
        raise UnsupportedError(f"the prefill engine did not store everything: {result.errors}")


def _row(scene: _Scene, name: str, address: str, redis: str | None) -> Result:
    peers = {"nodes": address, "fetch_seconds": _PATIENCE_SECONDS}
    if name in _BASELINES:
        classes = {"lynx": ("lmcache_baseline", _BASELINES[name])}
        return scene.decode(name, _lmcache(classes, {"peers": peers}))
    if name == _CACHEGEN:
        remote = {"remote_url": redis, "remote_serde": "cachegen"}
        patience = {"blocking_timeout_secs": int(_PATIENCE_SECONDS)}
        return scene.decode(name, {**_lmcache({}, {}), **remote, **patience})
    lynx = {**scene.codec, "memory": {"max_bytes": "1GiB"}, "peers": peers}
    classes = {"lynx": ("lmcache_plugin", "LynxBackend")}
    return scene.decode(name, _lmcache(classes, lynx), draft="always" if name == _WITH else "never")


def _lmcache(classes: dict[str, tuple[str, str]], lynx: dict[str, Any]) -> dict[str, Any]:
    """LMCache's configuration with some storage plugins, and nothing in its own memory."""
    extra: dict[str, Any] = {"lynx": lynx}
    for name, (module, cls) in classes.items():
        extra[f"storage_plugin.{name}.module_path"] = f"{_PLUGIN}.{module}"
        extra[f"storage_plugin.{name}.class_name"] = cls
    return {
        "chunk_size": _CHUNK,
        "local_cpu": False,
        "max_local_cpu_size": 2,
        "storage_plugins": [*classes],
        "extra_config": extra,
    }


@contextmanager
def _node(scene: _Scene, mbps: float) -> Iterator[str]:
    """The far end's objects, offered over UCX; the address."""
    rate = [] if scene.link.shaped else [str(mbps * 1e6 / 8)]
    module = [sys.executable, "-m", f"{_PLUGIN}.lmcache_baseline"]
    command = [*scene.link.prefix, *module, str(scene.stored), scene.link.there, "0", *rate]
    with (
        (scene.out / "node.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as node,
    ):
        assert node.stdin is not None
        assert node.stdout is not None
        try:
            yield f"{scene.link.there}:{node.stdout.readline().decode().strip()}"
        finally:
            node.stdin.close()


@contextmanager
def _redis(scene: _Scene, wanted: bool) -> Iterator[str | None]:
    """A server at the far end; None without one, or where nothing would slow it down."""
    if not (wanted and scene.link.shaped and shutil.which("redis-server")):
        yield None
        return
    there = scene.link.there
    command = [*scene.link.prefix, "redis-server", "--bind", there, "--port", str(_REDIS_PORT)]
    log = scene.out / "redis.log"
    with process([*command, "--protected-mode", "no", "--save", ""], log):
        wait(lambda: "Ready to accept" in log.read_text(), "redis-server")
        yield f"redis://{there}:{_REDIS_PORT}"


def _show(console: Console, facts: dict[str, Any], rows: dict[str, Result], elements: int) -> None:
    answers = {name: row.answers[0] for name, row in rows.items()}
    full, exact = answers[_WITHOUT], answers["computed"]
    console.print(
        f"\n{facts['prompt_tokens']} tokens of prompt. Their cache's whole chunks take "
        f"{facts['bf16_bytes'] / 1e6:.1f} MB in BF16.\n"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    headings = (
        "", "MB", "bits", "first\ndraft", "first\ntoken", "32nd\ntoken", "64th\ntoken",
        "drafts\nkept", "same as\nQ_full", "same as\ncomputed",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, answer in answers.items():
        drafts = rows[name].drafts
        drafted = drafts.get("accepted", 0) + drafts.get("rejected", 0)
        counted = answer.external_hits > 0 and answer.received_bytes > 0
        table.add_row(
            name,
            f"{answer.received_bytes / 1e6:.1f}" if counted else "",
            f"{8 * answer.received_bytes / elements:.2f}" if counted else "",
            _nth(answer.draft_seconds, 1),
            *(_nth(answer.token_seconds, n) for n in (1, 32, 64)),
            f"{drafts.get('accepted', 0)}/{drafted}" if drafted else "",
            _same(answer, full) if name.startswith(_WITHOUT) else "",
            _same(answer, exact),
        )
    console.print(table)
    console.print(
        "\nEach row is a fresh decode engine. MB: came in over the link, with headers.\n"
        "bits: the same for each element of the cache. Times in seconds after the\n"
        "request; tokens: what a client may see. drafts kept: by verification.\n"
        "Q_full: the cache that anchors and residuals give, decoded plainly.\n"
        "computed: without a cache.\n"
    )


def _nth(times: list[float], n: int) -> str:
    return f"{times[n - 1]:.2f}" if len(times) >= n else ""


def _same(one: Answer, other: Answer) -> str:
    same = sum(a == b for a, b in zip(one.tokens, other.tokens, strict=True))
    return f"{same}/{len(other.tokens)}"
