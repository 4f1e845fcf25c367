"""The loopback transport is a transport like others."""

from tests.support.loopback import LoopbackNetwork
from tests.support.transport_control_suite import TransportControlSuite
from tests.support.transport_suite import TransportPair, Worker


class TestLoopback(TransportControlSuite):
    def pair(self):
        network = LoopbackNetwork()
        a, b = network.transport(), network.transport()
        return TransportPair(
            Worker(a, a.connect(b.address)),
            Worker(b, b.connect(a.address)),
            lose_b=lambda: network.lose(b.address),
        )
