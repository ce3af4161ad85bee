"""Settings: frozen dataclasses, one a section, and where each value may come from.

A value given inline (in code, or by the engine that embeds Lynx) wins over the file, the file over
the environment, the environment over the default. Whatever is not a known setting is an error that
names the nearest one: a misspelt limit must not silently be no limit.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError

PREFIX = "LYNX_"
FILE_VARIABLE = "LYNX_CONFIG"
#: Variables that are read elsewhere: the demo's model cache, and the level of the log.
OTHER_VARIABLES = ("LYNX_CACHE_DIR", "LYNX_LOG_LEVEL")
# Kubernetes sets these in every pod of a namespace that has a service called lynx or lynx-….
_SERVICE_LINK = re.compile(
    r"LYNX_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# What they hold. A service called lynx-serve has a LYNX_SERVE_PORT, which is also a setting.
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")
_A_DAY = 86400.0
_TEN_YEARS = 3650 * _A_DAY
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(value: int | str) -> int:
    """Bytes from an integer or a text such as ``"8GiB"``, ``"500MB"`` or ``"1.5 TiB"``.

    Raises:
        ConfigError: not a whole number of bytes in a known unit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{value!r} is not a size: expected bytes as an integer, or a number with one of B, "
            'kB, MB, GB, TB, KiB, MiB, GiB, TiB, as in "8GiB"'
        )
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise ConfigError(f"{value!r} is not a whole number of bytes")
    return int(size)


def _convert(kind: str, value: Any) -> object:
    """``value`` as the type a field is annotated with; ConfigError when it is another."""
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str) and value:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "float" and number and math.isfinite(value):
        return float(value)
    wanted = {"int": "an integer", "bool": "true or false", "str": "a text", "float": "a number"}
    raise ConfigError(f"expected {wanted[kind]}, got {value!r} ({type(value).__name__})")


def redacted(url: str) -> str:
    """A URL without the password that it may hold."""
    head, at, tail = url.rpartition("@")
    scheme, slashes, user = head.partition("://") if "://" in head else ("", "", head)
    name, colon, _ = user.partition(":")
    return f"{scheme}{slashes}{name}{colon}{'***' if colon else ''}{at}{tail}"


def read_secret(name: str, value: str | None, file: str | None) -> str | None:
    """A secret that is set as such or held by a file, less that file's last newline.

    Args:
        name: of the setting that has ``value``; ``name + "_file"`` has ``file``.

    Raises:
        ConfigError: both are set, or the file is empty or cannot be read.
    """
    if file is None:
        return value
    if value is not None:
        raise ConfigError(f"both {name} and {name}_file are set; keep one")
    try:
        secret = Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as e:
        raise ConfigError(f"{name}_file {file} cannot be read: {type(e).__name__}") from None
    if not secret:
        raise ConfigError(f"{name}_file {file} is empty; write the secret into it")
    return secret


def _size(default: int | None, least: int) -> Any:
    return field(default=default, metadata={"least_bytes": least})


def _number(default: float | None, above: float, most: float = math.inf) -> Any:
    return field(default=default, metadata={"above": above, "most": most})


def _seconds(default: float | None, most: float = _A_DAY) -> Any:
    # What is larger is a mistake, and clocks, sockets and servers overflow at some of it.
    return _number(default, above=0, most=most)


def _port(default: int | None, least: int) -> Any:
    return _number(default, above=least - 1, most=65535)


def _secret() -> Any:
    return field(default=None, repr=False, metadata={"secret": True})


def _path() -> Any:
    return field(default=None, metadata={"path": True})


class _Section:
    """Checks and converts every field, however the section is made."""

    def __post_init__(self) -> None:
        for f in _fields(type(self)):
            try:
                value = _checked(f, getattr(self, f.name))
            except ConfigError as e:
                raise ConfigError(f"{type(self).__name__}.{f.name}: {e}") from None
            object.__setattr__(self, f.name, value)


def _fields(section: type) -> tuple[Field[Any], ...]:
    return fields(section)


