"""``lynx proxy`` before two real vLLM servers, read by the real ``openai`` client.

The prefill engine stores the prompt's cache; the decode engine fetches it over a slow UCX link
between network namespaces, and drafts meanwhile. Needs an environment with vLLM, as
``test_vllm.py`` does; about three minutes: ``pytest -m slow``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from _redis_servers import free_port
from test_vllm import PYTHON, ROOT, pytestmark  # noqa: F401

from lynx_backend.integrations.vllm_request import (
    CPU_CONNECTOR,
    PROGRESSIVE_CONNECTOR,
    PROGRESSIVE_ENGINE,
    lmcache_with_lynx,
)
from lynx_backend.models import load_model, model_folder
from lynx_backend.shaped_link import shaped_link
from lynx_backend.texts import default_text, prompt_tokens

openai = pytest.importorskip("openai", reason="a client's view needs the openai package")
pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")
pytest.importorskip("aiohttp", reason="the proxy needs aiohttp")

#: At this rate 1024 tokens' residuals take about two seconds.
MBPS = 24.0
NEW = 40
COMMAND = "from lynx_backend.cli import main; main()"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
START_SECONDS = 300.0


@contextmanager
def running(command: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and all that it starts, for as long as this lasts."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp"} | environ
    options: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, env=env, **options) as made:
        try:
            yield made
        finally:
            made.terminate()
            with suppress(subprocess.TimeoutExpired):
                made.wait(30)
            end(made)


def end(process: subprocess.Popen[bytes]) -> None:
    """vLLM's engine does not end with its server when that is killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not ready():
        ended = process.poll() is not None or time.monotonic() > until
        assert not ended, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


class Place:
    """Everything, started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.model = str(model_folder("smollm2"))
        _, tokenizer = load_model("smollm2")
        self.tokens = prompt_tokens(tokenizer, default_text(), 8000)
        (folder / "chat.jinja").write_text(TEMPLATE)
        self.link = stack.enter_context(shaped_link(MBPS))
        if not self.link.shaped:
            pytest.skip("network namespaces need root, ip and tc")
        nvme = {"path": str(folder / "objects"), "max_bytes": "1GiB", "min_free_bytes": 0}
        self._node(nvme)
        quiet = {"memory": {"enabled": False}}
        self.prefill, self.prefill_url = self.vllm("prefill", {**quiet, "nvme": nvme})
        self.drafts = f"tcp://127.0.0.1:{free_port()}"
        peers = {"nodes": f"{self.link.there}:7430", "fetch_seconds": 60.0}
        # What was fetched is not kept, so that each request has to fetch.
        lynx = {"peers": peers, "tiering": {"write_behind_bytes": 0}}
        _, self.decode_url = self.vllm("decode", lynx, self.drafts)
        self.client = self.proxy()

    def _node(self, nvme: dict[str, Any]) -> None:
        file, log = self.folder / "serve.yaml", self.folder / "serve.log"
        serve = {"host": self.link.there, "port": 7430}
        file.write_text(
            yaml.safe_dump({"memory": {"enabled": False}, "nvme": nvme, "serve": serve})
        )
        command = [sys.executable, "-c", COMMAND, "serve", "--config", str(file)]
        made = self.stack.enter_context(running([*self.link.prefix, *command], log))
        wait_for(lambda: "serving" in log.read_text(), made, log)

    def vllm(
        self, name: str, lynx: dict[str, Any], drafts: str | None = None
    ) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        settings = self.folder / f"{name}.yaml"
        settings.write_text(yaml.safe_dump(lmcache_with_lynx(lynx)))
        transfer = dict(CPU_CONNECTOR)
        more = []
        if drafts is not None:
            transfer |= PROGRESSIVE_CONNECTOR | {
                "kv_connector_extra_config": {
                    "lynx.draft": "always",
                    "lynx.residual_seconds": 60.0,
                    "lynx.provisional": drafts,
                },
            }
            more += ["--scheduler-cls", PROGRESSIVE_ENGINE["scheduler_cls"]]
            more += ["--worker-cls", PROGRESSIVE_ENGINE["worker_cls"]]
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
            "--served-model-name", "m", "--port", str(port), "--dtype", "float32",
            "--max-model-len", "2048", "--enforce-eager", "--no-async-scheduling",
            "--no-enable-prefix-caching", "--chat-template", str(self.folder / "chat.jinja"),
            "--kv-transfer-config", json.dumps(transfer), *more,
        ]  # fmt: skip
        log = self.folder / f"{name}.log"
        environ = {
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_CONFIG_FILE": str(settings),
            "LMCACHE_TRACK_USAGE": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        made = self.stack.enter_context(running(command, log, **environ))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(f"{url}/health"), made, log)
        return made, url

    def proxy(self, *more: str) -> Any:
        """A client of a new proxy."""
        port = free_port()
        sides = ["--prefill", self.prefill_url, "--decode", self.decode_url]
        command = [sys.executable, "-c", COMMAND, "proxy", *sides, "--port", str(port), *more]
        if not more:
            command += ["--drafts", self.drafts]
        log = self.folder / f"proxy-{port}.log"
        made = self.stack.enter_context(running(command, log))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(f"{url}/v1/models"), made, log)
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def prompt(self, number: int) -> list[int]:
        """Prompts of 1100 tokens that nobody has seen before."""
        return self.tokens[1100 * number : 1100 * (number + 1)]

    def computed(self, prompt: list[int]) -> list[int]:
        """The first tokens that the prefill engine gives, all on the exact cache."""
        client = openai.OpenAI(base_url=f"{self.prefill_url}/v1", api_key="none")
        more = {"return_token_ids": True}
        made = client.completions.create(
            model="m", prompt=prompt, max_tokens=NEW, temperature=0, extra_body=more
        )
        return made.choices[0].token_ids

    def decoded(self, prompt: list[int], new: int = NEW) -> str:
        """What the decode engine gives without a proxy."""
        client = openai.OpenAI(base_url=f"{self.decode_url}/v1", api_key="none")
        made = client.completions.create(model="m", prompt=prompt, max_tokens=new, temperature=0)
        return made.choices[0].text


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("place"), stack)


def lynx(chunk: Any) -> dict[str, Any]:
    return (chunk.model_extra or {}).get("lynx") or {}


def test_a_stream_with_provisional_tokens(place):
    """The prefill side's token at once, drafts, what became of them, and nothing else as text."""
    prompt = place.prompt(0)
    began = time.monotonic()
    stream = place.client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=NEW,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"kv_transfer_params": {"lynx.provisional": True}},
    )
    chunks = [(time.monotonic() - began, chunk) for chunk in stream]
    first_at, first = chunks[0]
    assert lynx(first) == {"first_token_from": "prefill"}
    assert first.choices[0].text
    drafts = [(at, lynx(chunk)) for at, chunk in chunks if "provisional" in lynx(chunk)]
    assert drafts
    assert first_at < drafts[0][0]
    (verdict,) = [lynx(chunk) for _, chunk in chunks if "confirmed" in lynx(chunk)]
    assert verdict["confirmed"] + verdict["retracted"] == drafts[-1][1]["tokens"]
    text = "".join(c.choices[0].text for _, c in chunks if c.choices)
    shown = "".join(each["provisional"] for _, each in drafts)
    if not verdict["retracted"]:
        assert text.removeprefix(first.choices[0].text).startswith(shown)
    (told,) = [lynx(chunk) for _, chunk in chunks if "verified" in lynx(chunk)]
    assert told["first_token_from"] == "prefill"
    assert told["first_verified"] < told["first_draft"] < told["verified"][1][1]
    assert told["verified"][-1][0] == NEW
    usage = chunks[-1][1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), NEW)
    assert len({chunk.id for _, chunk in chunks}) == 1
    token = place.computed(prompt)[0]
    assert text == first.choices[0].text + place.decoded([*prompt, token], NEW - 1)


