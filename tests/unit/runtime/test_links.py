"""Two workers' `Links` over networks in memory: when links switch to UCX, how they end, and what they reject."""

import logging

import pytest

from kvconnector.config import ControlConfig
from kvconnector.control.base import MessageTooLargeError
from kvconnector.errors import PeerLostError
from kvconnector.runtime.links import MAX_BATCH_BYTES, Links
from kvconnector.session.link import Link
from kvconnector.transport.base import CONTROL_TAG_BIT
from kvconnector.wire import decode, decode_batch, encode, encode_batch, versions
from kvconnector.wire import messages as m
from kvconnector.wire.versions import SPOKEN
from tests.support.inproc_control import ControlHub
from tests.support.loopback import LoopbackNetwork

LIMIT_BYTES = 4096


class Side:
    """One worker."""

    def __init__(self, network, hub, *, over_ucx=True, max_message_bytes=LIMIT_BYTES):
        self.transport = network.transport()
        self.control = hub.open()
        self.lost = []
        self.links = Links(
            self.control,
            self.transport,
            ControlConfig(max_message_bytes=max_message_bytes, over_ucx=over_ucx),
            report=self.lost.append,
        )

    @property
    def link(self):
        """Return the first link."""
        link, *_ = self.links
        return link

    def send(self, text, kind=m.Bye, **fields):
        """Send; returns True if that went over the transport."""
        uses_transport = self.link.uses_transport
        self.links.send(self.link, kind(text=text, **fields))
        self.links.flush()
        return uses_transport

    def receive(self):
        self.transport.progress()
        return [payload for _, payload in self.links.receive()]

    def poll(self):
        return [payload for _, payload, _ in self.links.poll()]


def texts(payloads):
    return [decode(payload).text for payload in payloads]


class Pair:
    """A consumer that has greeted a producer; `tap` records what an attacker on the wire would see."""

    def __init__(self, consumer=None, producer=None):
        self.network, hub = LoopbackNetwork(), ControlHub(seed=0)
        self.d = Side(self.network, hub, **(consumer or {}))
        self.p = Side(self.network, hub, **(producer or {}))
        self.attacker = self.network.transport()
        self.to_p = self.attacker.connect(self.p.transport.address)

    def greet(self):
        d, p = self.d, self.p
        d.links.open(Link(1), p.control.address, "", SPOKEN.newest)
        hello = d.links.open_inbox(d.link)
        d.send("hello")
        assert texts(p.poll()) == ["hello"]
        p.links.set_peer_inbox(p.link, hello)
        p.link.endpoint = p.transport.connect(d.transport.address)
        p.send("welcome", m.HelloReply, incarnation="p")
        self.reply = decode(*d.poll()).control
        d.links.set_peer_inbox(d.link, self.reply)
        d.links.change_over(d.link, p.transport.address)
        return self

    def forge(self, payload, tag=None):
        """Send the producer a message, as somebody without the key would."""
        tag = CONTROL_TAG_BIT | self.reply.inbox_id if tag is None else tag
        self.attacker.send_control(self.to_p, tag, payload)


@pytest.fixture
def pair():
    return Pair().greet()


def test_the_producer_switches_channels_after_the_consumer(pair):
    assert not pair.p.send("too early: the answer to the hello may be on its way")
    assert pair.d.send("first")
    assert not pair.p.send("not heard yet")
    assert texts(pair.p.receive()) == ["first"]
    assert pair.p.send("now")
    assert texts(pair.d.receive()) == ["now"]


def test_forged_messages_are_dropped_counted_and_warned_of_once(pair, caplog):
    with caplog.at_level(logging.WARNING):
        pair.forge(b"")
        pair.forge(b"short")
        pair.forge(bytes(200))
        pair.forge(bytes(200), tag=CONTROL_TAG_BIT | 12345)
        pair.forge(bytes(LIMIT_BYTES + 1000))
        assert pair.p.receive() == []
    assert pair.p.links.refusals.counts == {"forged": 3, "unknown link": 1, "too long": 1}
    assert len(caplog.records) == 1
    pair.d.send("genuine")
    assert texts(pair.p.receive()) == ["genuine"]


def test_a_message_is_as_long_as_both_sides_allow():
    pair = Pair(producer={"max_message_bytes": 2000}).greet()
    longest = "x" * (2000 - len(encode(m.Bye(text="x" * 1000))) + 1000)
    pair.d.send(longest)
    assert texts(pair.p.receive()) == [longest]
    with pytest.raises(MessageTooLargeError):
        pair.d.send(longest + "x")
    assert pair.d.lost == []
    pair.d.send("shorter")
    assert texts(pair.p.receive()) == ["shorter"]


