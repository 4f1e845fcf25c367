"""Thousands of requests at once: each is served or ends in its time, and no event is about all of them."""

import pytest
from msgspec import structs

from kvconnector.errors import PeerLostError, TransferAbortedError, TransferTimeoutError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.agenda import MAX_AT_ONCE
from kvconnector.session.orders import DropRequest, WithdrawRequest
from kvconnector.wire import messages as m
from tests.unit.session import harness as h

MANY = 1000


def _key(number):
    return m.TransferKey(transfer_id=f"t{number}", secret=h.SECRET)


def _want(side, count, **how):
    names = [f"w{number}" for number in range(count)]
    for number, name in enumerate(names):
        side.tell(h.wanted(name, key=_key(number), **how))
    return names


def _until_it_rests(side):
    """What a session commands until nothing is due, in pieces; no time passes."""
    pieces = []
    while (deadline := side.session.next_deadline()) is not None and deadline <= side.now:
        pieces.append(side.tick())
    return pieces


def _asked_for(side, names):
    return [command for name in names for command in side.tell(h.load_asked(name))]


def test_ten_thousand_requests_are_named_within_an_interval_by_short_heartbeats():
    side = h.consumer()
    (link,) = h.connect(side)
    _want(side, 10_000)
    _until_it_rests(side)
    start, named, beats = side.now, set(), 0
    while side.session.next_deadline() <= start + h.HEARTBEAT_S:
        side.now = max(side.now, side.session.next_deadline())
        for beat in h.messages(side.tick(), m.Heartbeat):
            assert len(beat.transfers) <= m.MAX_NAMED
            named |= {key.transfer_id for key in beat.transfers}
            beats += 1
            side.tell(h.beat(link, beat.number))
    assert named == {"t", *[f"t{number}" for number in range(10_000)]}
    assert beats <= -(-10_001 // m.MAX_NAMED) + 1


def test_prompts_that_are_followed_are_asked_for_at_once():
    side = h.consumer()
    h.connect(side)
    _want(side, MANY, is_followed=True)
    beats = [beat for piece in _until_it_rests(side) for beat in h.messages(piece, m.Heartbeat)]
    followed = [follow.transfer_id for beat in beats for follow in beat.followed]
    assert sorted(followed) == sorted(f"t{number}" for number in range(MANY))
    assert side.now == 0.0


def test_a_prompt_that_is_followed_does_not_wait_until_all_others_were_named():
    side = h.consumer()
    h.connect(side)
    _want(side, MANY)
    _until_it_rests(side)
    side.tell(h.wanted("new", key=_key(MANY), is_followed=True))
    (beat,) = [each for piece in _until_it_rests(side) for each in h.messages(piece, m.Heartbeat)]
    assert [each.transfer_id for each in beat.followed] == [f"t{MANY}"]
    assert beat.transfers == ()


@pytest.mark.parametrize("is_early", [True, False])
def test_a_lost_engine_ends_all_of_its_loads_piece_by_piece_and_no_later_one(is_early):
    side = h.consumer()
    link = h.resolve(side)[0].link if is_early else h.connect(side)[0]
    names = _want(side, MANY)
    _asked_for(side, names)
    pieces = [side.tell(ev.LinkLost(link, PeerLostError("gone")))]
    side.tell(h.wanted("later", key=_key(MANY)), h.load_asked("later"))
    pieces += _until_it_rests(side)
    ended = [each for piece in pieces for each in h.finished(piece)]
    if not is_early:
        stopped = [c.read_id for piece in pieces for c in h.of(piece, cmd.StopReceive)]
        ended += [
            each for read in stopped for each in h.finished(side.tell(ev.ReceiveStopped(read)))
        ]
    assert sorted(ended) == sorted((name, PeerLostError) for name in names)
    assert max(len(h.finished(piece)) for piece in pieces) <= MAX_AT_ONCE
    assert side.num_loads == 2  # that of "w" was not asked for


def test_a_read_that_gets_its_slots_between_the_loss_and_its_end_keeps_none():
    side = h.consumer()
    (link,) = h.connect(side)
    names = _want(side, MANY)
    reads = [started.read_id for started in h.of(_asked_for(side, names), cmd.StartReceive)]
    side.tell(ev.LinkLost(link, PeerLostError("gone")))
    assert side.tell(ev.ReceivePosted(reads[-1], 2, 1 << 20)) == [cmd.DrainReceive(reads[-1], None)]
    assert cmd.StopReceive(reads[-1]) in [c for piece in _until_it_rests(side) for c in piece]
    assert h.finished(side.tell(ev.ReceiveStopped(reads[-1]))) == [(names[-1], PeerLostError)]
    side.tell(ev.ReceiveDrained(reads[-1]))
    assert reads[-1] not in side.session._reads


def test_loads_that_were_asked_for_before_the_greeting_begin_with_it_piece_by_piece():
    side = h.consumer()
    (opened,) = h.resolve(side)
    names = _want(side, MANY)
    assert not _asked_for(side, names)
    pieces = [side.tell(ev.FromPeer(opened.link, m.HelloReply(incarnation="one")))]
    pieces += [side.tell(ev.WarmedUp(opened.link)), *_until_it_rests(side)]
    started = [each.request_id for piece in pieces for each in h.of(piece, cmd.StartReceive)]
    assert sorted(started) == sorted(names)
    assert max(len(h.of(piece, cmd.StartReceive)) for piece in pieces) <= MAX_AT_ONCE


def test_loads_whose_time_is_up_end_piece_by_piece():
    side = h.consumer(peer=h.PeerConfig(timeout_s=1000.0, idle_timeout_s=2000.0))
    h.connect(side)
    names = _want(side, MANY)
    reads = [started.read_id for started in h.of(_asked_for(side, names), cmd.StartReceive)]
    for read in reads:
        side.tell(ev.ReceivePosted(read, 2, read << 20))
    side.now += h.PEER.transfer_timeout_s
    pieces = _until_it_rests(side)
    stopped = [c.read_id for piece in pieces for c in h.of(piece, cmd.StopReceive)]
    assert sorted(stopped) == sorted(reads)
    ended = [each for read in reads for each in h.finished(side.tell(ev.ReceiveStopped(read)))]
    assert ended == [(name, TransferTimeoutError) for name in names]


@pytest.mark.parametrize("is_greeted", [True, False])
def test_ten_thousand_aborts_in_one_step_all_reach_the_producer(is_greeted):
    side = h.consumer()
    link = h.connect(side)[0] if is_greeted else h.resolve(side)[0].link
    names = _want(side, 10_000, is_followed=True)
    commands = [c for name in names for c in side.tell(DropRequest(name))]
    if not is_greeted:
        reply = m.HelloReply(incarnation="one")
        commands += side.tell(ev.FromPeer(link, reply), ev.WarmedUp(link))
    commands += [c for piece in _until_it_rests(side) for c in piece]
    aborted = {each.transfer_id for each in h.messages(commands, m.Abort)}
    assert aborted == {f"t{number}" for number in range(10_000)}
    assert side.num_loads == 1


def test_a_producer_gives_thousands_of_leases_back_in_their_time():
    side = h.producer()
    for number in range(MANY):
        side.tell(h.granted(f"r{number}", f"t{number}"))
        side.now += 0.001
    renewed = [_key(number) for number in range(0, MANY, 2)]
    h.welcome(side)
    side.now = h.LEASE_S - 1.0
    for first in range(0, len(renewed), m.MAX_NAMED):
        side.tell(h.heartbeat(-1, *renewed[first : first + m.MAX_NAMED]))
    ended = []
    for at, parity in ((h.LEASE_S + 1.0, 1), (2 * h.LEASE_S, 0)):
        side.now = at
        side.session.heard(-1, side.now)
        ended = [each for piece in _until_it_rests(side) for each in h.released(piece)]
        assert ended == [(f"r{number}", "expired") for number in range(parity, MANY, 2)]
    assert side.num_leases == 0
    assert side.session.next_deadline() is not None  # the peer's


def test_a_withdrawn_lease_of_thousands_ends_alone():
    side = h.producer()
    for number in range(MANY):
        side.tell(h.granted(f"r{number}", f"t{number}"))
    assert h.released(side.tell(WithdrawRequest("r7"))) == [("r7", "aborted")]
    side.now = h.LEASE_S
    ended = [each for piece in _until_it_rests(side) for each in h.released(piece)]
    assert len(ended) == MANY - 1


def test_a_lease_shorter_than_three_heartbeats_is_renewed_as_often_as_it_needs():
    side = h.consumer()
    (link,) = h.connect(side, lease_ms=3000)
    side.tick()
    for _ in range(5):
        assert len(h.messages(side.tick(1.0), m.Heartbeat)) == 1
        side.tell(h.beat(link))


def test_leases_are_kept_alive_while_the_engine_is_still_being_greeted():
    """Greeting all ranks of an engine that starts may take longer than a lease, and than a silent peer's timeout."""
    side = h.consumer()
    first, second = (opened.link for opened in h.resolve(side, h.engine(tp_size=2)))
    _want(side, 1)
    numbers = []
    for _ in range(5):
        beats = h.messages(side.tick(h.HEARTBEAT_S), m.Heartbeat)
        assert {key.transfer_id for beat in beats for key in beat.transfers} == {"t", "t0"}
        numbers = [beat.number for beat in beats]
        assert len(numbers) == 2
        side.tell(*[h.beat(link, numbers[0]) for link in (first, second)])
    reply = m.HelloReply(incarnation="one")
    for link in (first, second):
        side.tell(ev.FromPeer(link, reply), ev.WarmedUp(link))
    assert not h.of(side.tick(), cmd.CloseLink)
    assert h.of(side.tell(h.load_asked()), cmd.StartReceive)


def test_requests_dropped_in_mid_greeting_are_no_errors():
    side = h.consumer()
    (opened,) = h.resolve(side)
    names = _want(side, 3)
    _asked_for(side, names)
    ended = [each for name in names for each in h.finished(side.tell(DropRequest(name)))]
    assert ended == [(name, TransferAbortedError) for name in names]
    side.tell(ev.FromPeer(opened.link, m.HelloReply(incarnation="one")))
    assert not h.of(side.tell(ev.WarmedUp(opened.link)), cmd.StartReceive)


def test_prompts_that_are_computed_after_thousands_were_given_up_keep_no_blocks():
    side = h.producer()
    h.welcome(side)
    for number in range(10_000):
        held = h.granted(f"r{number}", f"t{number}", num_tokens=0, blocks=(h.GroupBlocks.of(()),))
        side.tell(structs.replace(held, is_complete=False))
    for number in range(10_000):
        side.tell(h.given_up(key=_key(number)))
    assert side.num_leases == 0
    for number in range(10_000):
        computed = side.tell(h.granted(f"r{number}", f"t{number}"))
        assert h.released(computed) == [(f"r{number}", "aborted")]