def _checked(f: Field[Any], value: Any) -> object:
    least = f.metadata.get("least_bytes")
    if f.metadata.get("secret") and value is not None and (not isinstance(value, str) or not value):
        raise ConfigError("expected a text (it is not shown, being a secret)")
    if least is None:
        converted = _convert(str(f.type), value)
        above = f.metadata.get("above")
        if isinstance(converted, (int, float)) and above is not None and converted <= above:
            raise ConfigError(f"must be more than {above:g}, got {converted:g}")
        most = f.metadata.get("most", math.inf)
        if isinstance(converted, (int, float)) and converted > most:
            raise ConfigError(f"must be at most {most:g}, got {converted:g}")
        if f.metadata.get("path") and isinstance(converted, str):
            return os.path.expanduser(converted)  # no shell does it for a file of settings
        return converted
    if value is None and f.default is None:
        return None
    size = parse_size(value)
    if size < least:
        raise ConfigError(f"must be at least {least} bytes, got {size}")
    return size


@dataclass(frozen=True)
class CodecConfig(_Section):
    """How caches are quantized; None leaves a number to the profile.

    Attributes:
        profile: name of the codec's profile.
        anchor_bits, residual_bits: bits an element in either part.
        chunk: tokens that share a scale.
        alpha: companding strength: 0 for a uniform grid, else at least 0.001.
        page_tokens: tokens of one page.
        exact_tokens: most tokens of one object kept unquantized.
        calibration: path of the model's calibration file, made by ``lynx calibrate``.
        threads: that share the work on one chunk; None leaves it to whoever makes the codec.
    """

    profile: str = "adaptive"
    anchor_bits: int | None = None
    residual_bits: int | None = None
    chunk: int | None = None
    alpha: float | None = None
    page_tokens: int | None = None
    exact_tokens: int | None = None
    calibration: str | None = _path()
    threads: int | None = _number(None, above=0)


@dataclass(frozen=True)
class MemoryConfig(_Section):
    """The tier in host memory.

    Attributes:
        enabled: whether there is one.
        max_bytes: most bytes it holds; an integer or a text such as "4GiB".
        quota_bytes: most bytes that one identity (a model, a rank and a salt) takes of them.
        low_watermark: share of a limit that is used after room had to be made; 1 evicts no more
            than is needed.
        pinned: whether the memory is page-locked; by default, if there is a GPU.
    """

    enabled: bool = True
    max_bytes: int = _size(4 << 30, least=1)
    quota_bytes: int | None = _size(None, least=1)
    low_watermark: float = _number(1.0, above=0, most=1)
    pinned: bool | None = None


@dataclass(frozen=True)
class NvmeConfig(_Section):
    """The tier on a local file system.

    Attributes:
        path: its folder; without one there is no such tier.
        max_bytes: most bytes it holds; an integer or a text such as "64GiB".
        min_free_bytes: bytes of the file system it leaves free for others.
        max_object_bytes: largest object; a larger file is damaged, and not read into memory.
        quota_bytes, low_watermark: as for the memory.
        direct: whether to read and write past the page cache where the file system allows it.
    """

    path: str | None = _path()
    max_bytes: int = _size(64 << 30, least=1)
    min_free_bytes: int = _size(1 << 30, least=0)
    max_object_bytes: int = _size(1 << 30, least=1)
    quota_bytes: int | None = _size(None, least=1)
    low_watermark: float = _number(1.0, above=0, most=1)
    direct: bool = True


@dataclass(frozen=True)
class RedisConfig(_Section):
    """A Redis or Valkey server, and how its tier uses it.

    Attributes:
        url: where it is; without one there is no such tier. Forms are listed in
            ``redis_client``.
        tier: whether objects are kept there; without, it serves the directory only.
        username, password: of the ACL user, or the password alone; the password comes from
            ``LYNX_REDIS_PASSWORD``, a file, or the URL, and is never shown.
        password_file: a file that holds the password, its last newline not being part of it.
        sentinel_username, sentinel_password, sentinel_password_file: the same for the Sentinels.
        tls_ca_file: certificates of who may sign the server's; default: the system's.
        tls_cert_file, tls_key_file: what this client shows to a server that asks for it.
        tls_check_hostname: whether the server's certificate must name the host of the URL.
        key_prefix: what every key begins with, before a colon.
        connections: most connections this process opens (to each node of a cluster).
        timeout_seconds: how long an answer, or a part of one, may be waited for.
        connect_timeout_seconds: how long a connection may take.
        retries: how often a failed call is tried again, after an exponential backoff with jitter.
        max_object_bytes: largest value that is read into memory.
        ttl_seconds: the server forgets an object so long after its last use; by default never.
        renew_on_read: whether reading an object counts as a use for this.
    """

    url: str | None = field(default=None, repr=False, metadata={"url": True})
    tier: bool = True
    username: str | None = None
    password: str | None = _secret()
    password_file: str | None = _path()
    sentinel_username: str | None = None
    sentinel_password: str | None = _secret()
    sentinel_password_file: str | None = _path()
    tls_ca_file: str | None = _path()
    tls_cert_file: str | None = _path()
    tls_key_file: str | None = _path()
    tls_check_hostname: bool = True
    key_prefix: str = "lynx"
    connections: int = _number(4, above=0)
    timeout_seconds: float = _seconds(2.0)
    connect_timeout_seconds: float = _seconds(1.0)
    retries: int = _number(2, above=-1)
    max_object_bytes: int = _size(256 << 20, least=1)
    ttl_seconds: float | None = _seconds(None, most=_TEN_YEARS)
    renew_on_read: bool = True


