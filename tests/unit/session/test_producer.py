import gc
import hashlib
import weakref

import pytest
from msgspec.structs import replace

from kvconnector.agenda import MAX_AT_ONCE
from kvconnector.errors import LocalError, PeerLostError, TransportError
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.session import peers, producer
from kvconnector.session.lease import LEASE_KEY_BYTES, lease_key
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import GrowRequest, WithdrawRequest
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import attention_model
from tests.unit.session import harness


@pytest.fixture
def side():
    return harness.producer()


def test_the_oldest_of_many_outcomes_is_forgotten(monkeypatch):
    monkeypatch.setattr(producer, "MAX_REMEMBERED_LEASES", 2)
    side = harness.producer()
    harness.welcome(side)
    keys = [m.TransferKey(transfer_id=name, secret=harness.SECRET) for name in "abc"]
    for key in keys:
        side.handle(harness.hold(key.transfer_id, key.transfer_id), harness.done(key=key))
    refused = [harness.messages(side.handle(harness.follow(key=key)), m.Progress) for key in keys]
    # the first may be a prompt whose lease is still to come
    assert [[each.refusal for each in some] for some in refused] == [
        [],
        [Refusal.UNKNOWN_TRANSFER],
        [Refusal.UNKNOWN_TRANSFER],
    ]


def test_nobody_reads_a_lease_directly_in_whose_handling_something_broke():
    side = harness.producer(harness.EXPORT)
    harness.welcome(side)
    (published,) = harness.of(side.handle(harness.hold()), "publish")

    def break_once(_):
        raise ZeroDivisionError("a bug")

    side.break_next("start_send", break_once)
    calls = side.receive(-1, harness.read())
    (contained,) = harness.of(calls, "note_contained")
    assert isinstance(contained.error, ZeroDivisionError)
    assert harness.of(calls, "retract") == [harness.call("retract", published.key)]
    (stopped,) = harness.of(calls, "stop_send")
    assert harness.released(side.handle(ev.SendOver(stopped.send, 0))) == [("r", "aborted")]


def _reading():
    """Make a producer whose lease is read over one link. Returns it and the send."""
    side = harness.producer()
    side.handle(harness.hold())
    harness.welcome(side)
    started = side.receive(-1, harness.read())
    (send,) = [each.send for each in harness.of(started, "start_send")]
    assert send.key == (-1, 1)
    return side, send


def test_every_rank_that_reads_a_lease_confirms_before_it_is_released(side):
    consumer = harness.engine("d", tp_size=2)
    for tp_rank in range(2):
        segments = harness.routes_of(consumer, tp_rank)[0].segments
        harness.welcome(side, -1 - tp_rank, consumer, tp_rank, segments=segments)
    side.handle(harness.hold())
    assert harness.released(side.handle(harness.done(-1), harness.done(-1))) == []
    assert harness.released(side.handle(harness.done(-2))) == [("r", "released")]


def test_blocks_are_kept_until_the_last_send_of_them_is_over(side):
    harness.welcome(side)
    side.handle(harness.hold())
    sends = []
    for number in range(3):
        (started,) = harness.of(side.receive(-1, harness.read(number)), "start_send")
        sends.append(started.send)
    assert not harness.released(side.handle(ev.SendOver(sends[0])))
    stopped = harness.of(side.handle(harness.abort()), "stop_send")
    assert [each.send for each in stopped] == sends[1:]
    assert not harness.released(side.handle(ev.SendOver(sends[1], 0)))
    assert harness.released(side.handle(ev.SendOver(sends[2], 0))) == [("r", "aborted")]


def test_a_duplicate_of_a_read_changes_nothing():
    """Its chunks would arrive under tags that the consumer expects once."""
    side, send = _reading()
    assert side.receive(-1, harness.read()) == []
    assert harness.released(side.handle(ev.SendOver(send), harness.done())) == [("r", "released")]


