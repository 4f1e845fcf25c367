"""UCX within one process: conformance over each lane set."""

from __future__ import annotations

import pytest

from kvconnector.errors import TransportError
from kvconnector.testing.transport_suite import TransportPair, TransportSuite, Worker
from kvconnector.transport.ucx import load_binding, open_ucx_transport

try:
    load_binding("ucxx")
except TransportError as exc:
    pytest.skip(f"ucxx cannot be imported: {exc}", allow_module_level=True)


def connected_pair(**settings: object) -> TransportPair:
    a, b = open_ucx_transport("ucxx", **settings), open_ucx_transport("ucxx", **settings)
    return TransportPair(Worker(a, a.connect(b.address)), Worker(b, b.connect(a.address)))


class TestSameHost(TransportSuite):
    def pair(self) -> TransportPair:
        return connected_pair()


class TestTcp(TransportSuite):
    def pair(self) -> TransportPair:
        return connected_pair(options={"TLS": "tcp"})


class TestTcpWatched(TransportSuite):
    def pair(self) -> TransportPair:
        return connected_pair(options={"TLS": "tcp"}, peer_error_handling=True)


class TestWithoutWakeup(TransportSuite):
    def pair(self) -> TransportPair:
        return connected_pair(wakeup=False)
