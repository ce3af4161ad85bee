import dataclasses
import json

import pytest

from lynx_backend.config import (
    LynxConfig,
    MemoryConfig,
    NvmeConfig,
    PeersConfig,
    RedisConfig,
    parse_size,
)
from lynx_backend.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "lynx.yaml"
        path.write_text(text)
        return str(path)

    return write


def load(file=None, inline=None, **environ):
    return LynxConfig.load(file, inline, environ)


def test_defaults():
    config = load()
    assert config == LynxConfig()
    assert config.codec.profile == "adaptive"
    assert config.codec.anchor_bits is None
    assert config.memory == MemoryConfig(enabled=True, max_bytes=4 << 30, pinned=None)
    assert config.nvme == NvmeConfig(path=None, max_bytes=64 << 30, min_free_bytes=1 << 30)


def test_inline_wins_over_file_over_environment_over_default(write):
    file = write("memory: {max_bytes: 2GiB}\nnvme: {path: /file, max_bytes: 20GiB}\n")
    config = load(
        file,
        {"nvme": {"path": "/inline"}},
        LYNX_NVME_PATH="/environment",
        LYNX_NVME_MAX_BYTES="30GiB",
        LYNX_NVME_MIN_FREE_BYTES="40GiB",
    )
    assert config.nvme == NvmeConfig("/inline", 20 << 30, 40 << 30)
    assert config.memory.max_bytes == 2 << 30
    assert config.memory.enabled is True


def test_describe_names_every_setting_its_value_and_where_it_came_from(write):
    file = write("memory: {max_bytes: 2GiB}\n")
    lines = load(file, {"codec": {"chunk": 16}}, LYNX_NVME_PATH="/kv").describe()
    by_key = {key: (value, origin) for key, value, origin in lines}
    assert by_key["memory.max_bytes"] == (2 << 30, f"file {file}")
    assert by_key["codec.chunk"] == (16, "inline")
    assert by_key["nvme.path"] == ("/kv", "environment LYNX_NVME_PATH")
    assert by_key["memory.enabled"] == (True, "default")
    assert len(lines) == sum(
        len(dataclasses.fields(getattr(LynxConfig(), s)))
        for s in ("codec", "memory", "nvme", "redis", "tiering", "peers", "directory", "serve")
    )


def test_a_calibration_is_a_path_and_by_default_none(write):
    assert load().codec.calibration is None
    assert load(write("codec: {calibration: /kv/m.npz}")).codec.calibration == "/kv/m.npz"
    assert load(LYNX_CODEC_CALIBRATION="7").codec.calibration == "7"
    with pytest.raises(ConfigError, match=r"codec\.calibration .* a text"):
        load(inline={"codec": {"calibration": 7}})


def test_describe_knows_values_given_in_code():
    lines = LynxConfig(nvme=NvmeConfig(path="/kv")).describe()
    assert ("nvme.path", "/kv", "inline") in lines
    assert ("memory.enabled", True, "default") in lines


def test_the_file_may_be_json_named_by_the_environment_or_empty(write):
    file = write(json.dumps({"memory": {"enabled": False}, "codec": None}))
    assert load(LYNX_CONFIG=file).memory.enabled is False
    other = write("# nothing yet\n")
    assert load(other) == LynxConfig()


def test_a_given_file_replaces_the_one_of_the_environment(write):
    assert load(write("nvme: {path: /a}"), LYNX_CONFIG="/does/not/exist").nvme.path == "/a"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("2kB", 2000),
        ("500MB", 500_000_000),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 1.5 TiB ", 3 << 39),
        ("0.001kB", 1),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size
    assert load(inline={"nvme": {"max_bytes": text}}).nvme.max_bytes == size


