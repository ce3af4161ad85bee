"""Where a Redis URL leads, and that its secrets stay out of sight."""

from __future__ import annotations

import pytest

from lynx_backend.config import LynxConfig, RedisConfig, redacted
from lynx_backend.errors import ConfigError

pytest.importorskip("redis")

from lynx_backend import redis_client
from lynx_backend.redis_client import FAILURES, connect, explain


def connection(**settings: object) -> dict[str, object]:
    """What redis-py was told of a connection."""
    return dict(connect(RedisConfig(**settings)).connection_pool.connection_kwargs)


def test_one_server():
    made = connection(url="valkey://ann:p%40ss@kv.example:7000/3", timeout_seconds=5)
    wanted = {"host": "kv.example", "port": 7000, "db": 3, "username": "ann", "password": "p@ss"}
    assert made.items() >= wanted.items()
    assert made["socket_timeout"] == 5
    assert connection(url="redis://[::1]")["host"] == "::1"
    assert connection(url="redis://kv")["port"] == 6379


def test_settings_win_over_the_url(tmp_path):
    (tmp_path / "secret").write_text("from a file\n")
    made = connection(
        url="redis://ann:pw@kv", username="bob", password_file=str(tmp_path / "secret")
    )
    assert (made["username"], made["password"]) == ("bob", "from a file")


def test_a_unix_socket():
    assert connection(url="unix:///run/redis.sock")["path"] == "/run/redis.sock"


def test_sentinel():
    client = connect(
        RedisConfig(
            url="redis+sentinel://ann:pw@a:1,b/kv/2",
            sentinel_username="sam",
            sentinel_password="other",
        )
    )
    pool = client.connection_pool
    assert pool.service_name == "kv"
    assert pool.connection_kwargs.items() >= {"db": 2, "username": "ann", "password": "pw"}.items()
    asked = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(k["host"], k["port"]) for k in asked] == [("a", 1), ("b", 26379)]
    assert all((k["username"], k["password"]) == ("sam", "other") for k in asked)


@pytest.mark.parametrize(
    "url",
    [
        "kv:6379",
        "http://kv",
        "redis://",
        "redis://kv/zero",
        "redis://kv/0/1",
        "redis://a,b",
        "redis://kv:port",
        "redis://:secret@kv?db=3",
        "redis+sentinel://a",
        "redis+sentinel://a/kv/x",
        "redis+cluster://a/1",
        "unix://",
        "unix://kv/run",
        "redis://[::1",
        "redis://:secret[@kv",
        "redis://kv:70000",
        "ann:secret@kv:6379",
        "redis://a..b:1",
        f"redis://{'a' * 64}:1",
        "redis+sentinel://a..b:1/x",
        "redis+cluster://kv,a..b:1",
    ],
)
def test_other_urls_are_refused(url: str):
    with pytest.raises(ConfigError, match="is none of redis://") as e:
        connect(RedisConfig(url=url))
    assert "secret" not in str(e.value)


def test_files_that_cannot_be_read():
    with pytest.raises(ConfigError, match=r"password_file /none"):
        connect(RedisConfig(url="redis://kv", password_file="/none"))
    with pytest.raises(ConfigError, match="/none"):
        connect(RedisConfig(url="rediss://kv", tls_ca_file="/none"))
    with pytest.raises(ConfigError, match="keep one"):
        connect(RedisConfig(url="redis://kv", password="a", password_file="/none"))
    with pytest.raises(ConfigError, match=r"redis\.url is not set"):
        connect(RedisConfig())


def test_secrets_are_not_shown(tmp_path):
    url = "redis://ann:s3cret@127.0.0.1:1"
    environ = {"LYNX_REDIS_PASSWORD": "s3cret", "LYNX_REDIS_SENTINEL_PASSWORD": "s3cret"}
    config = LynxConfig.load(inline={"redis": {"url": url, "retries": 0}}, environ=environ)
    assert config.redis.password == "s3cret"
    shown = {key: value for key, value, _ in config.describe()}
    assert shown["redis.url"] == "redis://ann:***@127.0.0.1:1"
    assert shown["redis.password"] == shown["redis.sentinel_password"] == "***"
    with pytest.raises(FAILURES) as e:
        connect(config.redis).ping()
    for text in (repr(config), str(shown), explain(e.value, config.redis)):
        assert "s3cret" not in text
    file = tmp_path / "lynx.yaml"
    file.write_text("redis: {password: s3cret}")
    with pytest.raises(ConfigError, match="LYNX_REDIS_PASSWORD") as refused:
        LynxConfig.load(file, environ={})
    assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        RedisConfig(password=12345)  # type: ignore[arg-type]
    assert "12345" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://kv:1/0", "redis://kv:1/0"),
        ("redis://ann@kv", "redis://ann@kv"),
        ("redis://:a:b@c/d@kv", "redis://:***@kv"),
        ("unix://:pw@/run/x", "unix://:***@/run/x"),
        ("redis://:a[b@kv", "redis://:***@kv"),
        ("ann:pw@kv", "ann:***@kv"),
    ],
)
def test_redacted(url: str, shown: str):
    assert redacted(url) == shown


@pytest.mark.parametrize(
    "settings", [{"connections": 0}, {"retries": -1}, {"timeout_seconds": 0}, {"ttl_seconds": 0}]
)
def test_numbers_out_of_range(settings):
    with pytest.raises(ConfigError, match="must be more than"):
        RedisConfig(**settings)


def test_what_a_socket_does_not_take_is_a_failure():
    for wrong in ({"host": "a..b"}, {"host": "127.0.0.1", "socket_connect_timeout": 1e300}):
        with pytest.raises(FAILURES) as e:
            redis_client.redis.Redis(**wrong).ping()
        assert isinstance(e.value, (UnicodeError, OverflowError))
        assert "can be reached" in explain(e.value, RedisConfig(url="redis://kv"))


def test_remedies_fit_the_errors():
    config = RedisConfig(url="redis://kv")
    assert "replica" in explain(redis_client.ReadOnlyError("READONLY"), config)
    assert "maxmemory" in explain(redis_client.OutOfMemoryError("OOM"), config)
    assert "can be reached" in explain(ConnectionRefusedError(111, "refused"), config)
