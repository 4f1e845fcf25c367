"""The loopback transport: conformance, and the faults that it injects."""

from __future__ import annotations

from kvconnector.testing.transport_suite import TransportPair, TransportSuite, Worker
from kvconnector.transport.loopback import LoopbackNetwork


class TestLoopback(TransportSuite):
    def pair(self) -> TransportPair:
        network = LoopbackNetwork()
        a, b = network.transport(), network.transport()
        return TransportPair(Worker(a, a.connect(b.address)), Worker(b, b.connect(a.address)))