@pytest.mark.parametrize(
    "text", ["", "8G", "8 GiBs", "-1GiB", "1e9", "GiB", 1.5, True, None, "1.5B"]
)
def test_what_is_not_a_size(text):
    with pytest.raises(ConfigError, match=r"memory\.max_bytes \(inline\)"):
        load(inline={"memory": {"max_bytes": text}})


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("LYNX_CODEC_ANCHOR_BITS", "3", 3),
        ("LYNX_CODEC_ALPHA", "1e-3", 0.001),
        ("LYNX_CODEC_ALPHA", "2", 2.0),
        ("LYNX_CODEC_PROFILE", "123", "123"),
        ("LYNX_MEMORY_ENABLED", "false", False),
        ("LYNX_MEMORY_ENABLED", "Yes", True),
        ("LYNX_NVME_PATH", "/mnt/a: b", "/mnt/a: b"),
        ("LYNX_NVME_MIN_FREE_BYTES", "0", 0),
    ],
)
def test_variables_are_read_as_the_type_of_their_setting(variable, text, value):
    found = {v: k for k, v, _ in load(**{variable: text}).describe()}
    assert value in found
    assert type(next(v for v in found if v == value)) is type(value)


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lynx.yaml").write_text("peers: {secret_file: ~/secret}")
    config = load(
        inline={"redis": {"password_file": "~/pw", "tls_ca_file": "/a/~/b"}},
        LYNX_CONFIG="~/lynx.yaml",
        LYNX_NVME_PATH="~/kv",
        LYNX_CODEC_CALIBRATION="~/m.npz",
    )
    assert config.nvme.path == f"{tmp_path}/kv"
    assert config.codec.calibration == f"{tmp_path}/m.npz"
    assert config.peers.secret_file == f"{tmp_path}/secret"
    assert (config.redis.password_file, config.redis.tls_ca_file) == (f"{tmp_path}/pw", "/a/~/b")
    assert NvmeConfig(path="~/kv").path == f"{tmp_path}/kv"


def test_an_empty_variable_counts_as_not_set():
    assert load(LYNX_NVME_PATH="", LYNX_MEMORY_MAX_BYTES="", LYNX_CONFIG="") == LynxConfig()


@pytest.mark.parametrize(
    ("section", "name", "value", "expected"),
    [
        ("codec", "anchor_bits", "4", "an integer"),
        ("codec", "anchor_bits", True, "an integer"),
        ("codec", "anchor_bits", 4.0, "an integer"),
        ("codec", "alpha", "0.5", "a number"),
        ("codec", "alpha", float("nan"), "a number"),
        ("codec", "alpha", False, "a number"),
        ("codec", "profile", None, "a text"),
        ("codec", "profile", 4, "a text"),
        ("memory", "enabled", 1, "true or false"),
        ("memory", "enabled", "true", "true or false"),
        ("nvme", "path", "", "a text"),
        ("nvme", "path", ["/a"], "a text"),
        ("memory", "max_bytes", 0, "at least 1 bytes"),
        ("nvme", "min_free_bytes", -1, "at least 0 bytes"),
        ("memory", "low_watermark", 2, "at most 1, got 2"),
        ("nvme", "low_watermark", 1.5, "at most 1, got 1.5"),
        ("redis", "timeout_seconds", 1e300, "at most 86400"),
        ("redis", "connect_timeout_seconds", 1e10, "at most 86400"),
        ("redis", "ttl_seconds", 1e300, r"at most 3\.1536e\+08"),
        ("peers", "fetch_seconds", 86401, "at most 86400"),
        ("directory", "lease_seconds", 1e9, "at most 86400"),
        ("serve", "drain_seconds", 1e9, "at most 86400"),
        ("serve", "port", -1, "more than -1"),
        ("serve", "port", 65536, "at most 65535"),
        ("serve", "metrics_port", 0, "more than 0"),
        ("serve", "metrics_port", 70000, "at most 65535, got 70000"),
    ],
)
def test_other_types_and_ranges_are_refused(section, name, value, expected):
    with pytest.raises(ConfigError, match=expected) as e:
        load(inline={section: {name: value}})
    assert f"{section}.{name} (inline)" in str(e.value)
    section_class = type(getattr(LynxConfig(), section))
    with pytest.raises(ConfigError, match=expected):
        section_class(**{name: value})


