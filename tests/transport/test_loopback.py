"""The loopback transport: conformance, and the faults that it injects."""

from __future__ import annotations

import pytest

from kvconnector.errors import PeerLostError
from kvconnector.transport.base import CONTROL_TAG_BIT, ControlMessage
from tests.support.loopback import LoopbackFaults, LoopbackNetwork
from tests.support.transport_control_suite import TransportControlSuite
from tests.support.transport_suite import (
    HostMemory,
    Ledger,
    TransportPair,
    TransportSuite,
    Worker,
)


class TestLoopback(TransportSuite, TransportControlSuite):
    def pair(self) -> TransportPair:
        network = LoopbackNetwork()
        a, b = network.transport(), network.transport()
        return TransportPair(
            Worker(a, a.connect(b.address)),
            Worker(b, b.connect(a.address)),
            lose_b=lambda: network.lose(b.address),
        )


def small(network: LoopbackNetwork) -> tuple[Worker, Worker, Ledger]:
    a, b = network.transport(), network.transport()
    return Worker(a, a.connect(b.address)), Worker(b, b.connect(a.address)), Ledger(a, b)


def test_reordering_spares_messages_of_one_tag() -> None:
    network = LoopbackNetwork(seed=7)
    a, b, _ = small(network)
    network.set_faults(LoopbackFaults(max_delay_calls=10, reorder=True))
    count = 40
    arrivals = [[HostMemory(1) for _ in range(count)] for _ in range(2)]
    tickets = [[b.transport.recv(tag, m.buffer) for m in arrivals[tag]] for tag in range(2)]
    for seed in range(count):
        for tag in range(2):
            sent = HostMemory(1)
            sent.write(bytes([seed]))
            a.transport.send(a.endpoint, tag, sent.buffer)
    order: list[int] = []
    while len(order) < 2 * count:
        a.transport.progress()
        order += [completion.ticket for completion in b.transport.progress()]
    for memory in arrivals:
        assert [m.read()[0] for m in memory] == list(range(count))
    by_tag = [[ticket for ticket in order if ticket in tickets[tag]] for tag in range(2)]
    assert by_tag == tickets
    posted = [ticket for pair in zip(*tickets, strict=True) for ticket in pair]
    assert order != posted


def test_a_dropped_message_never_arrives() -> None:
    network = LoopbackNetwork()
    a, b, ledger = small(network)
    network.set_faults(LoopbackFaults(drop_probability=1.0))
    recv = b.transport.recv(1, HostMemory(8).buffer)
    send = a.transport.send(a.endpoint, 1, HostMemory(8).buffer)
    large = a.transport.send(a.endpoint, 2, HostMemory(1 << 20).buffer)
    assert ledger.wait((0, send)) == [None]
    for _ in range(20):
        ledger.step()
    assert not ledger.ended(1, recv)
    assert not ledger.ended(0, large)


@pytest.mark.parametrize("silently", [False, True])
def test_loss_of_a_peer(silently: bool) -> None:
    network = LoopbackNetwork()
    a, b, ledger = small(network)
    before = a.transport.send(a.endpoint, 1, HostMemory(1 << 20).buffer)
    network.lose(b.transport.address, silently=silently)
    after = a.transport.send(a.endpoint, 1, HostMemory(1 << 20).buffer)
    for _ in range(20):
        ledger.step()
    assert ledger.ended(0, before) is ledger.ended(0, after) is not silently
    if silently:
        a.transport.send_control(a.endpoint, CONTROL_TAG_BIT | 1, b"after")
        assert a.transport.receive_control({}) == []
    else:
        errors = ledger.wait((0, before), (0, after))
        assert [type(error) for error in errors] == [PeerLostError, PeerLostError]
    a.transport.close()
    assert len(ledger.wait((0, before), (0, after))) == 2


def test_faults_touch_control_messages_too_but_not_their_order() -> None:
    network = LoopbackNetwork(seed=2)
    a, b, _ = small(network)
    network.set_faults(LoopbackFaults(max_delay_calls=6, reorder=True))
    tags = (CONTROL_TAG_BIT | 1, CONTROL_TAG_BIT | 2)
    for index in range(20):
        for tag in tags:
            a.transport.send_control(a.endpoint, tag, bytes([index]))
    arrived: list[ControlMessage] = []
    while len(arrived) < 40:
        b.transport.progress()
        events = b.transport.receive_control(dict.fromkeys(tags, 1))
        arrived += [event for event in events if isinstance(event, ControlMessage)]
    for tag in tags:
        assert [e.payload[0] for e in arrived if e.tag == tag] == list(range(20))
    assert [e.tag for e in arrived] != list(tags) * 20
    network.set_faults(LoopbackFaults(drop_probability=1.0))
    a.transport.send_control(a.endpoint, tags[0], b"")
    for _ in range(20):
        b.transport.progress()
        assert not b.transport.receive_control(dict.fromkeys(tags, 1))
