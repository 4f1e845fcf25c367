"""The loopback transport passes the conformance tests of transports."""

from tests.support.loopback import LoopbackNetwork
from tests.support.transport_suite import TransportPair, TransportSuite, Worker


class TestLoopback(TransportSuite):
    def pair(self):
        network = LoopbackNetwork()
        a, b = network.transport(), network.transport()
        return TransportPair(
            Worker(a, a.connect(b.address)),
            Worker(b, b.connect(a.address)),
            lose_b=lambda: network.lose(b.address),
        )
