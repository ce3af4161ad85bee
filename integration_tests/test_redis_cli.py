"""``lynx check`` and ``lynx inspect`` on a real server that wants a password."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _redis_servers import Server, needs_redis, running

from lynx_backend import Codec
from lynx_backend.config import RedisConfig
from lynx_backend.keys import ChunkKey, Part
from lynx_backend.store import ChunkStore
from lynx_backend.tiers.redis import RedisTier

pytestmark = needs_redis
KEY = ChunkKey(b"i" * 16, b"p" * 16)
SECRET = "s3cret-of-the-test"


def lynx(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status, and all that the command prints, without the line breaks of a terminal."""
    script = "from lynx_backend.cli import main; main()"
    env = {k: v for k, v in os.environ.items() if not k.startswith("LYNX_")}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**env, "COLUMNS": "400", **environ},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_check_inspect_verify_and_remove(tmp_path: Path) -> None:
    server = Server(
        tmp_path / "redis",
        arguments=("--requirepass", SECRET),
        cli=("-a", SECRET, "--no-auth-warning"),
    )
    with running(server):
        tier = RedisTier(RedisConfig(url=server.url, password=SECRET))
        store = ChunkStore(Codec(), [tier])
        store.put(KEY, torch.ones(2, 1, 40, 1, 8, dtype=torch.bfloat16))
        environ = {"LYNX_REDIS_URL": server.url, "LYNX_REDIS_PASSWORD": SECRET}

        status, text = lynx("check", LYNX_MEMORY_MAX_BYTES="64MiB", **environ)
        assert status == 0, text
        for said in (
            "Tier redis",
            "write",
            "find",
            "read",
            "the server uses",
            "ok: 2 tiers",
            "***",
        ):
            assert said in text
        assert SECRET not in text
        assert len(list(tier.names())) == 2, "it leaves nothing of its own"

        status, text = lynx("inspect", **environ)
        assert status == 0, text
        assert str(KEY) in text
        assert lynx("inspect", "--verify", **environ)[0] == 0
        server.ask("SETRANGE", f"lynx:{KEY.object(Part.RESIDUAL)}", "300", "\x07")
        status, text = lynx("inspect", "--verify", **environ)
        assert status == 1
        assert f"damaged {KEY.object(Part.RESIDUAL)}" in text
        server.ask("DEL", f"lynx:{KEY.object(Part.ANCHOR)}")
        server.ask("LPUSH", f"lynx:{KEY.object(Part.ANCHOR)}", "no object")
        status, text = lynx("inspect", "--verify", **environ)
        assert status == 1
        assert f"not read {KEY.object(Part.ANCHOR)}" in text
        assert f"damaged {KEY.object(Part.RESIDUAL)}" in text, "the one behind it is read"
        assert "1 damaged, 0 of something else, 1 not read" in text
        assert lynx("inspect", str(KEY), "--remove", **environ)[0] == 0
        assert list(tier.names()) == []

        wrong = {**environ, "LYNX_REDIS_PASSWORD": "wr0ng"}
        status, text = lynx("check", LYNX_MEMORY_MAX_BYTES="64MiB", **wrong)
        assert status == 1
        assert "LYNX_REDIS_PASSWORD" in text
        assert "wr0ng" not in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://127.0.0.1:1", "can be reached"),
        ("redis:/kv", "is none of"),
        ("redis://:s3cret@kv?db=1", "is none of"),
    ],
)
def test_mistakes_are_readable(url: str, said: str) -> None:
    status, text = lynx("check", LYNX_REDIS_URL=url, LYNX_MEMORY_MAX_BYTES="64MiB")
    assert status in (1, 2)
    assert said in text
    assert "s3cret" not in text
    assert "Traceback" not in text
