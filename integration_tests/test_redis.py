"""The Redis tier on real servers: alone, TLS only, with ACL users, in a cluster, under Sentinel."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _redis_servers import (
    Server,
    certificates,
    cluster,
    free_port,
    needs_redis,
    running,
    tls_arguments,
    tls_cli,
    wait_until,
)

from lynx_backend.config import RedisConfig
from lynx_backend.errors import ConfigError, TierError, TierFullError
from lynx_backend.logs import WarningLimiter
from lynx_backend.testing import TierConformance
from lynx_backend.testing.tiers import UNIT, anchor, content, residual
from lynx_backend.tiers import Tier
from lynx_backend.tiers.redis import RedisTier

pytestmark = needs_redis

_PREFIXES = (f"test{i}" for i in itertools.count())


class OnRedis(TierConformance):
    """Each test has a key prefix of its own on one server."""

    config: RedisConfig

    def make_tier(self, max_bytes: int) -> Tier:
        settings = {**vars(self.config), "key_prefix": next(_PREFIXES)}
        return RedisTier(RedisConfig(**settings))

    def reopen(self, tier: Tier, max_bytes: int) -> Tier:
        assert isinstance(tier, RedisTier)
        return RedisTier(tier._config)

    def test_stats_are_within_the_capacity(self) -> None:
        """By a large object: a server also counts the buffers of its clients, which come and go."""
        tier = self.make_tier(0)
        before = tier.stats()
        tier.put(anchor(0), bytes(8 << 20))
        stats = tier.stats()
        assert before.used_bytes + (4 << 20) < stats.used_bytes <= stats.capacity_bytes
        assert (stats.objects, stats.anchor_only) == (None, None)


class TestStandalone(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(Server(tmp_path_factory.mktemp("redis"))) as server:
            cls.config = RedisConfig(url=server.url)
            yield server


class TestUnixSocketWithLifetimes(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("redis")
        with running(Server(folder, arguments=("--unixsocket", f"{folder}/s"))) as server:
            cls.config = RedisConfig(url=f"unix://{folder}/s", ttl_seconds=3600)
            yield server


class TestTlsOnly(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("redis")
        certificates(folder)
        port = free_port()
        arguments = (*tls_arguments(folder), "--tls-port", str(port))
        with running(Server(folder, port, arguments, tls_cli(folder))) as server:
            cls.config = RedisConfig(
                url=f"rediss://127.0.0.1:{port}",
                tls_ca_file=f"{folder}/ca.crt",
                tls_cert_file=f"{folder}/client.crt",
                tls_key_file=f"{folder}/client.key",
            )
            yield server

    def test_without_tls_or_trust_it_is_a_readable_error(self) -> None:
        port = str(self.config.url).rpartition(":")[2]
        for config in (
            RedisConfig(url=f"redis://127.0.0.1:{port}"),
            RedisConfig(url=f"rediss://127.0.0.1:{port}"),
            RedisConfig(url=f"rediss://127.0.0.1:{port}", tls_ca_file=self.config.tls_ca_file),
        ):
            with pytest.raises(TierError, match=f"127.0.0.1:{port}.*TLS"):
                RedisTier(config).get(anchor(0))


class TestAcl(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("redis")
        acl = folder / "users.acl"
        acl.write_text(
            "user default off\n"
            "user admin on >admin ~* &* +@all\n"
            "user lynx on >s3cret ~test* ~lynx:* +@read +@write +@connection +info -@dangerous "
            "+info +unlink\n"
        )
        server = Server(
            folder,
            arguments=("--aclfile", str(acl)),
            cli=("--user", "admin", "--pass", "admin", "--no-auth-warning"),
        )
        secret = folder / "secret"
        secret.write_text("s3cret\n")
        with running(server):
            cls.config = RedisConfig(url=server.url, username="lynx", password_file=str(secret))
            yield server

    def test_a_wrong_password_and_a_foreign_prefix_are_readable_errors(
        self, server: Server
    ) -> None:
        wrong = RedisTier(RedisConfig(url=server.url, username="lynx", password="wr0ng"))
        with pytest.raises(TierError, match="LYNX_REDIS_PASSWORD") as refused:
            wrong.get(anchor(0))
        assert "wr0ng" not in str(refused.value)
        settings = {**vars(self.config), "key_prefix": "other"}
        with pytest.raises(TierError, match="ACL user"):
            RedisTier(RedisConfig(**settings)).put(anchor(0), b"x")


class TestCluster(OnRedis):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def nodes(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
        with cluster(tmp_path_factory.mktemp("redis")) as nodes:
            hosts = ",".join(f"{node.host}:{node.port}" for node in nodes)
            cls.config = RedisConfig(url=f"redis+cluster://{hosts}")
            yield nodes

    def test_objects_lie_on_all_nodes(self, nodes: list[Server]) -> None:
        tier = self.make_tier(0)
        names = [f(i) for i in range(30) for f in (anchor, residual)]
        for name in names:
            tier.put(name, content(name, UNIT))
        assert all(int(node.ask("DBSIZE")) > 5 for node in nodes)
        assert tier.sizes(names) == [UNIT] * len(names)
        assert sorted(tier.names()) == sorted(names)

    def test_a_value_of_another_kind_is_that_names_trouble_alone(self, nodes: list[Server]) -> None:
        tier = self.make_tier(0)
        assert isinstance(tier, RedisTier)
        names = [anchor(i) for i in range(8)]
        for name in names:
            tier.put(name, b"x")
        tier.delete(names[:1])
        nodes[0].ask("-c", "RPUSH", tier._key(names[0]).decode(), "x")
        assert tier.get_many(names) == [None] + [b"x"] * 7
        assert tier.sizes(names) == [None] + [1] * 7


class TestOneServer:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(Server(tmp_path_factory.mktemp("redis"))) as server:
            yield server

    @pytest.fixture(autouse=True)
    def empty(self, server: Server) -> None:
        server.ask("FLUSHALL")

    def test_keys_of_others_are_not_ours(self, server: Server) -> None:
        tier = RedisTier(RedisConfig(url=server.url))
        other = RedisTier(RedisConfig(url=server.url, key_prefix="other"))
        tier.put(anchor(0), b"mine")
        other.put(anchor(0), b"other")
        server.ask("SET", "lynx:not-an-object", "x")
        server.ask("SET", f"lynxes:{anchor(1)}", "x")
        assert tier.get(anchor(0)) == b"mine"
        assert list(tier.names()) == [anchor(0)]
        tier.delete([anchor(0)])
        assert other.get(anchor(0)) == b"other"
        assert server.ask("EXISTS", "lynx:not-an-object").strip() == b"1"

    def test_a_value_of_another_kind_or_size_is_not_read(
        self,
        server: Server,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("lynx_backend.tiers.redis.warn_limited", WarningLimiter().warn)
        tier = RedisTier(RedisConfig(url=server.url, max_object_bytes=1000))
        server.ask("RPUSH", f"lynx:{anchor(0)}", "x")
        server.ask("SETRANGE", f"lynx:{anchor(1)}", str(50 << 20), "x")
        names = [anchor(i) for i in range(4)]
        tier.put(anchor(3), b"x")
        before = _foreign_values()
        with caplog.at_level(logging.WARNING):
            assert [tier.get(name) for name in names] == [None, None, None, b"x"]
        assert f"the value of {anchor(0)} is of another type" in caplog.text
        assert tier.get_many(names) == [None, None, None, b"x"]
        assert tier.sizes(names) == [None, None, None, 1]
        assert _foreign_values() == before + 6
        with pytest.raises(TierFullError, match="max_object_bytes=1000"):
            tier.put(anchor(2), bytes(1001))
        tier.put(anchor(2), bytes(1000))
        assert tier.get(anchor(2)) == bytes(1000)
        sent = dict(line.split(":") for line in server.ask("INFO", "stats").decode().split()[2:])
        assert int(sent["total_net_output_bytes"]) < 1 << 20
        for name in names[:2]:
            tier.put(name, b"ours")
        assert tier.get_many(names[:2]) == [b"ours"] * 2

    def test_a_lookup_of_a_thousand_is_one_command_batch(self, server: Server) -> None:
        tier = RedisTier(RedisConfig(url=server.url, connections=1))
        tier.sizes([anchor(0)])
        before = _stat(server, "total_reads_processed")
        tier.sizes([anchor(i) for i in range(1000)])
        reads = _stat(server, "total_reads_processed") - before
        assert reads < 20  # a batch is 120 kB, and the server reads in pieces

    def test_reads_that_wait_when_it_is_closed_fail_as_any_other_call(self, server: Server) -> None:
        tier = RedisTier(RedisConfig(url=server.url, connections=1))
        names = [anchor(i) for i in range(16)]
        tier.sizes(names)
        server.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as other:
                found = other.submit(tier.get_many, names)
                wait_until(lambda: tier._workers._work_queue.qsize() == 3)
                tier.close()
                server.signal(signal.SIGCONT)
                with pytest.raises(TierError, match="closed"):
                    found.result()
        finally:
            server.signal(signal.SIGCONT)

    def test_lifetimes(self, server: Server) -> None:
        """Reading is a use, and without ttl_seconds nothing goes."""
        tier = RedisTier(RedisConfig(url=server.url, ttl_seconds=80))
        tier.put(residual(0), b"r")
        tier.put(anchor(0), b"a")
        left = {name: int(server.ask("PTTL", f"lynx:{name}")) for name in (residual(0), anchor(0))}
        assert 70_000 < left[residual(0)] <= 80_000
        assert 70_000 < left[anchor(0)] <= 80_010
        for name in left:
            server.ask("PEXPIRE", f"lynx:{name}", "60000")
        RedisTier(RedisConfig(url=server.url, ttl_seconds=80, renew_on_read=False)).get(anchor(0))
        assert int(server.ask("PTTL", f"lynx:{anchor(0)}")) <= 60_000
        assert tier.get_many([residual(0), anchor(0)]) == [b"r", b"a"]
        assert int(server.ask("PTTL", f"lynx:{anchor(0)}")) > 60_000
        RedisTier(RedisConfig(url=server.url)).put(anchor(1), b"a")
        assert int(server.ask("PTTL", f"lynx:{anchor(1)}")) == -1

    def test_no_more_connections_than_configured(self, server: Server) -> None:
        from threading import Thread

        tier = RedisTier(RedisConfig(url=server.url, connections=3))
        tier.put(anchor(0), bytes(1 << 20))
        most = 0
        threads = [
            Thread(target=lambda: [tier.get_many([anchor(0)] * 8) for _ in range(5)])
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            clients = server.ask("CLIENT", "LIST").splitlines()
            most = max(most, sum(b"cmd=client|list" not in line for line in clients))
        assert 1 < most <= 3

    @pytest.mark.parametrize("prefix", ["", "a b", "a*", "{a}", "ü"])
    def test_prefixes_that_would_be_patterns_are_refused(self, prefix: str) -> None:
        with pytest.raises(ConfigError, match="key_prefix"):
            RedisTier(RedisConfig(url="redis://kv", key_prefix=prefix or " "))


def test_sentinel_names_the_primary_and_a_failover_is_followed(tmp_path: Path) -> None:
    primary, replica = Server(tmp_path / "a"), Server(tmp_path / "b")
    with running(primary), running(replica):
        replica.ask("REPLICAOF", primary.host, str(primary.port))
        wait_until(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"))
        conf = tmp_path / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor kv 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 2000\n"
        )
        sentinel = Server(tmp_path / "s", arguments=(str(conf), "--sentinel"))
        with running(sentinel):
            wait_until(lambda: b"slaves=1" in sentinel.ask("INFO", "sentinel"))
            tier = RedisTier(
                RedisConfig(url=f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/kv")
            )
            tier.put(anchor(0), b"before")
            assert primary.ask("EXISTS", f"lynx:{anchor(0)}").strip() == b"1"
            wait_until(lambda: replica.ask("EXISTS", f"lynx:{anchor(0)}").strip() == b"1")
            primary.kill()
            with pytest.raises(TierError):
                tier.put(anchor(1), b"x")

            def put_works() -> bool:
                tier.put(anchor(1), b"after")
                return True

            wait_until(put_works, 30)
            assert tier.get_many([anchor(0), anchor(1)]) == [b"before", b"after"]
            assert replica.ask("EXISTS", f"lynx:{anchor(1)}").strip() == b"1"
            missing = RedisTier(RedisConfig(url=f"redis+sentinel://127.0.0.1:{sentinel.port}/no"))
            with pytest.raises(TierError, match="service's name"):
                missing.get(anchor(0))


def test_a_replica_refuses_writes_and_serves_reads(tmp_path: Path) -> None:
    with running(Server(tmp_path / "a")) as primary, running(Server(tmp_path / "b")) as replica:
        RedisTier(RedisConfig(url=primary.url)).put(anchor(0), b"x")
        replica.ask("REPLICAOF", primary.host, str(primary.port))
        tier = RedisTier(RedisConfig(url=replica.url))
        wait_until(lambda: tier.get(anchor(0)) == b"x")
        with pytest.raises(TierError, match="names a replica"):
            tier.put(anchor(1), b"x")


def _foreign_values() -> float:
    registry = pytest.importorskip("prometheus_client").REGISTRY
    return registry.get_sample_value("lynx_errors_total", {"kind": "ForeignValue"}) or 0.0


def _stat(server: Server, field: str) -> int:
    lines = server.ask("INFO", "stats").decode().split()
    return int(next(line for line in lines if line.startswith(field)).partition(":")[2])
