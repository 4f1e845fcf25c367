"""Two workers' `Links` over networks in memory: when they switch to the transport, how they end, what they reject."""

import logging
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.config import ControlConfig
from kvconnector.control.base import Disconnected, MessageTooLargeError, Received
from kvconnector.errors import PeerLostError, RemoteProtocolError
from kvconnector.runtime import links as links_module
from kvconnector.runtime.links import (
    MAX_BATCH_BYTES,
    MAX_LOOKS_BEFORE_LOSS,
    MESSAGE_BYTES,
    TURN_BYTES,
    Links,
)
from kvconnector.session.link import Link
from kvconnector.transport.tagged_messages import CONTROL_TAG_BIT, MAX_CONTROL_PER_CALL
from kvconnector.wire import decode, decode_batch, encode, encode_batch, versions
from kvconnector.wire import messages as m
from kvconnector.wire.versions import SPOKEN
from tests.support.inproc_control import ControlHub
from tests.support.loopback import LoopbackNetwork

LIMIT_BYTES = 4096


class Side:
    """One worker."""

    def __init__(self, network, hub, *, over_ucx=True, max_message_bytes=LIMIT_BYTES):
        self.transport, self.control = network.transport(), hub.open()
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
        self.links.send(self.link, kind(text=text, **fields))
        self.links.flush()

    def poll(self):
        self.transport.progress()
        return [payload for _, payload in self.links.poll()]


def texts(payloads):
    return [decode(payload).text for payload in payloads]


class Pair:
    """A consumer that has greeted a producer."""

    def __init__(self, consumer=None, producer=None):
        self.hub = hub = ControlHub(seed=0)
        self.network = LoopbackNetwork(seed=0)
        self.d = Side(self.network, hub, **(consumer or {}))
        self.p = Side(self.network, hub, **(producer or {}))
        self.attacker = self.network.transport()
        self.to_p = self.attacker.connect(self.p.transport.address)

    def greet(self):
        d, p = self.d, self.p
        d.links.open(Link(1), p.control.address, "", SPOKEN.newest)
        inbox = d.links.open_inbox(d.link)
        d.send("hello")
        assert texts(p.poll()) == ["hello"]
        p.links.set_peer_inbox(p.link, inbox)
        endpoint = p.transport.connect(d.transport.address)
        assert p.links.answer_inbox(p.link, 0) is None
        self.reply = p.links.answer_inbox(p.link, endpoint)
        # a later answer, which only replaces the export, names no other inbox
        assert p.links.answer_inbox(p.link, endpoint) is None
        p.send("welcome", m.HelloReply, incarnation="p")
        assert texts(d.poll()) == ["welcome"]
        d.links.set_peer_inbox(d.link, self.reply)
        d.links.use_endpoint(d.link, d.transport.connect(p.transport.address))
        return self

    def forge(self, payload, tag=None):
        """Send the producer a message, as somebody without the key would."""
        tag = CONTROL_TAG_BIT | self.reply.inbox_id if tag is None else tag
        self.attacker.send_control(self.to_p, tag, payload)

    def goes_over_transport(self, side, text):
        """Send; return True if that went over the transport."""
        sent, send = [], side.transport.send_control
        side.transport.send_control = lambda *each: sent.append(each) or send(*each)
        try:
            side.send(text)
        finally:
            side.transport.send_control = send
        return bool(sent)


@pytest.fixture(params=[True, False], ids=["over UCX", "over ZMQ"])
def pair(request):
    return Pair(producer={"over_ucx": request.param}).greet()


@pytest.fixture
def over_ucx():
    return Pair().greet()


def test_the_producer_switches_channels_after_the_consumer(over_ucx):
    d, p = over_ucx.d, over_ucx.p
    assert not over_ucx.goes_over_transport(p, "the answer to the hello may be on its way")
    assert over_ucx.goes_over_transport(d, "first")
    assert not over_ucx.goes_over_transport(p, "not heard yet")
    assert texts(p.poll()) == ["first"]
    assert texts(d.poll())[-1:] == ["not heard yet"]
    assert over_ucx.goes_over_transport(p, "now")
    assert texts(d.poll()) == ["now"]


