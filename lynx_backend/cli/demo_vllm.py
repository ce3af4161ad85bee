"""``lynx demo-vllm``: a real vLLM with LMCache and Lynx on this machine's CPU, in one table."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ..errors import UnsupportedError
from ..integrations.vllm_request import (
    CPU_CONNECTOR,
    Answer,
    Job,
    Result,
    lmcache_with_lynx,
    run,
)
from .options import TextOption, read_text

_CALIBRATION_TEXT = Path(__file__).parents[1] / "benchmarks" / "data" / "chat.txt"
_CALIBRATION_TOKENS = 512
_START_SECONDS = 60.0


@dataclass
class Row:
    """One place that the second process loaded from.

    Attributes:
        name: of the place.
        stored_bytes: that the first process put there.
        warm: the second process's answer.
    """

    name: str
    stored_bytes: int
    warm: Answer


ModelOption = Annotated[str, typer.Option(help="smollm2, gemma3, or a folder with a model.")]
TokensOption = Annotated[int, typer.Option(min=257, help="Length of the prompt in tokens.")]
NewOption = Annotated[int, typer.Option(min=1, help="Tokens to generate.")]
OutOption = Annotated[Path, typer.Option(help="Folder for results and logs.", file_okay=False)]


def demo_vllm(
    model: ModelOption = "smollm2",
    text: TextOption = None,
    tokens: TokensOption = 1450,
    new: NewOption = 32,
    out: OutOption = Path("out/demo-vllm"),
) -> None:
    """Answer a long prompt in one vLLM process, and again in fresh ones that load its cache.

    The first process computes everything; Lynx stores the cache on disk and in Redis. Each further
    process has never seen the prompt: it finds the cache on disk, in Redis, or at a peer
    (`lynx serve`) over UCX. LMCache's own memory cache is off, so that only Lynx can answer. Redis
    and the peer are left out where redis-server or ucxx is not installed.
    """
    console = Console()
    if find_spec("vllm") is None or find_spec("lmcache") is None:
        raise UnsupportedError("this demo needs vLLM for CPUs and LMCache: run `make demo-vllm`")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lynx-demo-") as folder, ExitStack() as stack:
        disk = Path(folder) / "nvme"
        with console.status("load the model, calibrate the codec on another text"):
            place, prompt, elements, calibration = prepare(model, read_text(text), tokens, out)
        codec = {"codec": {"calibration": str(calibration)}, "memory": {"enabled": False}}
        tiers: dict[str, dict[str, Any]] = {
            "nvme": {"path": str(disk), "max_bytes": "1GiB", "min_free_bytes": 0}
        }
        if shutil.which("redis-server"):
            tiers["redis"] = {"url": stack.enter_context(_redis(Path(folder)))}

        def job(lynx: dict[str, Any]) -> Job:
            return Job(
                str(place), [prompt], new, CPU_CONNECTOR, lmcache_with_lynx({**codec, **lynx})
            )

        def answer(name: str, lynx: dict[str, Any]) -> Result:
            with console.status(f"{name}: start vLLM, ask"):
                return run(job(lynx), log=out / f"{name}.log")

        cold = answer("cold", tiers)
        rows = []
        for name, settings in tiers.items():
            warm = answer(name, {name: settings})
            rows.append(Row(name, cold.written[name], warm.answers[0]))
        if find_spec("ucxx") is not None:
            address = stack.enter_context(_peer(Path(folder), {**codec, "nvme": tiers["nvme"]}))
            peers = {"peers": {"nodes": address}, "memory": {"max_bytes": "256MiB"}}
            warm = answer("peer", peers)
            rows.append(Row("UCX peer", cold.written["nvme"], warm.answers[0]))
    facts = {
        "model": model,
        "prompt_tokens": len(prompt),
        "bf16_bytes": 2 * elements,
        "cold": asdict(cold.answers[0]),
        "rows": [asdict(row) for row in rows],
    }
    (out / "demo.json").write_text(json.dumps(facts, indent=1))
    _show(console, cold.answers[0], rows, len(prompt), elements)
    console.print(f"Raw numbers and the logs of every process: {out}")


def prepare(name: str, text: str, count: int, out: Path) -> tuple[Path, list[int], int, Path]:
    """The model's folder, the prompt, the elements of its whole chunks' cache, a calibration."""
    from ..engines.calibrate import calibrate
    from ..models import load_model, model_folder
    from ..texts import prompt_tokens

    place = model_folder(name)
    loaded, tokenizer = load_model(name)
    prompt = prompt_tokens(tokenizer, text, count)
    other = prompt_tokens(tokenizer, read_text(_CALIBRATION_TEXT), _CALIBRATION_TOKENS)
    made = calibrate(loaded, other)
    path = (out / "calibration.npz").absolute()
    made.save(path)
    return place, prompt, 2 * made.priority.size * (count // 256 * 256), path


@contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """A server of our own, for as long as this lasts; its URL."""
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
    with process(command, folder / "redis.log"):
        wait(path.exists, "redis-server")
        yield f"unix://{path}"


@contextmanager
def _peer(folder: Path, settings: dict[str, Any]) -> Iterator[str]:
    """``lynx serve`` over the stored objects; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, log = folder / "peer.yaml", folder / "peer.log"
    file.write_text(yaml.safe_dump({**settings, "serve": {"port": port}}))
    main = "from lynx_backend.cli import main; main()"
    command = [sys.executable, "-c", main, "serve", "--config", str(file)]
    with process(command, log):
        wait(lambda: "serving" in log.read_text(), "lynx serve")
        yield f"127.0.0.1:{port}"


@contextmanager
def process(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield
        finally:
            process.terminate()


def wait(ready: Any, what: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise UnsupportedError(f"{what} did not start within {_START_SECONDS:g} s")
        time.sleep(0.05)


def _show(console: Console, cold: Answer, rows: list[Row], prompt: int, elements: int) -> None:
    console.print(
        f"\n{prompt} tokens of prompt. Their cache's whole chunks take {2 * elements / 1e6:.1f} MB "
        f"in BF16.\nWithout a cache the first token took {cold.first_token_seconds:.2f} s.\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    headings = (
        "loaded\nfrom", "MB", "bits", "of\nBF16", "prompt\ncached", "from\nLMCache", "from\nvLLM",
        "first\ntoken, s", "load,\ns", "same\ntokens",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading.startswith("loaded") else "right")
    for row in rows:
        same = sum(a == b for a, b in zip(row.warm.tokens, cold.tokens, strict=True))
        table.add_row(
            row.name,
            f"{row.stored_bytes / 1e6:.1f}",
            f"{8 * row.stored_bytes / elements:.2f}",
            f"{row.stored_bytes / (2 * elements):.0%}",
            str(row.warm.cached_tokens),
            str(row.warm.external_hits),
            str(row.warm.own_hits),
            f"{row.warm.first_token_seconds:.2f}",
            f"{row.warm.retrieve_seconds:.2f}",
            f"{same}/{len(cold.tokens)}",
        )
    console.print(table)
    console.print(
        "\nEach row is a fresh process. bits: stored, for each element of the cache. same\n"
        "tokens: equal to those of the process that computed everything itself.\n"
    )