@pytest.mark.parametrize("ending", ["time", "consumer", "producer"])
def test_an_ending_lease_waits_for_its_send(ending):
    side, send = _reading()
    if ending == "time":
        side.handle(harness.heartbeat())  # keeps the consumer alive; its lease then expires
        for _ in range(2):
            side.now += 14.0
            side.session.keep_alive(side.links[-1], side.now)
        calls = side.tick(2.0)
    else:
        calls = side.handle(harness.abort() if ending == "consumer" else WithdrawRequest("r"))
    assert harness.of(calls, "stop_send") == [harness.call("stop_send", send)]
    assert harness.released(calls) == []
    expected = Refusal.LEASE_EXPIRED if ending == "time" else Refusal.ABORTED
    assert harness.refusals(side.receive(-1, harness.read(2))) == [expected]
    late = harness.heartbeat(), harness.done(), harness.abort(), WithdrawRequest("r")
    assert harness.released(side.handle(*late)) == []
    stopped = side.handle(ev.SendOver(send, 1))
    assert harness.released(stopped) == [("r", "expired" if ending == "time" else "aborted")]
    assert [reply.sent_chunks for reply in harness.messages(stopped, m.ReadEnded)] == [1]
    assert harness.refusals(side.receive(-1, harness.read(3))) == [expected]


@pytest.mark.parametrize("secret", [harness.OTHER_SECRET, "\u00e9" * 32])
def test_every_message_about_a_lease_needs_its_secret(side, secret):
    side.handle(harness.hold())
    harness.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=secret)
    assert harness.refusals(side.receive(-1, harness.read(key=key))) == [Refusal.UNKNOWN_TRANSFER]
    side.now = 20.0
    side.handle(harness.heartbeat(-1, key), harness.done(key=key), harness.abort(key=key))
    assert side.num_leases == 1
    assert harness.released(side.tick(10.0)) == [("r", "expired")]


def test_a_read_of_a_complete_prompt_names_its_blocks(side):
    """Otherwise a consumer that was given other blocks would take these bytes for theirs."""
    harness.welcome(side)
    side.handle(harness.hold())
    for read_id, blocks in enumerate(((), (harness.GroupBlocks.of([3, 1, 9]),)), 1):
        asked = side.receive(-1, harness.read(read_id, blocks=blocks))
        assert harness.refusals(asked) == [Refusal.INVALID_READ]
    assert harness.of(side.receive(-1, harness.read(3)), "start_send")


def test_an_early_read_that_comes_twice_is_served_once(side):
    harness.welcome(side)
    assert side.receive(-1, harness.read()) == side.receive(-1, harness.read()) == []
    calls = side.handle(harness.hold())
    assert len(harness.of(calls, "start_send")) == 1
    assert not harness.of(calls, "note_contained")


