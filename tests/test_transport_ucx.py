from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("ucxx", reason="the UCX transport needs ucxx")

from lynx_backend.testing import TransportConformance
from lynx_backend.transport import ObjectSource, Transport
from lynx_backend.transport.client import UcxTransport
from lynx_backend.transport.server import UcxServer


class TestUcxTransport(TransportConformance):
    window = 4 << 20

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        self.servers: list[UcxServer] = []
        yield
        for server in self.servers:
            server.close()

    def connect(self, source: ObjectSource) -> Transport:
        server = UcxServer(source)
        self.servers.append(server)
        transport = UcxTransport(*server.address)
        transport.connect()
        return transport