@pytest.mark.parametrize("which", ["consumer", "producer"])
def test_messages_stay_on_the_control_channel_unless_both_sides_want_otherwise(which):
    pair = Pair(**{which: {"over_ucx": False}}).greet()
    for _ in range(2):
        assert not pair.goes_over_transport(pair.d, "message")
        assert texts(pair.p.poll()) == ["message"]
        assert not pair.goes_over_transport(pair.p, "answer")
        assert texts(pair.d.poll()) == ["answer"]


def test_forged_messages_are_dropped_counted_and_warned_of_once(over_ucx, caplog):
    with caplog.at_level(logging.WARNING):
        over_ucx.forge(b"")
        over_ucx.forge(b"short")
        over_ucx.forge(bytes(200))
        over_ucx.forge(bytes(200), tag=CONTROL_TAG_BIT | 12345)
        over_ucx.forge(bytes(LIMIT_BYTES + 1000))
        assert over_ucx.p.poll() == []
    assert over_ucx.p.links.refusals.counts == {"forged": 3, "unknown link": 1, "too long": 1}
    assert len(caplog.records) == 1
    over_ucx.d.send("genuine")
    assert texts(over_ucx.p.poll()) == ["genuine"]


def test_a_gap_in_the_messages_ends_the_link(over_ucx):
    transport = over_ucx.d.transport
    send, transport.send_control = transport.send_control, lambda *_: None
    over_ucx.d.send("lost")
    transport.send_control = send
    over_ucx.d.send("next")
    assert over_ucx.p.poll() == []
    (lost,) = over_ucx.p.lost
    assert isinstance(lost.error, PeerLostError)
    assert "messages were lost" in str(lost.error)


def test_a_message_that_cannot_be_sent_ends_its_link_alone(over_ucx):
    over_ucx.network.lose(over_ucx.p.transport.address)
    over_ucx.d.send("into the void")
    over_ucx.d.poll()
    assert [lost.link.number for lost in over_ucx.d.lost] == [1]


class Unscanned(dict):
    """A table in which an event may look something up, and which it may not walk through."""

    def walk(self):
        raise AssertionError("this takes longer with each connection")

    __iter__ = keys = values = items = walk


def test_an_endpoint_that_fails_is_found_among_any_number(over_ucx):
    d, network = over_ucx.d, over_ucx.network
    for link in [Link(number) for number in range(2, 5)]:
        d.links.open(link, over_ucx.p.control.address, "", SPOKEN.newest)
        d.links.use_endpoint(link, d.transport.connect(over_ucx.attacker.address))
    d.links._connections = Unscanned(d.links._connections)
    d.send("into the void")
    network.lose(over_ucx.p.transport.address)
    d.poll()
    assert [lost.link.number for lost in d.lost] == [1]


@pytest.mark.parametrize("leave", ["leave_transport", "close"])
def test_an_endpoint_that_fails_after_its_link_has_left_ends_nothing(over_ucx, leave):
    d = over_ucx.d
    d.send("into the void")
    over_ucx.network.lose(over_ucx.p.transport.address)
    getattr(d.links, leave)(d.link)
    d.poll()
    assert d.lost == []


def test_many_messages_over_the_transport_come_before_the_peers_end(over_ucx):
    count = 2 * MAX_CONTROL_PER_CALL + 10
    over_ucx.d.send("begin")
    over_ucx.p.poll()
    for number in range(count):
        over_ucx.d.send(str(number))
    over_ucx.d.links.close(over_ucx.d.link)
    found = []
    while not over_ucx.p.lost:
        found += texts(over_ucx.p.poll())
    assert found == [str(number) for number in range(count)]


def test_all_messages_of_a_peer_come_before_its_end_however_many_left_earlier(over_ucx):
    for number in range(2, 2 + MAX_LOOKS_BEFORE_LOSS):
        link = Link(number)
        over_ucx.d.links.open(link, over_ucx.p.control.address, "", SPOKEN.newest)
        over_ucx.d.links.send(link, m.HeartbeatReply(number=number))
        over_ucx.d.links.close(link)
        over_ucx.p.poll()
    assert len(over_ucx.p.lost) == MAX_LOOKS_BEFORE_LOSS
    over_ucx.p.lost.clear()
    test_many_messages_over_the_transport_come_before_the_peers_end(over_ucx)