def test_a_wrong_type_in_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match=r"codec\.chunk \(environment LYNX_CODEC_CHUNK\)"):
        load(LYNX_CODEC_CHUNK="many")
    with pytest.raises(ConfigError, match=r"alpha.*expected a number, got 'high'"):
        load(LYNX_CODEC_ALPHA="high")


def test_optional_settings_may_be_null(write):
    config = load(write("codec: {chunk: null}\nnvme: {path: null}"), LYNX_NVME_PATH="/environment")
    assert config.nvme.path is None


def test_unknown_keys_name_themselves_their_place_and_the_nearest(write):
    file = write("nvme: {max_byte: 3}")
    with pytest.raises(ConfigError) as e:
        load(file)
    assert str(e.value) == (
        f"unknown setting nvme.max_byte (file {file}); the nearest known one is nvme.max_bytes"
    )
    with pytest.raises(ConfigError, match=r"section nvm \(inline\).* nvme"):
        load(inline={"nvm": {"path": "/a"}})
    with pytest.raises(ConfigError, match=r"LYNX_NVME_PAHT \(environment\).* LYNX_NVME_PATH"):
        load(LYNX_NVME_PAHT="/a")
    with pytest.raises(ConfigError, match=r"LYNX_CONFG \(environment\).* LYNX_CONFIG"):
        load(LYNX_CONFG="/a")


def test_variables_of_others_are_left_alone():
    assert (
        load(
            HOME="/root",
            LYNXES="3",
            LYNX_CACHE_DIR="/cache",
            LYNX_LOG_LEVEL="debug",
            # what Kubernetes sets for services named lynx and lynx-cache
            LYNX_SERVICE_HOST="10.0.0.1",
            LYNX_PORT="tcp://10.0.0.1:80",
            LYNX_PORT_80_TCP_ADDR="10.0.0.1",
            LYNX_CACHE_SERVICE_PORT_HTTP="80",
            # and for one named lynx-serve, or lynx-serve-metrics
            LYNX_SERVE_PORT="tcp://10.0.0.1:7430",
            LYNX_SERVE_METRICS_PORT="udp://10.0.0.1:9400",
        )
        == LynxConfig()
    )
    assert load(LYNX_SERVE_PORT="7431").serve.port == 7431
    with pytest.raises(ConfigError, match=r"serve\.port .*LYNX_SERVE_PORT.*expected an integer"):
        load(LYNX_SERVE_PORT="http://10.0.0.1:7430")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvme: [", "not valid YAML"),
        ("- nvme", "must hold sections"),
        ("nvme: /mnt", r"nvme \(file .*must hold settings"),
        ("1: {}", "unknown section 1"),
    ],
)
def test_a_file_of_another_shape(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load(write(text))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(binary)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().nvme.path = "/elsewhere"


def of_peers(**settings):
    pytest.importorskip("ucxx", reason="peers are reached by ucxx")
    from lynx_backend.peers import link_options

    return link_options(PeersConfig(**settings), "").secret.decode()


def of_redis(**settings):
    pytest.importorskip("redis")
    from lynx_backend.redis_client import connect

    given = {name.replace("secret", "password"): value for name, value in settings.items()}
    pool = connect(RedisConfig(url="redis://kv", **given)).connection_pool
    return pool.connection_kwargs["password"]


@pytest.mark.parametrize("secret_of", [of_peers, of_redis])
def test_secrets_come_from_one_place_and_a_file_loses_its_last_newline(secret_of, tmp_path):
    file = tmp_path / "secret"
    assert secret_of(secret="a\n") == "a\n"
    for text, secret in (("a", "a"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n")):
        file.write_bytes(text.encode())
        assert secret_of(secret_file=str(file)) == secret
    with pytest.raises(ConfigError, match="keep one"):
        secret_of(secret="a", secret_file=str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match=f"_file {file} is empty"):
        secret_of(secret_file=str(file))
    file.write_bytes(b"\xff")
    for unreadable in (file, tmp_path, tmp_path / "none", "\0"):
        with pytest.raises(ConfigError, match="cannot be read"):
            secret_of(secret_file=str(unreadable))
