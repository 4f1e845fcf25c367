"""Thousands of requests at once: each one is served or ends in time, and the work of one event stays bounded."""

import gc
import weakref

import pytest

from kvconnector.agenda import MAX_AT_ONCE, NEVER, Agenda
from kvconnector.errors import PeerLostError, TransferAbortedError, TransferTimeoutError
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.session.orders import DropRequest, GrowRequest, WithdrawRequest
from kvconnector.wire import encode
from kvconnector.wire import messages as m
from tests.unit.session import harness

MANY = 1000


@pytest.fixture
def side():
    return harness.consumer()


def _key(number):
    return m.TransferKey(transfer_id=f"t{number}", secret=harness.SECRET)


def _want(side, count, **settings):
    names = [f"w{number}" for number in range(count)]
    for number, name in enumerate(names):
        side.handle(harness.want(name, key=_key(number), **settings))
    return names


def _load(side, names):
    return [call for name in names for call in side.handle(harness.load_request(name))]


def _started(calls):
    return [each.read for each in harness.of(calls, "start_receive")]


def test_heartbeats_name_ten_thousand_requests_in_one_interval(side):
    (link,) = harness.connect(side)
    _want(side, 10_000)
    side.settle()
    start, named, num_heartbeats = side.now, set(), 0
    while side.session.next_deadline() <= start + harness.HEARTBEAT_S:
        side.now = max(side.now, side.session.next_deadline())
        for heartbeat in harness.messages(side.tick(), m.Heartbeat):
            assert len(heartbeat.transfers) <= m.MAX_NAMED
            named |= {key.transfer_id for key in heartbeat.transfers}
            num_heartbeats += 1
            side.handle(harness.heartbeat_reply(link, heartbeat.number))
    assert named == {"t", *[f"t{number}" for number in range(10_000)]}
    assert num_heartbeats <= -(-10_001 // m.MAX_NAMED) + 1


def test_heartbeats_with_long_names_fit_into_any_peers_messages(side):
    """A message that is too long would end the link, and with it all requests."""
    (link,) = harness.connect(side)
    names = {f"{number:04}" + "\u20ac" * 500 for number in range(300)}
    for name in names:
        key = m.TransferKey(transfer_id=name, secret=harness.SECRET)
        side.handle(harness.want(name, key=key))
    side.settle()
    start, named = side.now, set()
    while side.session.next_deadline() <= start + harness.HEARTBEAT_S:
        side.now = max(side.now, side.session.next_deadline())
        for heartbeat in harness.messages(side.tick(), m.Heartbeat):
            assert len(encode(heartbeat)) < 32 << 10
            named |= {key.transfer_id for key in heartbeat.transfers}
            side.handle(harness.heartbeat_reply(link, heartbeat.number))
    assert named >= names


def test_follows_are_sent_at_once(side):
    harness.connect(side)
    _want(side, MANY, is_followed=True)
    heartbeats = harness.messages(side.settle(), m.Heartbeat)
    followed = [follow.transfer_id for each in heartbeats for follow in each.followed]
    assert sorted(followed) == sorted(f"t{number}" for number in range(MANY))
    assert side.now == 0.0


def test_a_follow_does_not_wait_for_other_heartbeats(side):
    harness.connect(side)
    _want(side, MANY)
    side.settle()
    side.handle(harness.want("new", key=_key(MANY), is_followed=True))
    (heartbeat,) = harness.messages(side.settle(), m.Heartbeat)
    assert [each.transfer_id for each in heartbeat.followed] == [f"t{MANY}"]
    assert heartbeat.transfers == ()


def test_messages_that_came_before_their_lease_are_handled_in_batches():
    """However many they are: a peer may follow one name with any number of secrets."""
    side = harness.producer()
    harness.welcome(side)
    for number in range(MANY):
        other = m.TransferKey(transfer_id="t", secret=f"{number:032}")
        side.handle(harness.follow(-1, other))
    side.receive(-1, harness.read())
    calls = side.handle(harness.hold())
    assert 0 < len(harness.messages(calls, m.Progress)) <= MAX_AT_ONCE
    while side.session.next_deadline() <= side.now:
        batch = side.tick()
        assert len(harness.messages(batch, m.Progress)) <= MAX_AT_ONCE
        calls += batch
    assert len(harness.messages(calls, m.Progress)) == MANY
    assert len(harness.of(calls, "start_send")) == 1


def test_reads_that_wait_until_their_prompt_is_complete_are_looked_at_once_for_each_step():
    side = harness.producer()
    harness.welcome(side)
    for number in range(3 * MAX_AT_ONCE):
        side.receive(-1, harness.read(number))
    for num_tokens in (4, 8):
        grown = GrowRequest("r", "t", harness.SECRET, harness.BLOCKS, Watermark(num_tokens))
        assert not side.handle(grown)
        assert not side.settle()
    calls = side.handle(harness.hold()) + side.settle()
    assert len(harness.of(calls, "start_send")) == 3 * MAX_AT_ONCE


@pytest.mark.parametrize("is_early", [True, False])
def test_a_lost_engine_fails_its_loads_in_batches(side, is_early):
    link = harness.resolve(side)[0].link if is_early else harness.connect(side)[0]
    names = _want(side, MANY)
    _load(side, names)
    calls = side.handle(ev.LinkLost(link, PeerLostError("gone")))
    assert len(harness.finished(calls)) <= MAX_AT_ONCE
    side.handle(harness.want("later", key=_key(MANY)), harness.load_request("later"))
    calls += side.settle()
    stopped = [each.read for each in harness.of(calls, "stop_receive")]
    ended = harness.finished(calls + side.handle(*map(ev.ReceiveStopped, stopped)))
    assert sorted(ended) == sorted((name, PeerLostError) for name in names)
    assert side.num_loads == 2  # "later", and "w", for which there is no load order


def test_a_read_posted_after_its_link_was_lost_frees_its_slots(side):
    (link,) = harness.connect(side)
    names = _want(side, MANY)
    last = _started(_load(side, names))[-1]
    side.handle(ev.LinkLost(link, PeerLostError("gone")))
    stop, drain = harness.call("stop_receive", last), harness.call("drain_receive", last, None)
    assert side.handle(harness.posted(last)) == [stop, drain]
    assert stop not in side.settle()
    assert harness.finished(side.handle(ev.ReceiveStopped(last))) == [(names[-1], PeerLostError)]
    side.handle(ev.ReceiveDrained(last))
    assert side.num_reads == MANY - 1


def _start_the_last(side, link, *, is_followed):
    """Start the last of many requests. Returns its name and its read."""
    names = _want(side, MANY, is_followed=is_followed)
    started = m.Progress(transfer_id=f"t{MANY - 1}", watermark=Watermark(4), blocks=harness.BLOCKS)
    side.receive(link, started)
    read = _started(_load(side, names))[-1]
    assert read.load.request_id == names[-1]
    return names[-1], read


def test_a_lost_read_is_stopped_before_it_is_drained(side):
    (link,) = harness.connect(side)
    name, read = _start_the_last(side, link, is_followed=True)
    side.handle(harness.posted(read))
    calls = side.handle(ev.LinkLost(link, PeerLostError("gone")))
    ended = harness.of(calls, "stop_receive", "drain_receive")
    assert ended == [harness.call("stop_receive", read), harness.call("drain_receive", read, None)]
    ended = side.handle(ev.ReceiveStopped(read), ev.ReceiveDrained(read))
    assert harness.finished(ended) == [(name, PeerLostError)]
    assert name not in dict(harness.finished(side.settle()))


@pytest.mark.parametrize("path", [ev.PACKED_PATH, ev.DIRECT_PATH])
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_read_finished_after_its_link_was_lost_fails(side, path, is_followed):
    (link,) = harness.connect(side)
    name, read = _start_the_last(side, link, is_followed=is_followed)
    if path == ev.PACKED_PATH:
        side.handle(harness.posted(read))
    calls = side.handle(ev.LinkLost(link, PeerLostError("gone")))
    calls += side.handle(ev.ReceiveFinished(read, seconds=1.0, path=path))
    assert (name, PeerLostError) in harness.finished(calls)


def test_a_read_finished_after_a_pause_fails(side):
    (link,) = harness.connect(side)
    name, read = _start_the_last(side, link, is_followed=True)
    side.now += harness.PEER_S
    ended = side.handle(ev.ReceiveFinished(read, seconds=1.0, path=ev.DIRECT_PATH))
    assert (name, PeerLostError) in harness.finished(ended)


def test_progress_before_a_load_begins_is_kept(side):
    (opened,) = harness.resolve(side)
    names = _want(side, MANY, is_followed=True)
    _load(side, names)
    side.handle(*harness.accepted(opened.link))
    key = {"transfer_id": f"t{MANY - 1}"}
    complete = m.Progress(watermark=Watermark(12), blocks=harness.BLOCKS, is_complete=True, **key)
    refused = m.Progress(refusal=m.Refusal.ABORTED, transfer_id=f"t{MANY - 2}")
    ended = side.receive(opened.link, complete) + side.receive(opened.link, refused)
    assert harness.finished(ended) == [(names[-2], TransferAbortedError)]
    assert [each.load.request_id for each in _started(side.settle())] == [names[-1]]


def test_an_ended_load_is_freed_before_its_deadline(side):
    harness.connect(side)
    names = _want(side, 3, is_followed=True)
    _load(side, names)
    kept = [weakref.ref(side.session._loads[name]) for name in names]
    side.handle(*map(DropRequest, names))
    gc.collect()
    assert [each() for each in kept] == [None, None, None]


def test_only_loads_with_blocks_are_in_flight(side):
    harness.connect(side)
    names = _want(side, MANY)
    reads = _started(_load(side, names[:3]))
    assert [load.request_id for load in side.session.in_flight(side.now)] == names[:3]
    side.handle(*map(DropRequest, names), *map(ev.ReceiveStopped, reads))
    assert not side.session._asked


def test_early_loads_begin_in_batches_after_the_greeting(side):
    (opened,) = harness.resolve(side)
    names = _want(side, MANY)
    assert not _load(side, names)
    calls = side.handle(*harness.accepted(opened.link))
    assert len(_started(calls)) <= MAX_AT_ONCE
    started = [read.load.request_id for read in _started(calls + side.settle())]
    assert sorted(started) == sorted(names)


def test_loads_time_out_in_order():
    side = harness.consumer(peer=harness.PeerConfig(timeout_s=1000.0, idle_timeout_s=2000.0))
    harness.connect(side)
    names = _want(side, MANY)
    reads = _started(_load(side, names))
    side.handle(*map(harness.posted, reads))
    side.now += harness.PEER.transfer_timeout_s
    stopped = [each.read for each in harness.of(side.settle(), "stop_receive")]
    assert stopped == reads
    ended = harness.finished(side.handle(*map(ev.ReceiveStopped, reads)))
    assert ended == [(name, TransferTimeoutError) for name in names]


@pytest.mark.parametrize("is_greeted", [True, False])
def test_ten_thousand_aborts_all_reach_the_producer(side, is_greeted):
    link = harness.connect(side)[0] if is_greeted else harness.resolve(side)[0].link
    names = _want(side, 10_000, is_followed=True)
    calls = side.handle(*map(DropRequest, names))
    if not is_greeted:
        calls += side.handle(*harness.accepted(link))
    aborts = harness.messages(calls + side.settle(), m.Abort)
    assert {each.transfer_id for each in aborts} == {f"t{number}" for number in range(10_000)}
    assert side.num_loads == 1


def _leasing(count):
    """Make a producer with `count` leases, each a millisecond younger than the one before."""
    side = harness.producer()
    for number in range(count):
        side.handle(harness.hold(f"r{number}", f"t{number}"))
        side.now += 0.001
    return side


def test_thousands_of_leases_expire_at_their_deadlines():
    side = _leasing(MANY)
    renewed = [_key(number) for number in range(0, MANY, 2)]
    harness.welcome(side)
    side.now = harness.LEASE_S - 1.0
    for first in range(0, len(renewed), m.MAX_NAMED):
        side.handle(harness.heartbeat(-1, *renewed[first : first + m.MAX_NAMED]))
    for at, parity in ((harness.LEASE_S + 1.0, 1), (2 * harness.LEASE_S, 0)):
        side.now = at
        side.session.keep_alive(side.links[-1], side.now)
        ended = harness.released(side.settle())
        assert ended == [(f"r{number}", "expired") for number in range(parity, MANY, 2)]
    assert side.num_leases == 0
    assert side.session.next_deadline() < NEVER  # that of the peer


def test_withdrawing_one_lease_keeps_the_others():
    side = _leasing(MANY)
    assert harness.released(side.handle(WithdrawRequest("r7"))) == [("r7", "aborted")]
    side.now += harness.LEASE_S
    assert len(harness.released(side.settle())) == MANY - 1


def test_heartbeats_renew_leases_during_the_greeting(side):
    """Greeting all ranks of a starting engine may take longer than a lease and than a silent peer's timeout."""
    links = [opened.link for opened in harness.resolve(side, harness.engine(tp_size=2))]
    _want(side, 1)
    for _ in range(5):
        heartbeats = harness.messages(side.tick(harness.HEARTBEAT_S), m.Heartbeat)
        assert {key.transfer_id for each in heartbeats for key in each.transfers} == {"t", "t0"}
        assert len(heartbeats) == 2
        number = heartbeats[0].number
        side.handle(*[harness.heartbeat_reply(link, number) for link in links])
    for link in links:
        side.handle(*harness.accepted(link))
    assert not harness.of(side.tick(), "close_link")
    assert harness.of(side.handle(harness.load_request()), "start_receive")


def test_the_timeout_starts_after_a_slow_greeting(side):
    (opened,) = harness.resolve(side)
    for _ in range(4):
        side.tick(harness.HEARTBEAT_S)  # without a reply
    side.handle(*harness.accepted(opened.link))
    assert not harness.of(side.tick(), "close_link")
    assert not harness.of(side.tick(harness.PEER_S - 0.1), "close_link")
    assert harness.of(side.tick(0.1), "close_link") == [harness.call("close_link", opened.link)]


def test_requests_dropped_during_the_greeting_never_start(side):
    (opened,) = harness.resolve(side)
    names = _want(side, 3)
    _load(side, names)
    ended = harness.finished(side.handle(*map(DropRequest, names)))
    assert ended == [(name, TransferAbortedError) for name in names]
    assert not _started(side.handle(*harness.accepted(opened.link)))


def test_ten_thousand_aborted_prompts_hold_no_blocks():
    side = harness.producer()
    harness.welcome(side)
    for number in range(10_000):
        names = f"r{number}", f"t{number}", harness.SECRET
        side.handle(GrowRequest(*names, (harness.GroupBlocks.of(()),), Watermark()))
    for number in range(10_000):
        side.handle(harness.abort(key=_key(number)))
    assert side.num_leases == 0
    for number in range(10_000):
        computed = side.handle(harness.hold(f"r{number}", f"t{number}"))
        assert harness.released(computed) == [(f"r{number}", "aborted")]
    # another rank of the consumer, greeted late, is refused at once
    (late,) = harness.messages(side.handle(harness.follow(key=_key(number))), m.Progress)
    assert late.refusal is m.Refusal.ABORTED


def test_an_interrupted_agenda_keeps_the_rest():
    agenda = Agenda()
    for at, name in enumerate("abc"):
        agenda.plan(name, at)
    assert next(iter(agenda.due(5.0))) == "a"  # the caller raises, and handles no more
    assert agenda.next_deadline() == 1.0
    assert [*agenda.due(5.0)] == ["b", "c"]
    assert agenda.next_deadline() == NEVER