def test_only_the_first_inbox_that_a_peer_names_counts(over_ucx):
    """Another greeting of the peer does not lead its messages elsewhere."""
    over_ucx.d.send("begin")
    over_ucx.p.poll()
    other = m.ControlInbox(inbox_id=12345, key=bytes(32), max_message_bytes=LIMIT_BYTES)
    over_ucx.p.links.set_peer_inbox(over_ucx.p.link, other)
    assert over_ucx.goes_over_transport(over_ucx.p, "message")
    assert texts(over_ucx.d.poll()) == ["message"]
    assert not over_ucx.d.links.refusals.counts


def test_a_message_to_an_inbox_that_was_replaced_is_dropped_without_an_alarm(over_ucx):
    over_ucx.d.send("first")
    over_ucx.d.send("for the former inbox")
    over_ucx.p.transport.progress()
    link, first = next(over_ucx.p.links.poll())
    assert texts([first]) == ["first"]
    over_ucx.p.links.open_inbox(link)
    assert over_ucx.p.poll() == []
    assert not over_ucx.p.links.refusals.counts


def test_a_producer_that_leaves_says_its_last_words_on_the_control_channel(over_ucx):
    over_ucx.d.send("begin")
    over_ucx.p.poll()
    link = over_ucx.p.link
    over_ucx.p.links.send(link, m.Bye(text="last words"))
    over_ucx.p.links.leave_transport(link)
    over_ucx.network.lose(over_ucx.p.transport.address)
    assert texts(over_ucx.d.poll()) == ["last words"]


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
    sent[5000:5000] = [m.Bye(text="x" * 4096)] * 40
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


def test_what_waits_on_a_link_that_we_have_given_up_is_not_handled(pair):
    for number in range(3):
        pair.p.send(f"message {number}")
    pair.d.transport.progress()
    link, first = next(pair.d.links.poll())
    assert texts([first]) == ["message 0"]
    assert pair.d.links.has_arrived
    pair.d.links.lose(link, ERROR)
    assert pair.d.poll() == []


def test_a_disconnection_counts_after_the_peers_last_messages(pair):
    pair.d.send("last words")
    pair.d.links.close(pair.d.link)
    assert texts(pair.p.poll()) == ["last words"]
    assert [lost.link.number for lost in pair.p.lost] == [-1]


def test_strangers_cannot_hide_that_a_peer_has_left(over_ucx):
    """Nor that others greet: what the control channel reports after a loss waits for it."""
    over_ucx.d.links.close(over_ucx.d.link)
    for _ in range(2 * MAX_LOOKS_BEFORE_LOSS):
        for _ in range(2 * MAX_CONTROL_PER_CALL):
            over_ucx.forge(b"nonsense", tag=CONTROL_TAG_BIT | 1)
        assert over_ucx.p.poll() == []
        if over_ucx.p.lost:
            break
    assert [lost.link.number for lost in over_ucx.p.lost] == [-1]


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
    pair.p.transport.progress()
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


PRODUCER = 100
"""The handle of the connection that `Crowded` opens itself."""


class Crowded:
    """The producer of many peers. `arrive` makes `(peer, payload)` what its next look at the control channel finds.
    Those with negative numbers are connections of one stranger.
    """

    def __init__(self, max_message_bytes=1 << 20):
        self._next, self.lost, self.said = [], [], []
        control = SimpleNamespace(
            poll=self._poll,
            peer_of=lambda handle: f"peer {handle}",
            origin_of=lambda handle: "stranger" if handle < 0 else f"key {handle}",
            send=lambda handle, payload: self.said.append((handle, decode(payload))),
            disconnect=lambda handle: None,
        )
        control.connect = lambda address, public_key: PRODUCER
        config = ControlConfig(max_message_bytes=max_message_bytes)
        transport = LoopbackNetwork(seed=0).transport()
        self.links = Links(control, transport, config, report=self.lost.append)

    def arrive(self, *messages):
        self._next += [Received(handle, payload) for handle, payload in messages]

    def leave(self, handle):
        self._next.append(Disconnected(handle, PeerLostError("gone")))

    def _poll(self, timeout_s):
        found, self._next = self._next, []
        return found


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 4), st.integers(1, 50), st.sampled_from([1, 1000, TURN_BYTES, 200_000])
    ),
    max_size=6,
)