def test_early_messages_that_are_over_leave_nothing_behind(side, monkeypatch):
    monkeypatch.setattr(peers, "MAX_EARLY_BYTES", 3 * peers.EVENT_BYTES // 2)
    harness.welcome(side)
    for number in range(9):
        key = m.TransferKey(transfer_id=f"t{number}", secret=harness.SECRET)
        assert side.receive(-1, harness.read(number, key=key)) == []
        (ended,) = harness.messages(side.handle(harness.cancel(-1, number)), m.ReadEnded)
        assert (ended.read_id, ended.sent_chunks) == (number, 0)
    assert repr(side.session._early) == "<early events of 0 transfers>"


def test_an_early_read_counts_with_its_blocks(side, monkeypatch):
    monkeypatch.setattr(peers, "MAX_EARLY_BYTES", 4 * peers.EVENT_BYTES)
    harness.welcome(side)
    long = harness.read(1, blocks=(harness.GroupBlocks.of(range(peers.EVENT_BYTES)),))
    assert harness.refusals(side.receive(-1, long)) == [Refusal.INTERNAL]
    assert side.receive(-1, harness.read(2)) == []


def test_a_peer_with_many_early_messages_leaves_room_for_those_of_others(side, monkeypatch):
    monkeypatch.setattr(peers, "MAX_EARLY_BYTES", 4 * peers.EVENT_BYTES)
    harness.welcome(side)
    harness.welcome(side, -2)
    follows = [
        harness.follow(-1, m.TransferKey(transfer_id=f"t{n}", secret=harness.SECRET))
        for n in range(9)
    ]
    refused = [bool(harness.messages(side.handle(each), m.Progress)) for each in follows]
    assert refused == [False] * 4 + [True] * 5
    assert harness.messages(side.handle(harness.follow(-2)), m.Progress) == []
    assert side.receive(-2, harness.read()) == []
    (started,) = harness.of(side.handle(harness.hold()), "start_send")
    assert started.send.link is side.links[-2]


def test_many_connections_of_one_stranger_leave_room_for_early_messages_of_a_peer(monkeypatch):
    """Though each of its connections asks for less than the peer. What is beyond the room is refused to it."""
    monkeypatch.setattr(peers, "MAX_ALL_EARLY_BYTES", 40 * peers.EVENT_BYTES)
    side = harness.producer()
    strangers = range(-100, -1)
    for number in (-1, *strangers):
        side.links[number].origin = "peer" if number == -1 else "stranger"
        harness.welcome(side, number)
    keys = [m.TransferKey(transfer_id=f"t{n}", secret=harness.SECRET) for n in range(15)]
    refused = []
    for n, key in enumerate(keys[:3]):
        for number in strangers:
            calls = side.handle(harness.follow(number, key))
            refused += [each for each in harness.of(calls, "send") if _is_refusal(each.message)]
        for own in keys[5 * n : 5 * n + 5]:
            calls = side.handle(harness.follow(-1, own))
            refused += [each for each in harness.of(calls, "send") if _is_refusal(each.message)]
    assert {each.link for each in refused} <= {*strangers}
    assert len(refused) == 3 * len(strangers) + 15 - 40
    for key in keys:
        calls = side.handle(harness.hold(key.transfer_id, key.transfer_id)) + side.settle()
        assert -1 in [each.link for each in harness.of(calls, "send")]
    assert side.session._early._shares.used_bytes == 0


def test_a_peer_that_asks_for_more_reads_than_it_can_have_slots_is_refused():
    """Each read is work in every pass of the loop, for all peers."""
    side = harness.producer()
    harness.welcome(side)
    harness.welcome(side, -2)
    side.handle(harness.hold())
    for number in range(producer.MAX_READS_OF_PEER):
        assert harness.of(side.receive(-1, harness.read(number)), "start_send")
    (last,) = [each.send for each in harness.of(side.receive(-2, harness.read()), "start_send")]
    refused = harness.refusals(side.receive(-1, harness.read(producer.MAX_READS_OF_PEER)))
    assert refused == [Refusal.INTERNAL]
    side.handle(ev.SendOver(next(iter(last.lease.sends))))
    assert harness.of(side.receive(-1, harness.read(producer.MAX_READS_OF_PEER)), "start_send")


def _is_refusal(message):
    return isinstance(message, m.Progress) and message.refusal is Refusal.INTERNAL


def test_early_messages_of_a_lost_peer_are_forgotten_at_once(side):
    harness.welcome(side)
    for number in range(3 * MAX_AT_ONCE):
        key = m.TransferKey(transfer_id=f"t{number}", secret=harness.SECRET)
        side.receive(-1, harness.read(number, key=key))
    side.handle(ev.LinkLost(-1, PeerLostError("gone")))
    side.settle()
    assert repr(side.session._early) == "<early events of 0 transfers>"


def test_a_reused_name_may_be_read_early(side):
    side.handle(harness.hold(), WithdrawRequest("r"))
    harness.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=harness.OTHER_SECRET)
    assert side.receive(-1, harness.read(key=key)) == []
    assert harness.of(side.handle(harness.hold(secret=harness.OTHER_SECRET)), "start_send")


def test_a_name_and_its_secret_are_used_once_whatever_other_secret_came_between(side):
    for secret in (harness.SECRET, harness.OTHER_SECRET):
        side.handle(harness.hold(secret=secret), WithdrawRequest("r"))
    assert harness.released(side.handle(harness.hold())) == [("r", "aborted")]


def test_reads_need_a_greeting_and_the_current_incarnation(side):
    side.handle(harness.hold())
    assert harness.refusals(side.receive(-1, harness.read())) == [Refusal.NOT_GREETED]
    harness.welcome(side)
    stale = side.receive(-1, harness.read(incarnation="zero"))
    assert harness.refusals(stale) == [Refusal.STALE_INCARNATION]