@dataclass(frozen=True)
class TieringConfig(_Section):
    """How the tiers work together.

    Attributes:
        write_behind_bytes: bytes that may wait to be written to each of the slower tiers; what
            would be more is skipped. With 0 a put waits for all tiers, and nothing is promoted.
    """

    write_behind_bytes: int = _size(512 << 20, least=0)


@dataclass(frozen=True)
class PeersConfig(_Section):
    """Other nodes, and what all nodes share.

    Attributes:
        nodes: ``host:port`` of each node to read from, with commas between them; none by default.
        secret: what a node must know to be talked to; from ``LYNX_PEERS_SECRET`` or a file.
        secret_file: a file that holds it, its last newline not being part of it.
        model, layout: when set, only nodes that have set the same, or nothing, are talked to.
        timeout_seconds: silence after which a peer counts as dead.
        fetch_seconds: how long one get may take, all its objects together.
        anchor_wait_seconds: most time that residuals under way may cost an arriving anchor.
        max_object_bytes: largest object that is given or taken.
    """

    nodes: str | None = None
    secret: str | None = _secret()
    secret_file: str | None = _path()
    model: str | None = None
    layout: str | None = None
    timeout_seconds: float = _seconds(5.0)
    fetch_seconds: float = _seconds(10.0)
    anchor_wait_seconds: float = _seconds(0.005)
    max_object_bytes: int = _size(1 << 30, least=1)


@dataclass(frozen=True)
class DirectoryConfig(_Section):
    """How nodes find each other in the Redis or Valkey of the section ``redis``.

    Attributes:
        enabled: whether ``lynx serve`` registers there, and stores read from who is registered
            instead of from ``peers.nodes``.
        lease_seconds: a node that died is gone from there after at most this.
    """

    enabled: bool = False
    lease_seconds: float = _seconds(10.0)


