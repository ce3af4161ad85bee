"""Nodes that find each other in a real Redis: ``lynx serve`` in processes that are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from _redis_servers import Server, free_port, needs_redis, running, wait_until

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")
pytest.importorskip("redis", reason="the directory needs redis-py")

from lynx_backend import logs
from lynx_backend.config import LynxConfig, RedisConfig
from lynx_backend.directory import Directory, Registration
from lynx_backend.errors import ConfigError, TransportError
from lynx_backend.keys import ChunkKey
from lynx_backend.peers import PeerTier, peers_from_config
from lynx_backend.store import ChunkStore, Presence, codec_from_config
from lynx_backend.transport.member import Member

pytestmark = needs_redis

WAIT_SECONDS = 60.0
LEASE_SECONDS = 1.5
CODEC = {"profile": "linear"}
KEYS = [ChunkKey(bytes(16), bytes([i]) * 16) for i in range(3)]
COMMAND = "from lynx_backend.cli import main; main()"
Serve = Callable[..., subprocess.Popen[bytes]]


def settings(url: str, **sections: object) -> LynxConfig:
    inline = {
        "codec": CODEC,
        "memory": {"max_bytes": "64MiB"},
        "redis": {"url": url, "tier": False, "timeout_seconds": 1.0, "retries": 0},
        "directory": {"enabled": True, "lease_seconds": LEASE_SECONDS},
    }
    return LynxConfig.load(inline=inline | sections, environ={})


FINGERPRINT = codec_from_config(settings("redis://nowhere").codec).spec.fingerprint


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(Server(tmp_path / "redis")) as started:
        yield started


@pytest.fixture
def serve(tmp_path: Path, server: Server) -> Iterator[Serve]:
    """Starts a node that holds some of ``KEYS``."""
    made: list[subprocess.Popen[bytes]] = []

    def start(*held: int, port: int = 0, lease: float = LEASE_SECONDS) -> subprocess.Popen[bytes]:
        folder = tmp_path / f"node{len(made)}"
        own = {"codec": CODEC, "memory": {"enabled": False}, "nvme": {"path": str(folder / "kv")}}
        store = ChunkStore.from_config(LynxConfig.load(inline=own, environ={}))
        for i in held:
            assert store.put(KEYS[i], chunk(i))
        store.close()
        shared = {
            "redis": {"url": server.url, "tier": False},
            "directory": {"enabled": True, "lease_seconds": lease},
            "serve": {"port": port},
        }
        file = folder / "lynx.yaml"
        file.write_text(yaml.safe_dump(own | shared))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LYNX_")}
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            env=environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
        made.append(process)
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def directory(server: Server) -> Iterator[Directory]:
    opened = Directory(RedisConfig(url=server.url), FINGERPRINT)
    yield opened
    opened.close()


@pytest.fixture
def store(server: Server) -> Iterator[ChunkStore]:
    opened = ChunkStore.from_config(settings(server.url))
    yield opened
    opened.close()


def chunk(i: int) -> torch.Tensor:
    return torch.randn(2, 4, 256, 2, 64, generator=torch.Generator().manual_seed(i)).bfloat16()


def address(process: subprocess.Popen[bytes]) -> tuple[str, int]:
    assert process.stdout is not None
    lines = iter(process.stdout.readline, b"")
    line = next(line for line in lines if line.startswith(b"serving"))
    host, port = line.split()[-1].decode().rsplit(":", 1)
    return host, int(port)


def eventually(condition: Callable[[], object]) -> None:
    wait_until(condition, WAIT_SECONDS)


def test_a_store_finds_two_nodes_and_a_killed_one_is_gone_with_its_lease(
    serve: Serve, store: ChunkStore, directory: Directory
):
    first, second = serve(0), serve(1)
    places = {address(first), address(second)}
    eventually(lambda: {(m.host, m.port) for m in directory.members()} == places)
    eventually(lambda: store.lookup(KEYS) == [Presence.FULL, Presence.FULL, Presence.ABSENT])
    for i in (0, 1):
        kv = store.get(KEYS[i])
        assert kv is not None
        assert torch.equal(kv, store.codec.decode(*store.codec.encode(chunk(i), KEYS[i].digest)))
    store.remove(KEYS)  # here; the nodes keep theirs
    first.send_signal(signal.SIGKILL)
    first.wait()
    # While its lease lasts it is still listed, and what it held is a miss.
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.ABSENT])
    assert store.lookup(KEYS[1:2]) == [Presence.FULL]
    eventually(lambda: len(directory.members()) == 1)
    assert store.get(KEYS[0]) is None


def test_a_node_at_the_same_address_with_another_identity_is_new(
    serve: Serve, store: ChunkStore, directory: Directory
):
    first = serve(0)
    host, port = address(first)
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    (before,) = directory.members()
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = serve(2, port=port)
    assert address(second) == (host, port)
    eventually(lambda: store.lookup(KEYS) == [Presence.ABSENT, Presence.ABSENT, Presence.FULL])
    eventually(lambda: len(directory.members()) == 1)
    (after,) = directory.members()
    assert (after.host, after.port) == (before.host, before.port)
    assert after.node != before.node


def test_sigterm_leaves_at_once(serve: Serve, directory: Directory):
    node = serve(0, lease=1000.0)
    address(node)
    eventually(directory.members)
    node.send_signal(signal.SIGTERM)
    assert node.wait(WAIT_SECONDS) == 0
    assert directory.members() == []


def test_without_redis_the_last_known_nodes_are_used_and_one_line_says_so(
    serve: Serve, server: Server, store: ChunkStore, caplog: pytest.LogCaptureFixture
):
    serve(0)
    eventually(lambda: store.lookup(KEYS[:1]) == [Presence.FULL])
    logs._limiter._last.clear()
    with caplog.at_level(logging.WARNING):
        server.kill()
        eventually(lambda: any("list the nodes" in r.message for r in caplog.records))
        # Longer than a lease: nobody can know whether it ended.
        assert not store_changes(store, 3 * LEASE_SECONDS)
        assert store.get(KEYS[0]) is not None
        assert sum("list the nodes" in r.message for r in caplog.records) == 1
    # A store made now knows nobody: misses, no error.
    other = ChunkStore.from_config(settings(server.url))
    assert other.lookup(KEYS) == [Presence.ABSENT] * 3
    assert other.get(KEYS[0]) is None
    server.start()
    eventually(lambda: other.lookup(KEYS[:1]) == [Presence.FULL])
    other.close()


def test_a_password_file_that_is_away_for_a_moment_does_not_end_the_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    locked = Server(
        tmp_path / "redis",
        arguments=("--requirepass", "s3cret"),
        cli=("-a", "s3cret", "--no-auth-warning"),
    )
    logs._limiter._last.clear()
    with running(locked):
        config = RedisConfig(url=locked.url, password_file=str(secret))
        reader = Directory(config, FINGERPRINT)
        directory = Directory(config, FINGERPRINT)
        secret.unlink()
        directory.close()  # as after a failover: the next call connects anew
        member = Member("127.0.0.1", 7430, "0f" * 16)
        lease = Registration(directory, member, LEASE_SECONDS)
        wait_until(lambda: "password_file" in caplog.text, WAIT_SECONDS)
        assert reader.members() == []
        secret.write_text("s3cret")
        wait_until(lambda: reader.members() == [member], WAIT_SECONDS)
        lease.close()
        assert reader.members() == []
        reader.close()


def store_changes(store: ChunkStore, seconds: float) -> bool:
    """Whether the first chunk is ever not found within so many seconds."""
    try:
        wait_until(lambda: store.lookup(KEYS[:1]) != [Presence.FULL], seconds)
    except TimeoutError:
        return False
    return True


def test_a_lease_ends_by_itself_and_can_be_renewed(directory: Directory):
    member = Member("127.0.0.1", 1, "ab")
    directory.renew(member, 1000.0)
    assert directory.members() == [member]
    directory.renew(member, 0.05)
    eventually(lambda: not directory.members())
    directory.renew(member, 1000.0)
    assert directory.members() == [member]
    directory.leave(member)
    assert directory.members() == []


def test_what_is_no_node_is_not_taken_for_one(server: Server, directory: Directory):
    member = Member("::1", 7430, "ab")
    directory.renew(member, 1000.0)
    key = f"lynx:nodes:{FINGERPRINT}"
    for nonsense in ("", "a b", "a b c", "a b 0", "a b 65536", "a b 1 2", "\x00\xff"):
        server.ask("ZADD", key, "1e18", nonsense.replace("\x00", "?"))
    assert directory.members() == [member]
    server.ask("SET", key, "taken")
    with pytest.raises(TransportError, match=r"cannot list the nodes: .*WRONGTYPE"):
        directory.members()


def test_nodes_of_another_codec_are_not_found(server: Server, directory: Directory):
    directory.renew(Member("127.0.0.1", 1, "ab"), 1000.0)
    other = Directory(RedisConfig(url=server.url), "another")
    assert other.members() == []
    other.close()


def test_members_come_and_go_while_objects_are_asked_for(server: Server):
    tier = peers_from_config(settings(server.url), FINGERPRINT)
    assert isinstance(tier, PeerTier)
    members = [Member("127.0.0.1", free_port(), f"{i:02x}") for i in range(8)]
    for some in (members, members[:3], [], members[5:]):
        tier.update(some)
        assert tier.sizes([KEYS[0].object(0)]) == [None]
        assert tier.get(KEYS[0].object(0)) is None
    tier.close()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"redis": {}}, "directory.enabled needs redis.url"),
        ({"redis": {"url": "http://nowhere"}}, "redis.url 'http://nowhere' is none of"),
        ({"peers": {"nodes": "a:1"}}, "both peers.nodes and directory.enabled"),
        ({"directory": {"enabled": True, "lease_seconds": 0}}, "must be more than 0"),
    ],
)
def test_settings_that_do_not_fit_are_errors(sections: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        ChunkStore.from_config(settings("redis://127.0.0.1:1", **sections))


@pytest.mark.parametrize(
    ("serve_section", "said"),
    [
        ({"host": "0.0.0.0"}, "set serve.advertise"),
        ({"advertise": "here"}, "serve.advertise: 'here' is not an address"),
    ],
)
def test_a_node_that_others_could_not_reach_does_not_start(
    serve_section: dict[str, object], said: str
):
    from lynx_backend.directory import registered

    config = settings("redis://127.0.0.1:1", serve=serve_section)
    with pytest.raises(ConfigError, match=said):
        registered(config, FINGERPRINT, (config.serve.host, 1), bytes(16))


@pytest.mark.parametrize(
    ("section", "host", "warned"),
    [
        ({}, "127.0.0.1", True),
        ({"host": "::1"}, "::1", True),
        ({"host": "localhost"}, "localhost", True),
        ({"advertise": "127.0.0.1:1"}, "127.0.0.1", False),
        ({"host": "10.0.0.2"}, "10.0.0.2", False),
        ({"host": "kv-3.internal"}, "kv-3.internal", False),
    ],
)
def test_a_node_that_only_its_machine_reaches_says_so(
    section: dict[str, object], host: str, warned: bool, caplog: pytest.LogCaptureFixture
):
    from lynx_backend.directory import registered

    config = settings("redis://127.0.0.1:1", serve=section)
    registered(config, FINGERPRINT, (host, 1), bytes(16)).close()
    assert ("for others set serve.host, or serve.advertise" in caplog.text) == warned


def test_what_is_advertised_is_what_others_see(server: Server, directory: Directory):
    from lynx_backend.directory import registered

    config = settings(server.url, serve={"host": "0.0.0.0", "advertise": "kv-3.internal:9000"})
    registration = registered(config, FINGERPRINT, ("0.0.0.0", 1), bytes(16))
    member = Member("kv-3.internal", 9000, bytes(16).hex())
    eventually(lambda: directory.members() == [member])
    registration.close()
    assert directory.members() == []


def test_check_shows_the_nodes_and_fails_without_the_directory(serve: Serve, server: Server):
    host, port = address(serve(0))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LYNX_")} | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "COLUMNS": "400",
        "LYNX_CODEC_PROFILE": "linear",
        "LYNX_MEMORY_MAX_BYTES": "64MiB",
        "LYNX_REDIS_URL": server.url,
        "LYNX_REDIS_TIER": "false",
        "LYNX_DIRECTORY_ENABLED": "true",
    }

    def check() -> tuple[int, str]:
        command = [sys.executable, "-c", COMMAND, "check"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    status, text = check()
    assert status == 0, text
    assert "Nodes of directory: 1" in text
    assert f"{host}:{port}" in text
    server.kill()
    status, text = check()
    assert status == 1
    assert "the directory failed" in text