def test_a_worker_may_read_from_its_welcome_until_it_is_lost(side):
    side.handle(harness.hold(), FromPeer(-1, harness.hello(harness.engine("d"))))
    assert harness.refusals(side.receive(-1, harness.read(1))) == [Refusal.NOT_GREETED]
    side.handle(ev.EndpointOpened(-1))
    (started,) = harness.of(side.receive(-1, harness.read(2)), "start_send")
    side.handle(ev.LinkLost(-1, PeerLostError("gone")))  # its send is still to stop
    assert not harness.of(side.receive(-1, harness.read(3)), "start_send")
    late = ev.EndpointOpened(-1), ev.LinkLost(-1, PeerLostError("gone again"))
    assert side.handle(harness.done(), harness.abort(), *late) == []
    assert side.num_leases == 1
    assert side.links[-1].peer is not None
    side.handle(ev.SendOver(started.send, 0))
    assert side.links[-1].peer is None


def test_a_cancelled_read_does_not_end_its_lease():
    side, send = _reading()
    assert side.handle(harness.cancel(-1, 1)) == [harness.call("stop_send", send)]
    side.handle(ev.SendOver(send, 1))
    assert side.handle(harness.cancel(-1, 1)) == []
    side.now = 29.0
    side.handle(harness.heartbeat())
    assert harness.released(side.tick(29.0)) == []
    assert harness.released(side.tick(2.0)) == [("r", "expired")]


def test_a_send_error_is_reported_to_the_consumer():
    side, send = _reading()
    ended = harness.messages(
        side.handle(ev.SendOver(send, 1, TransportError("broken"))), m.ReadEnded
    )
    assert [(reply.refusal, reply.text) for reply in ended] == [(Refusal.INTERNAL, "broken")]


def test_probes_need_a_greeting(side):
    probe = m.Probe(first_tag=7, nbytes=100, count=3)
    assert side.receive(-1, probe) == []
    harness.welcome(side)
    assert side.receive(-1, probe) == [harness.call("probe", -1, probe)]


def test_early_reads_are_cancelled_lost_refused_or_served(side):
    for link in (-1, -2, -3):
        harness.welcome(side, link)
        side.receive(link, harness.read(-link))
    cancelled = harness.messages(side.handle(harness.cancel(-1, 1)), m.ReadEnded)
    assert [reply.sent_chunks for reply in cancelled] == [0]
    side.handle(ev.LinkLost(-2, PeerLostError("gone")))
    refused = harness.messages(side.tick(harness.EARLY_S), m.ReadRefused)
    assert [(reply.read_id, reply.refusal) for reply in refused] == [(3, Refusal.UNKNOWN_TRANSFER)]
    for link, read_id in ((-1, 5), (-3, 4)):
        side.receive(link, harness.read(read_id))
    side.handle(ev.LinkLost(-1, PeerLostError("gone")))
    calls = side.handle(harness.hold())
    sent = harness.of(calls, "start_send")
    assert [each.send.read.read_id for each in sent] == [4]
    assert not harness.messages(calls, m.ReadRefused)


@pytest.mark.parametrize("is_reading", [True, False])
@pytest.mark.parametrize("loss", ["link", "silence", "second hello"])
def test_a_lost_consumer_gets_a_bye_and_its_sends_stop(loss, is_reading):
    """Also during its greeting."""
    side, send = _reading() if is_reading else (harness.producer(), None)
    if not is_reading:
        side.receive(-1, harness.hello(harness.engine("d")))
    error = PeerLostError("gone")
    calls = {
        "link": lambda: side.handle(ev.LinkLost(-1, error)),
        "silence": lambda: side.tick(harness.PEER_S),
        "second hello": lambda: side.receive(-1, harness.hello(harness.engine("e"))),
    }[loss]()
    assert harness.of(calls, "stop_send") == [harness.call("stop_send", send)] * is_reading
    assert len(harness.messages(calls, m.Bye)) == 1
    assert calls[-1] == harness.call("close_link", -1)
    refusals = [reply.refusal for reply in harness.messages(calls, m.HelloReply)]
    assert refusals == [Refusal.INTERNAL] * (not is_reading)
    if is_reading:
        assert not harness.messages(side.handle(ev.SendOver(send, 0)), m.ReadEnded)
        assert side.num_leases == 1
    else:
        assert side.handle(ev.EndpointOpened(-1)) == []