@dataclass(frozen=True)
class ServeConfig(_Section):
    """What ``lynx serve`` offers, and where.

    Attributes:
        host, port: where it listens; 0 is any free port.
        advertise: ``host:port`` where others reach it, for the directory; by default host, port.
        accept_puts: whether peers may put objects.
        metrics_host, metrics_port: where Prometheus metrics are shown, to whoever asks; without a
            port nowhere.
        drain_seconds: how long unfinished requests may take after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = _port(7430, least=0)
    advertise: str | None = None
    accept_puts: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = _port(None, least=1)
    drain_seconds: float = _seconds(10.0)


@dataclass(frozen=True)
class LynxConfig:
    """All settings.

    Attributes:
        codec, memory, nvme, redis, tiering, peers, directory, serve: the sections.
        origins: by key (``"nvme.path"``), where a value was found; filled in by :meth:`load`.
    """

    codec: CodecConfig = field(default_factory=CodecConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    tiering: TieringConfig = field(default_factory=TieringConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(
        cls,
        file: str | os.PathLike[str] | None = None,
        inline: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> LynxConfig:
        """Settings from all their places.

        Args:
            file: YAML (or JSON) of sections; None for the one that ``LYNX_CONFIG`` names, if any.
            inline: the same nesting as the file, ``{"nvme": {"path": "/mnt/kv"}}``.
            environ: where ``LYNX_<SECTION>_<FIELD>`` is looked up. A variable that is set to
                nothing counts as not set.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown, of another type or out
                of range. The message names the setting and the place it was found in.
        """
        path = (
            file if file is not None else os.path.expanduser(environ.get(FILE_VARIABLE, "")) or None
        )
        found: dict[str, tuple[Any, str]] = {}
        found.update(_from_environment(environ))
        if path is not None:
            found.update(_from_mapping(_read(Path(path)), f"file {os.fspath(path)}"))
        if inline is not None:
            found.update(_from_mapping(inline, "inline"))
        values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
        for key, (value, origin) in found.items():
            section, name = key.split(".")
            try:
                values[section][name] = _checked(_KNOWN[key], value)
            except ConfigError as e:
                raise ConfigError(f"{key} ({origin}): {e}") from None
        sections = {name: kind(**values[name]) for name, kind in _SECTIONS.items()}
        return cls(**sections, origins={key: origin for key, (_, origin) in found.items()})

    def describe(self) -> list[tuple[str, object, str]]:
        """Every setting as (key, value, where it came from), in order; secrets as ``***``."""
        lines = []
        for key, f in _KNOWN.items():
            value = getattr(getattr(self, key.split(".")[0]), f.name)
            made = "default" if value == f.default else "inline"
            if value is not None and f.metadata.get("secret"):
                value = "***"
            if value is not None and f.metadata.get("url"):
                value = redacted(value)
            lines.append((key, value, self.origins.get(key, made)))
        return lines


_SECTIONS: dict[str, Any] = {
    "codec": CodecConfig,
    "memory": MemoryConfig,
    "nvme": NvmeConfig,
    "redis": RedisConfig,
    "tiering": TieringConfig,
    "peers": PeersConfig,
    "directory": DirectoryConfig,
    "serve": ServeConfig,
}
_KNOWN: dict[str, Field[Any]] = {
    f"{section}.{f.name}": f for section, kind in _SECTIONS.items() for f in _fields(kind)
}
_VARIABLES = {PREFIX + key.replace(".", "_").upper(): key for key in _KNOWN}


def _unknown(what: str, name: str, where: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return ConfigError(f"unknown {what} {name} ({where}); the nearest known one is {near[0]}")


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[Any, str]]]:
    for variable, text in environ.items():
        linked = _SERVICE_LINK.fullmatch(variable)
        if linked and _SERVICE_LINK_VALUE.fullmatch(text):
            continue
        if variable in _VARIABLES:
            key = _VARIABLES[variable]
            origin = f"environment {variable}"
            if text:
                yield key, (_scalar(_KNOWN[key], text, origin), origin)
        elif (
            variable.startswith(PREFIX)
            and variable not in (FILE_VARIABLE, *OTHER_VARIABLES)
            and not linked
        ):
            known = [*_VARIABLES, FILE_VARIABLE, *OTHER_VARIABLES]
            raise _unknown("variable", variable, "environment", known)


def _scalar(f: Field[Any], text: str, origin: str) -> object:
    """A variable's text as the file would have it: numbers and true/false are not quoted there."""
    if "least_bytes" in f.metadata or str(f.type).startswith("str"):
        return text
    try:
        return float(text) if str(f.type).startswith("float") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"configuration file {path} cannot be read: {e}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"configuration file {path} is not valid YAML: {e}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"configuration file {path} must hold sections ({', '.join(_SECTIONS)}), found "
            f"{type(content).__name__}"
        )
    return content


def _from_mapping(given: Mapping[str, Any], origin: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    for section, settings in given.items():
        if section not in _SECTIONS:
            raise _unknown("section", str(section), origin, list(_SECTIONS))
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"{section} ({origin}) must hold settings, got {settings!r}; write "
                f"{section}: {{name: value}}"
            )
        for name, value in settings.items():
            key = f"{section}.{name}"
            if key not in _KNOWN:
                raise _unknown("setting", key, origin, list(_KNOWN))
            if _KNOWN[key].metadata.get("secret") and origin != "inline":
                raise ConfigError(
                    f"{key} ({origin}) is a secret and not read from this file: set "
                    f"{PREFIX}{key.replace('.', '_').upper()}, or name a file in {key}_file"
                )
            yield key, (value, origin)