def test_a_client_that_knows_nothing_of_this(place):
    """In a chat, all at once; the same as from the stream's text."""
    ask: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": default_text()[:3000]}],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    whole = place.client.chat.completions.create(**ask)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 24
    told = (whole.model_extra or {})["lynx"]
    assert told["verified"][-1][0] == 24
    assert told["first_verified"] < told["first_draft"]
    stream = place.client.chat.completions.create(**ask, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert deltas[0].content
    assert "".join(each.content or "" for each in deltas) == whole.choices[0].message.content


def test_what_counts_its_own_tokens_is_sampled_by_the_decode_side(place):
    prompt = place.prompt(1)
    plain = place.decoded(prompt)
    word = next(each for each in plain.split()[3:] if each.isalpha())
    made = place.client.completions.create(
        model="m", prompt=prompt, max_tokens=NEW, temperature=0, stop=[word]
    )
    assert made.choices[0].text == plain[: plain.index(word)]
    assert (made.model_extra or {})["lynx"]["first_token_from"] == "decode"
    other = place.proxy("--first-token", "decode")
    made = other.completions.create(model="m", prompt=prompt, max_tokens=NEW, temperature=0)
    assert made.choices[0].text == plain
    assert (made.model_extra or {})["lynx"]["first_token_from"] == "decode"


def test_one_token_is_the_prefill_sides_and_a_bad_request_is_refused(place):
    prompt = place.prompt(2)
    made = place.client.completions.create(model="m", prompt=prompt, max_tokens=1, temperature=0)
    told = (made.model_extra or {})["lynx"]
    assert told["first_token_from"] == "prefill"
    assert len(told["verified"]) == 1
    assert made.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError):
        place.client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=-1)


def test_a_client_that_goes_away_takes_its_request_along(place):
    def counted(name: str) -> float:
        with urllib.request.urlopen(f"{place.decode_url}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    finished = counted("request_success_total")
    stream = place.client.completions.create(
        model="m",
        prompt=place.prompt(4),
        max_tokens=800,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert next(stream).choices[0].text
    assert next(stream).choices[0].text  # the decode engine's
    stream.close()
    until = time.monotonic() + START_SECONDS
    while counted("num_requests_running"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert counted("request_success_total") == finished


def test_a_prefill_side_that_hangs_is_done_without(place):
    prompt = place.prompt(5)
    client = place.proxy("--prefill-seconds", "2")
    os.killpg(place.prefill.pid, signal.SIGSTOP)
    try:
        made = client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0)
    finally:
        os.killpg(place.prefill.pid, signal.SIGCONT)
    assert made.choices[0].text == place.decoded(prompt, 8)
    assert (made.model_extra or {})["lynx"]["first_token_from"] == "decode"


def test_without_the_prefill_side_the_decode_side_computes(place):
    """The last test."""
    prompt = place.prompt(3)
    end(place.prefill)
    made = place.client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0)
    assert made.choices[0].text == place.decoded(prompt, 8)
    assert (made.model_extra or {})["lynx"]["first_token_from"] == "decode"
