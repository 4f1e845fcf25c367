"""The loopback transport passes the conformance tests of transports."""

from dataclasses import replace

from tests.support.loopback import LoopbackFaults, LoopbackNetwork
from tests.support.transport_suite import HostMemory, TransportPair, TransportSuite, Worker


class TestLoopback(TransportSuite):
    def pair(self):
        network = LoopbackNetwork()
        a, b = network.transport(), network.transport()
        return TransportPair(
            Worker(a, a.connect(b.address)),
            Worker(b, b.connect(a.address)),
            lose_b=lambda: network.lose(b.address),
        )


def test_a_fault_of_an_empty_message_changes_no_memory():
    network = LoopbackNetwork()
    network.faults = LoopbackFaults(corrupt_probability=1.0)
    a, b = network.transport(), network.transport()
    endpoint, memory = a.connect(b.address), HostMemory(1)
    memory.write(b"x")
    empty = replace(memory.buffer, nbytes=0)
    b.recv(1, empty)
    a.send(endpoint, 1, empty)
    assert [completion.error for completion in b.progress()] == [None]
    assert memory.read() == b"x"