def test_messages_to_a_closed_link_are_dropped_without_an_alarm(pair, caplog):
    pair.d.send("late")
    link = pair.p.link
    pair.p.links.close(link)
    pair.p.links.close(link)
    assert pair.p.receive() == []
    assert not pair.p.links.refusals.counts
    assert not caplog.records
    assert list(pair.p.links) == []


def test_messages_of_a_turn_are_batches_of_bounded_length_in_their_order():
    pair = Pair(consumer={"max_message_bytes": 1 << 20}, producer={"max_message_bytes": 1 << 20})
    pair.greet()
    sent = [m.HeartbeatReply(number=number) for number in range(10_000)]
    sent[5000:5000] = [m.Bye(text="x" * 4096)] * 9
    for message in sent:
        pair.d.links.send(pair.d.link, message)
    pair.d.links.flush()
    batches = pair.p.receive()
    assert [each for batch in batches for each in decode_batch(batch)] == sent
    assert max(map(len, batches)) < 2 * MAX_BATCH_BYTES


def test_one_message_travels_as_it_is_and_links_do_not_mix(pair):
    one, other = m.HeartbeatReply(number=1), m.HeartbeatReply(number=2)
    second = Link(2)
    pair.d.links.open(second, pair.p.control.address, "", SPOKEN.newest)
    pair.d.links.send(second, other)
    pair.d.links.send(pair.d.link, one)
    pair.d.links.flush()
    assert pair.p.receive() == [encode(one)]
    assert pair.p.poll() == [encode(other)]


def test_a_worker_answers_in_the_version_in_which_it_was_greeted(pair, monkeypatch):
    monkeypatch.setattr(versions, "SPOKEN", versions.WireVersions(3, 5))
    message = m.HeartbeatReply(number=1)
    for version in (4, 5, 3):
        link = Link(version)
        pair.d.links.open(link, pair.p.control.address, "", version)
        pair.d.links.send(link, message)
        pair.d.links.send(link, message)
        pair.d.links.flush()
        assert pair.p.poll() == [encode_batch([encode(message, version)] * 2, version)]
        *_, answering = pair.p.links
        pair.p.links.send(answering, message)
        pair.p.links.flush()
        assert pair.d.poll() == [encode(message, version)]


def test_queued_messages_are_sent_before_the_link_closes_and_none_after(pair):
    link = pair.d.link
    pair.d.links.send(link, m.HeartbeatReply(number=1))
    pair.d.links.close(link)
    pair.d.links.send(link, m.HeartbeatReply(number=2))
    pair.d.links.flush()
    assert pair.p.receive() == [encode(m.HeartbeatReply(number=1))]
    assert pair.d.lost == []


ERROR = PeerLostError("control messages were lost")


def test_a_link_that_the_peer_opened_ends_at_once_and_notifies_the_peer(pair):
    link = pair.p.link
    for _ in range(2):
        pair.p.links.lose(link, ERROR)
    assert [(lost.link, lost.error) for lost in pair.p.lost] == [(link, ERROR)]
    assert list(pair.p.links) == []
    assert texts(pair.d.poll()) == [ERROR.statement]


def test_a_link_that_we_opened_carries_nothing_until_it_is_closed(pair):
    pair.p.receive()
    pair.p.send("by ZMQ")
    pair.d.links.lose(pair.d.link, ERROR)
    assert [(lost.link, lost.error) for lost in pair.d.lost] == [(pair.d.link, ERROR)]
    assert "lost" in repr(pair.d.link)
    pair.d.send("nothing of this")
    assert pair.d.poll() == []
    assert pair.p.receive() == []
    assert pair.p.poll() == []
    pair.d.links.close(pair.d.link)
    assert pair.p.poll() == []
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_a_disconnection_counts_after_the_peers_last_messages(pair):
    pair.d.send("last words")
    pair.d.links.close(pair.d.link)
    assert texts(pair.p.poll()) == ["last words"]
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_a_gap_in_the_messages_ends_the_link(pair):
    transport = pair.d.transport
    send, transport.send_control = transport.send_control, lambda *_: None
    pair.d.send("lost")
    transport.send_control = send
    pair.d.send("next")
    assert pair.p.receive() == []
    (lost,) = pair.p.lost
    assert isinstance(lost.error, PeerLostError)
    assert "messages were lost" in str(lost.error)