@pytest.mark.parametrize(
    "geometry, tp_rank, text",
    [
        (harness.engine("d", attention_model(total_heads=3)), 0, "kv_heads="),
        (harness.engine("d"), 1, "rank is outside its engine"),
    ],
)
def test_an_incompatible_consumer_is_refused_with_the_reason(side, geometry, tp_rank, text):
    (reply,) = harness.messages(side.receive(-1, harness.hello(geometry, tp_rank)), m.HelloReply)
    assert reply.refusal is Refusal.INCOMPATIBLE
    assert text in reply.text


def test_a_request_cannot_be_granted_twice(side):
    side.handle(harness.hold())
    for again in (harness.hold(), harness.hold("r", "u"), harness.hold("s", "t")):
        with pytest.raises(LocalError, match="granted twice"):
            side.handle(again)
    assert side.num_leases == 1


ENDINGS = {"done": harness.done, "abort": harness.abort}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_early_ending_ends_the_lease_when_it_is_granted(side, ending):
    harness.welcome(side)
    assert side.handle(ENDINGS[ending]()) == []
    (released,) = harness.of(side.handle(harness.hold()), "release")
    assert released.outcome == {"done": "released", "abort": "aborted"}[ending]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_early_ending_needs_the_secret_and_expires(side, ending):
    harness.welcome(side)
    wrong = m.TransferKey(transfer_id="t", secret=harness.OTHER_SECRET)
    side.handle(ENDINGS[ending](key=wrong), ENDINGS[ending](link=-9))
    assert not harness.of(side.handle(harness.hold()), "release")
    other = m.TransferKey(transfer_id="u", secret=harness.SECRET)
    side.handle(ENDINGS[ending](key=other))
    assert side.tick(harness.EARLY_S) == []
    assert not harness.of(side.handle(harness.hold("s", "u")), "release")


def test_a_duplicate_abort_does_not_end_the_next_lease(side):
    harness.welcome(side)
    side.handle(harness.hold(), harness.abort(), harness.abort())
    assert not harness.of(side.handle(harness.hold(secret=harness.OTHER_SECRET)), "release")


def test_a_lease_may_outlast_the_configured_duration(side):
    side.handle(replace(harness.hold(), lease_duration_s=4 * harness.LEASE_S))
    harness.welcome(side)
    side.handle(harness.heartbeat())
    # the consumer is lost because it is silent, and its heartbeat did not shorten the lease
    assert not harness.of(side.tick(2 * harness.LEASE_S), "release")
    assert harness.of(side.tick(2 * harness.LEASE_S), "release")


def test_the_lease_key_is_a_fixed_digest():
    key = lease_key("request-1", "s" * 32, [harness.GroupBlocks.of([7, 1 << 30], 2)])
    expected = hashlib.blake2b(digest_size=LEASE_KEY_BYTES)
    expected.update((9).to_bytes(8, "little") + b"request-1")
    expected.update((32).to_bytes(8, "little") + b"s" * 32)
    expected.update((2).to_bytes(8, "little") + (2).to_bytes(8, "little"))
    expected.update((7).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little"))
    assert key == expected.digest()


def test_a_session_with_early_messages_is_garbage_collected():
    """A message refers to its link, the link to its peer, and the peer to its early messages."""
    side = harness.producer()
    harness.welcome(side)
    side.handle(harness.follow())
    session, peer = weakref.ref(side.session), weakref.ref(side.links[-1].peer)
    del side
    gc.collect()
    assert session() is None
    assert peer() is None


def test_progress_carries_the_followers_secret():
    side = harness.producer()
    harness.welcome(side)
    side.handle(GrowRequest("r", "t", harness.SECRET, harness.BLOCKS, Watermark(0)))
    wrong = m.TransferKey(transfer_id="t", secret=harness.OTHER_SECRET)
    events = harness.follow(), harness.follow(-1, wrong), WithdrawRequest("r")
    secrets = [(p.secret, p.refusal) for p in harness.messages(side.handle(*events), m.Progress)]
    assert secrets == [
        (harness.SECRET, None),
        (harness.OTHER_SECRET, Refusal.UNKNOWN_TRANSFER),
        (harness.SECRET, Refusal.ABORTED),
    ]