@given(looks=st.lists(st.tuples(ARRIVALS, st.integers(0, 100)), min_size=1, max_size=6))
def test_peers_take_turns_however_much_each_has_sent(looks):
    """A message waits for as many of each other peer as its bytes have turns, and none is lost or overtaken."""
    side = Crowded(max_message_bytes=1 << 28)
    waiting, since = defaultdict(list), defaultdict(lambda: defaultdict(int))
    for arrivals, num_taken in [*looks, ([], 1 << 30)]:
        for peer, times, nbytes in arrivals:
            if not waiting[peer]:
                since[peer].clear()
            waiting[peer] += [nbytes] * times
            side.arrive(*[(peer, peer.to_bytes() * nbytes)] * times)
        for _, (_, payload) in zip(range(num_taken), side.links.poll(), strict=False):
            served = payload[0]
            assert waiting[served].pop(0) == len(payload)
            since[served].clear()
            for peer, sizes in waiting.items():
                if peer != served and sizes:
                    since[peer][served] += 1
                    turns = -(-(MESSAGE_BYTES + sizes[0]) // TURN_BYTES)
                    assert since[peer][served] <= turns
    assert not any(waiting.values())
    assert not side.links.has_arrived


def test_a_long_message_waits_for_several_turns_while_others_have_short_ones():
    side, long = Crowded(max_message_bytes=1 << 28), bytes(10 * TURN_BYTES)
    side.arrive((1, long), *[(2, b"short")] * 50)
    found = [payload for _, payload in side.links.poll()]
    assert found.index(long) == 10
    side.arrive((1, long))
    assert [payload for _, payload in side.links.poll()] == [long]  # nobody else waits


def test_short_messages_earn_no_turns_for_a_long_one():
    side, long = Crowded(max_message_bytes=1 << 28), bytes(10 * TURN_BYTES)
    side.arrive(*[(1, b"short")] * 50, (1, long), *[(2, b"other")] * 100)
    found = [payload for _, payload in side.links.poll()]
    before = found[: found.index(long)]
    assert before.count(b"other") - before.count(b"short") >= 10


def test_messages_of_a_batch_come_in_their_order_before_later_ones():
    side = Crowded()
    side.arrive((1, b"first of a batch"), (1, b"later"))
    link, first = next(side.links.poll())
    assert first == b"first of a batch"
    side.links.put_back(link, [b"second", b"third", b"fourth"])
    assert [payload for _, payload in side.links.poll()] == [
        b"second",
        b"third",
        b"fourth",
        b"later",
    ]


def test_peers_take_turns_over_the_transport(over_ucx):
    pair, other = over_ucx, Side(over_ucx.network, over_ucx.hub)
    other.links.open(Link(1), pair.p.control.address, "", SPOKEN.newest)
    inbox = other.links.open_inbox(other.link)
    other.send("hello")
    pair.p.poll()
    *_, link = pair.p.links
    pair.p.links.set_peer_inbox(link, inbox)
    endpoint = pair.p.transport.connect(other.transport.address)
    other.links.set_peer_inbox(other.link, pair.p.links.answer_inbox(link, endpoint))
    other.links.use_endpoint(other.link, other.transport.connect(pair.p.transport.address))
    for number in range(MAX_CONTROL_PER_CALL - 1):
        pair.d.send(str(number))
    other.send("quiet")
    pair.p.transport.progress()
    found = texts([payload for _, payload in pair.p.links.poll_transport()])
    assert found.index("quiet") <= 1
    assert [each for each in found if each != "quiet"] == [
        str(number) for number in range(MAX_CONTROL_PER_CALL - 1)
    ]


def test_a_link_carries_any_number_of_messages_that_are_taken(monkeypatch):
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 100_000)
    side = Crowded(max_message_bytes=4096)
    for _ in range(10):
        side.arrive(*[(1, b"short")] * 100)
        assert len([*side.links.poll()]) == 100
    assert side.lost == []


