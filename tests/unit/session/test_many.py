"""Thousands of requests at once: each is served or ends in its time, and no event is about all of them."""

import gc
import weakref

import pytest

from kvconnector.errors import PeerLostError, TransferAbortedError, TransferTimeoutError
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.session.agenda import MAX_AT_ONCE, Agenda
from kvconnector.session.orders import DropRequest, GrowRequest, WithdrawRequest
from kvconnector.session.port import NEVER
from kvconnector.wire import messages as m
from tests.unit.session import harness

MANY = 1000


def _key(number):
    return m.TransferKey(transfer_id=f"t{number}", secret=harness.SECRET)


def _want(side, count, **how):
    names = [f"w{number}" for number in range(count)]
    for number, name in enumerate(names):
        side.tell(harness.wanted(name, key=_key(number), **how))
    return names


def _until_it_rests(side):
    """What a session does until nothing is due, in pieces; no time passes."""
    pieces = []
    while side.session.next_deadline() <= side.now:
        pieces.append(side.tick())
    return pieces


def _asked_for(side, names):
    return [command for name in names for command in side.tell(harness.load_asked(name))]


def test_heartbeats_name_ten_thousand_requests_in_one_interval():
    side = harness.consumer()
    (link,) = harness.connect(side)
    _want(side, 10_000)
    _until_it_rests(side)
    start, named, beats = side.now, set(), 0
    while side.session.next_deadline() <= start + harness.HEARTBEAT_S:
        side.now = max(side.now, side.session.next_deadline())
        for beat in harness.messages(side.tick(), m.Heartbeat):
            assert len(beat.transfers) <= m.MAX_NAMED
            named |= {key.transfer_id for key in beat.transfers}
            beats += 1
            side.tell(harness.beat(link, beat.number))
    assert named == {"t", *[f"t{number}" for number in range(10_000)]}
    assert beats <= -(-10_001 // m.MAX_NAMED) + 1


def test_follows_are_sent_at_once():
    side = harness.consumer()
    harness.connect(side)
    _want(side, MANY, is_followed=True)
    beats = [
        beat for piece in _until_it_rests(side) for beat in harness.messages(piece, m.Heartbeat)
    ]
    followed = [follow.transfer_id for beat in beats for follow in beat.followed]
    assert sorted(followed) == sorted(f"t{number}" for number in range(MANY))
    assert side.now == 0.0


def test_a_follow_does_not_wait_for_other_heartbeats():
    side = harness.consumer()
    harness.connect(side)
    _want(side, MANY)
    _until_it_rests(side)
    side.tell(harness.wanted("new", key=_key(MANY), is_followed=True))
    (beat,) = [
        each for piece in _until_it_rests(side) for each in harness.messages(piece, m.Heartbeat)
    ]
    assert [each.transfer_id for each in beat.followed] == [f"t{MANY}"]
    assert beat.transfers == ()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_lost_engine_fails_its_loads_in_batches(is_early):
    side = harness.consumer()
    link = harness.resolve(side)[0].link if is_early else harness.connect(side)[0]
    names = _want(side, MANY)
    _asked_for(side, names)
    pieces = [side.tell(ev.LinkLost(link, PeerLostError("gone")))]
    side.tell(harness.wanted("later", key=_key(MANY)), harness.load_asked("later"))
    pieces += _until_it_rests(side)
    ended = [each for piece in pieces for each in harness.finished(piece)]
    if not is_early:
        stopped = [c.read for piece in pieces for c in harness.of(piece, "stop_receive")]
        ended += harness.finished(side.tell(*map(ev.ReceiveStopped, stopped)))
    assert sorted(ended) == sorted((name, PeerLostError) for name in names)
    assert max(len(harness.finished(piece)) for piece in pieces) <= MAX_AT_ONCE
    assert side.num_loads == 2  # that of "w" was not asked for


def test_a_read_posted_after_its_link_was_lost_frees_its_slots():
    side = harness.consumer()
    (link,) = harness.connect(side)
    names = _want(side, MANY)
    reads = [started.read for started in harness.of(_asked_for(side, names), "start_receive")]
    side.tell(ev.LinkLost(link, PeerLostError("gone")))
    last = reads[-1]
    stop, drain = harness.call("stop_receive", last), harness.call("drain_receive", last, None)
    assert side.tell(harness.posted(last)) == [stop, drain]
    assert stop not in [each for piece in _until_it_rests(side) for each in piece]
    assert harness.finished(side.tell(ev.ReceiveStopped(last))) == [(names[-1], PeerLostError)]
    side.tell(ev.ReceiveDrained(last))
    assert side.num_reads == MANY - 1


def _the_last_is_read(side, link, *, is_followed):
    """The last of many requests, and its read."""
    names = _want(side, MANY, is_followed=is_followed)
    begun = m.Progress(transfer_id=f"t{MANY - 1}", watermark=Watermark(4), blocks=harness.BLOCKS)
    side.receive(link, begun)
    read = harness.of(_asked_for(side, names), "start_receive")[-1].read
    assert read.load.request_id == names[-1]
    return names[-1], read


def test_a_lost_read_is_stopped_before_it_is_drained():
    side = harness.consumer()
    (link,) = harness.connect(side)
    name, read = _the_last_is_read(side, link, is_followed=True)
    side.tell(harness.posted(read))
    commands = side.tell(ev.LinkLost(link, PeerLostError("gone")))
    ended = harness.of(commands, "stop_receive", "drain_receive")
    assert ended == [harness.call("stop_receive", read), harness.call("drain_receive", read, None)]
    ended = side.tell(ev.ReceiveStopped(read), ev.ReceiveDrained(read))
    assert harness.finished(ended) == [(name, PeerLostError)]
    later = [each for piece in _until_it_rests(side) for each in harness.finished(piece)]
    assert name not in [request_id for request_id, _ in later]


@pytest.mark.parametrize("path", [ev.PACKED_PATH, ev.DIRECT_PATH])
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_read_finished_after_its_link_was_lost_fails(path, is_followed):
    side = harness.consumer()
    (link,) = harness.connect(side)
    name, read = _the_last_is_read(side, link, is_followed=is_followed)
    if path == ev.PACKED_PATH:
        side.tell(harness.posted(read))
    commands = side.tell(ev.LinkLost(link, PeerLostError("gone")))
    commands += side.tell(ev.ReceiveFinished(read, seconds=1.0, path=path))
    assert (name, PeerLostError) in harness.finished(commands)


def test_a_read_finished_after_a_pause_fails():
    side = harness.consumer()
    (link,) = harness.connect(side)
    name, read = _the_last_is_read(side, link, is_followed=True)
    side.now += harness.PEER_S
    ended = side.tell(ev.ReceiveFinished(read, seconds=1.0, path=ev.DIRECT_PATH))
    assert (name, PeerLostError) in harness.finished(ended)


def test_progress_before_a_load_begins_is_kept():
    side = harness.consumer()
    (opened,) = harness.resolve(side)
    names = _want(side, MANY, is_followed=True)
    _asked_for(side, names)
    side.tell(ev.FromPeer(opened.link, m.HelloReply(incarnation="one")), ev.WarmedUp(opened.link))
    key = {"transfer_id": f"t{MANY - 1}"}
    complete = m.Progress(watermark=Watermark(12), blocks=harness.BLOCKS, is_complete=True, **key)
    refused = m.Progress(refusal=m.Refusal.ABORTED, transfer_id=f"t{MANY - 2}")
    ended = side.tell(ev.FromPeer(opened.link, complete), ev.FromPeer(opened.link, refused))
    assert harness.finished(ended) == [(names[-2], TransferAbortedError)]
    started = [c for piece in _until_it_rests(side) for c in harness.of(piece, "start_receive")]
    assert [each.read.load.request_id for each in started] == [names[-1]]


def test_an_ended_load_is_freed_before_its_deadline():
    side = harness.consumer()
    harness.connect(side)
    names = _want(side, 3, is_followed=True)
    _asked_for(side, names)
    kept = [weakref.ref(side.session._loads[name]) for name in names]
    side.tell(*map(DropRequest, names))
    gc.collect()
    assert [each() for each in kept] == [None, None, None]


def test_only_loads_with_blocks_are_in_flight():
    side = harness.consumer()
    harness.connect(side)
    names = _want(side, MANY)
    started = harness.of(_asked_for(side, names[:3]), "start_receive")
    assert [load.request_id for load in side.session.in_flight(side.now)] == names[:3]
    assert len(side.session._asked) == 3
    side.tell(*map(DropRequest, names))
    side.tell(*[ev.ReceiveStopped(each.read) for each in started])
    assert not side.session._asked


def test_early_loads_begin_in_batches_after_the_greeting():
    side = harness.consumer()
    (opened,) = harness.resolve(side)
    names = _want(side, MANY)
    assert not _asked_for(side, names)
    pieces = [side.receive(opened.link, m.HelloReply(incarnation="one"))]
    pieces += [side.tell(ev.WarmedUp(opened.link)), *_until_it_rests(side)]
    started = [
        each.read.load.request_id for piece in pieces for each in harness.of(piece, "start_receive")
    ]
    assert sorted(started) == sorted(names)
    assert max(len(harness.of(piece, "start_receive")) for piece in pieces) <= MAX_AT_ONCE


def test_loads_time_out_in_order():
    side = harness.consumer(peer=harness.PeerConfig(timeout_s=1000.0, idle_timeout_s=2000.0))
    harness.connect(side)
    names = _want(side, MANY)
    reads = [started.read for started in harness.of(_asked_for(side, names), "start_receive")]
    for read in reads:
        side.tell(harness.posted(read))
    side.now += harness.PEER.transfer_timeout_s
    pieces = _until_it_rests(side)
    stopped = [c.read for piece in pieces for c in harness.of(piece, "stop_receive")]
    assert stopped == reads
    ended = harness.finished(side.tell(*map(ev.ReceiveStopped, reads)))
    assert ended == [(name, TransferTimeoutError) for name in names]


@pytest.mark.parametrize("is_greeted", [True, False])
def test_ten_thousand_aborts_all_reach_the_producer(is_greeted):
    side = harness.consumer()
    link = harness.connect(side)[0] if is_greeted else harness.resolve(side)[0].link
    names = _want(side, 10_000, is_followed=True)
    commands = [c for name in names for c in side.tell(DropRequest(name))]
    if not is_greeted:
        commands += side.tell(*harness.taken(link))
    commands += [c for piece in _until_it_rests(side) for c in piece]
    aborted = {each.transfer_id for each in harness.messages(commands, m.Abort)}
    assert aborted == {f"t{number}" for number in range(10_000)}
    assert side.num_loads == 1


def test_thousands_of_leases_expire_at_their_deadlines():
    side = harness.producer()
    for number in range(MANY):
        side.tell(harness.granted(f"r{number}", f"t{number}"))
        side.now += 0.001
    renewed = [_key(number) for number in range(0, MANY, 2)]
    harness.welcome(side)
    side.now = harness.LEASE_S - 1.0
    for first in range(0, len(renewed), m.MAX_NAMED):
        side.tell(harness.heartbeat(-1, *renewed[first : first + m.MAX_NAMED]))
    ended = []
    for at, parity in ((harness.LEASE_S + 1.0, 1), (2 * harness.LEASE_S, 0)):
        side.now = at
        side.session.keep_alive(side.links[-1], side.now)
        ended = [each for piece in _until_it_rests(side) for each in harness.released(piece)]
        assert ended == [(f"r{number}", "expired") for number in range(parity, MANY, 2)]
    assert side.num_leases == 0
    assert side.session.next_deadline() < NEVER  # the peer's


def test_withdrawing_one_lease_keeps_the_others():
    side = harness.producer()
    for number in range(MANY):
        side.tell(harness.granted(f"r{number}", f"t{number}"))
    assert harness.released(side.tell(WithdrawRequest("r7"))) == [("r7", "aborted")]
    side.now = harness.LEASE_S
    ended = [each for piece in _until_it_rests(side) for each in harness.released(piece)]
    assert len(ended) == MANY - 1


def test_heartbeats_renew_leases_during_the_greeting():
    """Greeting all ranks of an engine that starts may take longer than a lease, and than a silent peer's timeout."""
    side = harness.consumer()
    first, second = (opened.link for opened in harness.resolve(side, harness.engine(tp_size=2)))
    _want(side, 1)
    numbers = []
    for _ in range(5):
        beats = harness.messages(side.tick(harness.HEARTBEAT_S), m.Heartbeat)
        assert {key.transfer_id for beat in beats for key in beat.transfers} == {"t", "t0"}
        numbers = [beat.number for beat in beats]
        assert len(numbers) == 2
        side.tell(*[harness.beat(link, numbers[0]) for link in (first, second)])
    for link in (first, second):
        side.tell(*harness.taken(link))
    assert not harness.of(side.tick(), "close_link")
    assert harness.of(side.tell(harness.load_asked()), "start_receive")


def test_the_timeout_starts_after_a_slow_greeting():
    side = harness.consumer()
    (opened,) = harness.resolve(side)
    for _ in range(4):
        side.tick(harness.HEARTBEAT_S)  # it is about to answer
    side.tell(*harness.taken(opened.link))
    assert not harness.of(side.tick(), "close_link")
    assert not harness.of(side.tick(harness.PEER_S - 0.1), "close_link")
    assert harness.of(side.tick(0.1), "close_link") == [harness.call("close_link", opened.link)]


def test_requests_dropped_during_the_greeting_never_start():
    side = harness.consumer()
    (opened,) = harness.resolve(side)
    names = _want(side, 3)
    _asked_for(side, names)
    ended = [each for name in names for each in harness.finished(side.tell(DropRequest(name)))]
    assert ended == [(name, TransferAbortedError) for name in names]
    side.receive(opened.link, m.HelloReply(incarnation="one"))
    assert not harness.of(side.tell(ev.WarmedUp(opened.link)), "start_receive")


def test_ten_thousand_aborted_prompts_hold_no_blocks():
    side = harness.producer()
    harness.welcome(side)
    for number in range(10_000):
        names = f"r{number}", f"t{number}", harness.SECRET
        side.tell(GrowRequest(*names, (harness.GroupBlocks.of(()),), Watermark()))
    for number in range(10_000):
        side.tell(harness.given_up(key=_key(number)))
    assert side.num_leases == 0
    for number in range(10_000):
        computed = side.tell(harness.granted(f"r{number}", f"t{number}"))
        assert harness.released(computed) == [(f"r{number}", "aborted")]
    # another rank of the consumer, that was greeted late, need not wait
    (late,) = harness.messages(side.tell(harness.followed(key=_key(number))), m.Progress)
    assert late.refusal is m.Refusal.ABORTED


def test_an_interrupted_agenda_keeps_the_rest():
    agenda = Agenda()
    for at, name in enumerate("abc"):
        agenda.plan(name, at)
    assert next(iter(agenda.due(5.0))) == "a"  # whoever took it failed with it
    assert agenda.next_deadline() == 1.0
    assert [*agenda.due(5.0)] == ["b", "c"]
    assert agenda.next_deadline() == NEVER
