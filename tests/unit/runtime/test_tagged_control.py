"""Two workers' `TaggedControl` over a loopback network: when links change over, and what is kept out."""

import logging

import pytest

from kvconnector.control.base import MessageTooLargeError
from kvconnector.runtime.tagged_control import TaggedControl
from kvconnector.session.commands import LinkId
from kvconnector.transport.base import CONTROL_TAG_BIT
from tests.support.loopback import LoopbackNetwork

OUT, BACK = LinkId(1), LinkId(-1)
LIMIT_BYTES = 4096


class Side:
    """One worker."""

    def __init__(self, network, *, enabled=True, max_message_bytes=LIMIT_BYTES):
        self.transport = network.transport()
        self.tagged = TaggedControl(
            self.transport, max_message_bytes=max_message_bytes, enabled=enabled
        )

    def receive(self):
        self.transport.progress()
        return self.tagged.receive()


class Pair:
    """A consumer that greeted a producer; `tap` overhears what an attacker on the wire would see."""

    def __init__(self, consumer=None, producer=None):
        self.network = LoopbackNetwork()
        self.d = Side(self.network, **(consumer or {}))
        self.p = Side(self.network, **(producer or {}))
        self.attacker = self.network.transport()
        self.to_p = self.attacker.connect(self.p.transport.address)

    def greet(self):
        hello = self.d.tagged.open_inbox(OUT)
        self.p.tagged.set_peer_inbox(BACK, hello)
        self.reply = self.p.tagged.answer(BACK, self.p.transport.connect(self.d.transport.address))
        self.d.tagged.set_peer_inbox(OUT, self.reply)
        self.endpoint = self.d.transport.connect(self.p.transport.address)
        self.d.tagged.open(OUT, self.endpoint)
        return self

    def forge(self, payload, tag=None):
        """What somebody without the key sends to the producer."""
        tag = CONTROL_TAG_BIT | self.reply.inbox_id if tag is None else tag
        self.attacker.send_control(self.to_p, tag, payload)


@pytest.fixture
def pair():
    return Pair().greet()


def test_the_producer_changes_over_when_the_consumer_has(pair):
    assert not pair.p.tagged.send(BACK, b"too early: the answer to the hello may be on its way")
    assert pair.d.tagged.send(OUT, b"first")
    assert not pair.p.tagged.send(BACK, b"not heard yet")
    pair.p.receive()
    assert pair.p.tagged.send(BACK, b"now")


def test_forged_messages_are_dropped_counted_and_warned_of_once(pair, caplog):
    with caplog.at_level(logging.WARNING):
        pair.forge(b"")
        pair.forge(b"short")
        pair.forge(bytes(200))
        pair.forge(bytes(200), tag=CONTROL_TAG_BIT | 12345)
        pair.forge(bytes(LIMIT_BYTES + 1000))
        assert pair.p.receive() == []
    assert pair.p.tagged.refusals.counts == {"forged": 3, "unknown link": 1, "too long": 1}
    assert len(caplog.records) == 1
    pair.d.tagged.send(OUT, b"genuine")
    assert pair.p.receive() == [(BACK, b"genuine")]


def test_a_message_is_as_long_as_both_sides_allow():
    pair = Pair(producer={"max_message_bytes": 2000}).greet()
    assert pair.d.tagged.send(OUT, bytes(2000))
    with pytest.raises(MessageTooLargeError):
        pair.d.tagged.send(OUT, bytes(2001))
    assert pair.p.receive() == [(BACK, bytes(2000))]
    with pytest.raises(MessageTooLargeError):
        pair.p.tagged.send(BACK, bytes(2001))
    assert pair.d.tagged.send(OUT, b"a refused message leaves no gap")
    assert len(pair.p.receive()) == 1


def test_messages_to_a_removed_link_are_nobodys_and_no_alarm(pair, caplog):
    pair.d.tagged.send(OUT, b"late")
    pair.p.tagged.remove(BACK)
    pair.p.tagged.remove(BACK)
    assert pair.p.receive() == []
    assert not pair.p.tagged.refusals.counts
    assert not caplog.records
    assert not pair.p.tagged.send(BACK, b"x")
