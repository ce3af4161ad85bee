"""``lynx serve``: this node's store, offered to others."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import threading

import typer
from rich.console import Console

from .. import metrics
from ..config import LynxConfig
from ..store import ChunkStore, StoredObjects
from ..transport.member import Member
from .options import ConfigOption

logger = logging.getLogger(__name__)


def serve(config: ConfigOption = None) -> None:
    """Offer the tiers of a configuration to other nodes over UCX, until SIGTERM or Ctrl-C.

    Prints the address once it is ready. With serve.metrics_port, http://HOST:PORT/ shows Prometheus
    metrics, and lynx_ready among them; HOST is serve.metrics_host, 127.0.0.1 by default. SIGTERM
    lets what was asked for be finished, for at most serve.drain_seconds.
    """
    from ..peers import link_options
    from ..transport.server import UcxServer  # needs a package that not everybody has

    # A peer takes twelve descriptors, and the usual 1024 are for eighty.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = LynxConfig.load(config)
    store = ChunkStore.from_config(settings, with_peers=False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if settings.serve.metrics_port is not None:
        metrics.serve(settings.serve.metrics_port, settings.serve.metrics_host)
    codec = store.codec.spec.fingerprint
    options = link_options(settings.peers, codec)
    keep = store.keep if settings.serve.accept_puts else None
    server = UcxServer(
        StoredObjects(store), settings.serve.host, settings.serve.port, options, keep
    )
    registration = None
    if settings.directory.enabled:
        from ..directory import registered  # needs a package that not everybody has

        registration = registered(settings, codec, server.address, server.node)
    # What is here now stays: to look for garbage in it was a quarter of a busy client's time.
    gc.freeze()
    metrics.READY.set(1)
    console = Console(soft_wrap=True)
    place = Member(*server.address)
    console.print(f"serving {', '.join(tier.name for tier in store.tiers)} at {place.address}")
    if options.secret is None and place.host not in ("127.0.0.1", "::1"):
        logger.warning("no peers.secret: whoever reaches %s may read every object", place.address)
    stop.wait()
    metrics.READY.set(0)
    if registration is not None:
        registration.close()  # first, so that nobody finds a node that is leaving
    finished = server.drain(settings.serve.drain_seconds)
    server.close()
    store.close()
    console.print("stopped" if finished else "stopped with requests unfinished")
    raise typer.Exit(0 if finished else 1)