def test_a_few_of_the_longest_messages_may_wait(monkeypatch):
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 4096)
    side = Crowded(max_message_bytes=4096)
    side.arrive(*[(1, bytes(4096))] * 3)
    assert len([*side.links.poll()]) == 3
    assert side.lost == []


@pytest.mark.parametrize("came_in", ["messages", "batches"])
def test_a_peer_that_sends_faster_than_its_turns_come_loses_its_link_alone(
    monkeypatch, caplog, came_in
):
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 100_000)
    side = Crowded(max_message_bytes=4096)
    side.arrive((1, b"first"), (2, b"first"))
    assert len([*side.links.poll()]) == 2
    flooder, quiet = side.links
    if came_in == "batches":  # those that were taken count no more, and not less than nothing
        for _ in range(10):
            side.links.put_back(flooder, [b"short"] * 100)
            assert len([*side.links.poll()]) == 100
    short = encode(m.HeartbeatReply(number=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            side.arrive(*[(1, short)] * 100, (2, short))
            next(side.links.poll())
            if side.lost:
                break
    (lost,) = side.lost
    assert lost.link is flooder
    assert isinstance(lost.error, RemoteProtocolError)
    assert lost.error.context["max_waiting_bytes"] == 100_000
    assert "faster than they can be handled" in caplog.text
    assert side.links.refusals.counts == {"RemoteProtocolError": 1}
    ((handle, goodbye),) = side.said
    assert handle == 1
    assert "faster than they can be handled" in goodbye.text
    # neither its messages that waited, nor a new link for those behind them in the same look
    assert {link for link, _ in side.links.poll()} == {quiet}
    assert [*side.links] == [quiet]


def test_nothing_waits_on_a_link_that_was_lost_in_a_flood_once_its_end_has_come(monkeypatch):
    """Otherwise the driver takes another turn at once, for nothing."""
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 100_000)
    side, short = Crowded(max_message_bytes=4096), encode(m.HeartbeatReply(number=1))
    flooder = Link(1)
    side.links.open(flooder, "p", "", SPOKEN.newest)
    side.arrive(*[(PRODUCER, short)] * 200, (2, short))
    side.leave(PRODUCER)
    assert next(side.links.poll())[1] == short
    (lost,) = side.lost
    assert isinstance(lost.error, RemoteProtocolError)
    assert not side.links.is_connected(flooder)
    assert not side.links.has_arrived


def test_many_connections_of_one_stranger_do_not_fill_the_memory_nor_cost_a_peer_its_link(
    monkeypatch,
):
    """Each has few enough bytes for a link of its own, and the peer has more than each of them."""
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 100_000)
    side = Crowded(max_message_bytes=4096)
    for first in (1, 1001):  # what was taken does not count the second time
        taken = []
        for number in range(first, first + 199):
            side.arrive(*[(7, bytes(4096))] * (number < first + 19), *[(-number, bytes(4096))] * 5)
            taken.append(next(side.links.poll()))
        waiting = [each.waiting_bytes for each in side.links._connections.values()]
        assert 200_000 < sum(waiting) <= 4 * 100_000
        assert {lost.link.origin for lost in side.lost} == {"stranger"}
        assert all(isinstance(lost.error, RemoteProtocolError) for lost in side.lost)
        taken += side.links.poll()
        assert [link.origin for link, _ in taken].count("key 7") == 19
        assert not side.links.has_arrived


def test_a_flood_makes_no_new_links_of_the_connections_that_it_ends(monkeypatch):
    """Not even if another connection's message was one too many."""
    monkeypatch.setattr(links_module, "MAX_WAITING_BYTES", 100_000)
    side = Crowded(max_message_bytes=4096)
    turns = [(-number, bytes(4096)) for _ in range(20) for number in range(1, 9)]
    side.arrive(*turns)
    next(side.links.poll())
    assert len(side.lost) == len({lost.link for lost in side.lost}) > 1
    assert len(side.lost) + len([*side.links]) == 8
