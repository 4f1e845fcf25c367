"""Two workers' `Links` over a network in memory: their messages, how they end, and what they reject."""

import pytest

from kvconnector.config import ControlConfig
from kvconnector.control.base import MessageTooLargeError
from kvconnector.errors import PeerLostError
from kvconnector.runtime.links import MAX_BATCH_BYTES, Links
from kvconnector.session.link import Link
from kvconnector.wire import decode, decode_batch, encode, encode_batch, versions
from kvconnector.wire import messages as m
from kvconnector.wire.versions import SPOKEN
from tests.support.inproc_control import ControlHub

LIMIT_BYTES = 4096


class Side:
    """One worker."""

    def __init__(self, hub, *, max_message_bytes=LIMIT_BYTES):
        self.control = hub.open()
        self.lost = []
        self.links = Links(
            self.control,
            ControlConfig(max_message_bytes=max_message_bytes),
            report=self.lost.append,
        )

    @property
    def link(self):
        """Return the first link."""
        link, *_ = self.links
        return link

    def send(self, text, kind=m.Bye, **fields):
        self.links.send(self.link, kind(text=text, **fields))
        self.links.flush()

    def poll(self):
        return [payload for _, payload in self.links.poll()]


def texts(payloads):
    return [decode(payload).text for payload in payloads]


class Pair:
    """A consumer that has greeted a producer."""

    def __init__(self, consumer=None, producer=None):
        hub = ControlHub(seed=0)
        self.d = Side(hub, **(consumer or {}))
        self.p = Side(hub, **(producer or {}))

    def greet(self):
        d, p = self.d, self.p
        d.links.open(Link(1), p.control.address, "", SPOKEN.newest)
        d.send("hello")
        assert texts(p.poll()) == ["hello"]
        p.send("welcome", m.HelloReply, incarnation="p")
        assert texts(d.poll()) == ["welcome"]
        return self


@pytest.fixture
def pair():
    return Pair().greet()


@pytest.mark.parametrize("stated_bytes", [2000, 0, 1 << 30])
def test_a_message_is_as_long_as_both_sides_allow(pair, stated_bytes):
    pair.d.links.limit_messages(pair.d.link, stated_bytes)
    limit_bytes = 2000 if stated_bytes == 2000 else LIMIT_BYTES
    envelope_bytes = len(encode(m.Bye(text="x" * 1000))) - 1000
    longest = "x" * (limit_bytes - envelope_bytes)
    pair.d.send("first")
    pair.d.send(longest)
    assert texts(pair.p.poll()) == ["first", longest]
    with pytest.raises(MessageTooLargeError) as refused:
        pair.d.send(longest + "x")
    assert refused.value.context["max_message_bytes"] == limit_bytes
    assert pair.d.lost == []
    pair.d.send("shorter")
    assert texts(pair.p.poll()) == ["shorter"]


def test_messages_to_a_closed_link_are_dropped_without_an_alarm(pair, caplog):
    pair.d.send("late")
    link = pair.p.link
    pair.p.links.close(link)
    pair.p.links.close(link)
    assert pair.p.poll() == []
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
    batches = pair.p.poll()
    assert [each for batch in batches for each in decode_batch(batch)] == sent
    assert max(map(len, batches)) < 2 * MAX_BATCH_BYTES


def test_one_message_travels_as_it_is_and_links_do_not_mix(pair):
    one, other = m.HeartbeatReply(number=1), m.HeartbeatReply(number=2)
    second = Link(2)
    pair.d.links.open(second, pair.p.control.address, "", SPOKEN.newest)
    pair.d.links.send(second, other)
    pair.d.links.send(pair.d.link, one)
    pair.d.links.flush()
    assert sorted(pair.p.poll()) == sorted([encode(one), encode(other)])
    assert [link.number for link in pair.p.links] == [-1, -2]


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
    assert pair.p.poll() == [encode(m.HeartbeatReply(number=1))]
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
    pair.p.send("on its way")
    pair.d.links.lose(pair.d.link, ERROR)
    assert [(lost.link, lost.error) for lost in pair.d.lost] == [(pair.d.link, ERROR)]
    assert f"lost [{pair.d.link!r}]" in repr(pair.d.links)
    pair.d.send("nothing of this")
    assert pair.d.poll() == []
    assert pair.p.poll() == []
    pair.d.links.close(pair.d.link)
    assert pair.p.poll() == []
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_a_disconnection_counts_after_the_peers_last_messages(pair):
    pair.d.send("last words")
    pair.d.links.close(pair.d.link)
    assert texts(pair.p.poll()) == ["last words"]
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_what_a_caller_does_not_take_waits_for_it(pair):
    for number in range(3):
        pair.d.send(f"message {number}")
    pair.d.links.close(pair.d.link)
    for number in range(3):
        _, payload = next(pair.p.links.poll())
        assert texts([payload]) == [f"message {number}"]
        assert not pair.p.lost
    assert pair.p.poll() == []
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_a_closed_link_gets_none_of_the_messages_that_wait(pair):
    for number in range(3):
        pair.d.send(f"message {number}")
    link, _ = next(pair.p.links.poll())
    pair.p.links.close(link)
    assert pair.p.poll() == []
    assert list(pair.p.links) == []


@pytest.mark.parametrize(
    "version, refusal",
    [(3, m.Refusal.LEASE_EXPIRED), (SPOKEN.newest, m.Refusal.RECLAIMED)],
)
def test_an_offer_that_was_taken_back_has_expired_for_an_older_peer(version, refusal):
    made = Pair()
    made.d.links.open(Link(1), made.p.control.address, "", version)
    made.d.send("hello")
    made.p.poll()
    for message in (
        m.ReadRefused(read_id=1, refusal=m.Refusal.RECLAIMED, text=""),
        m.ReadEnded(read_id=1, sent_chunks=0, refusal=m.Refusal.RECLAIMED, text=""),
        m.ReadRefused(read_id=1, refusal=m.Refusal.ABORTED, text=""),
    ):
        made.p.links.send(made.p.link, message)
    made.p.links.flush()
    found = [each.refusal for batch in made.d.poll() for each in decode_batch(batch)]
    assert found == [refusal, refusal, m.Refusal.ABORTED]
