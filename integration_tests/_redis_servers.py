"""Real Redis servers for tests, on free ports, killed when the test is over."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
START_SECONDS = 20.0
_NOTHING_SAVED = ("--save", "", "--dir", ".", "--repl-diskless-sync-delay", "0")

needs_redis = pytest.mark.skipif(
    SERVER is None, reason="no redis-server on the path (apt-get install redis-server)"
)


def free_port() -> int:
    """A port that nobody listens on, below those the system hands out by itself.

    A cluster node also listens on this port plus 10000.
    """
    for _ in range(1000):
        free_port.last += 1  # type: ignore[attr-defined]
        port: int = free_port.last  # type: ignore[attr-defined]
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


free_port.last = 20000 + (time.time_ns() // 1000) % 2000  # type: ignore[attr-defined]


def wait_until(what: Callable[[], object], seconds: float = START_SECONDS) -> None:
    """Return once ``what()`` is true; an exception counts as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        error: Exception | None = None
        try:
            if what():
                return
        except Exception as e:
            error = e
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s") from error
        time.sleep(0.01)


@dataclass
class Server:
    """One server process.

    Attributes:
        folder: where it runs and writes its log.
        port: where it listens.
        arguments: of the command line, besides the port.
        cli: arguments that let redis-cli in.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    arguments: tuple[str, ...] = ()
    cli: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    netns: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    def start(self) -> Server:
        self.folder.mkdir(exist_ok=True, parents=True)
        inside = ["ip", "netns", "exec", self.netns] if self.netns else []
        given = " ".join(self.arguments)
        port = [] if "--port" in given else ["--port", str(self.port)]
        bind = [] if "--bind" in given else ["--bind", self.host]
        self.process = subprocess.Popen(
            [*inside, str(SERVER), *self.arguments, *port, *bind, *_NOTHING_SAVED],
            cwd=self.folder,
            stdout=(self.folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: b"PONG" in self.ask("PING"))
        except TimeoutError:
            self.kill()
            raise RuntimeError((self.folder / "log").read_text()) from None
        return self

    def ask(self, *command: str, check: bool = True) -> bytes:
        """What redis-cli prints for a command."""
        inside = ["ip", "netns", "exec", self.netns] if self.netns else []
        cli = ["redis-cli", "-h", self.host, "-p", str(self.port), *self.cli, *command]
        done = subprocess.run([*inside, *cli], capture_output=True, timeout=START_SECONDS)
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stdout!r} {done.stderr!r}")
        return done.stdout

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(folder: Path, primaries: int = 3, *arguments: str) -> Iterator[list[Server]]:
    """Primaries of one cluster, ready for use."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                running(
                    Server(
                        folder / f"node{i}",
                        arguments=(
                            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
                            *arguments,
                        ),
                    )
                )
            )
            for i in range(primaries)
        ]
        hosts = [f"127.0.0.1:{node.port}" for node in nodes]
        nodes[0].ask("--cluster", "create", *hosts, "--cluster-yes")
        wait_until(lambda: all(b"cluster_state:ok" in n.ask("CLUSTER", "INFO") for n in nodes))
        yield nodes


def certificates(folder: Path) -> None:
    """Write ``ca.crt`` and, signed by it, ``server`` and ``client`` ``.crt`` and ``.key``."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    folder.mkdir(exist_ok=True, parents=True)
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca")
    for who in ("server", "client"):
        openssl(
            *("req", "-x509", *new_key, "-CA", "ca.crt", "-CAkey", "ca.key", "-subj", f"/CN={who}"),
            *("-keyout", f"{who}.key", "-out", f"{who}.crt"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-addext", "basicConstraints=CA:FALSE"),
        )


def tls_arguments(folder: Path) -> tuple[str, ...]:
    """Of a server that listens with TLS only and wants a client's certificate."""
    return (
        *("--port", "0", "--tls-auth-clients", "yes", "--tls-ca-cert-file", f"{folder}/ca.crt"),
        *("--tls-cert-file", f"{folder}/server.crt", "--tls-key-file", f"{folder}/server.key"),
    )


def tls_cli(folder: Path) -> tuple[str, ...]:
    return (
        *("--tls", "--cacert", f"{folder}/ca.crt"),
        *("--cert", f"{folder}/client.crt", "--key", f"{folder}/client.key"),
    )
