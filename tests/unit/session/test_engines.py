from __future__ import annotations

import pytest

from kvconnector.errors import (
    IncompatiblePeerError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from kvconnector.ids import EngineId
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.engines import FIRST_GREETING_FACTOR
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import attention_model
from tests.unit.session import harness as h

WIDE = {"tp_size": 2}


def test_a_silent_engine_is_lost():
    side = h.consumer()
    (link,) = h.connect(side)
    assert len(h.messages(side.tick(), m.Heartbeat)) == 1
    assert h.messages(side.tick(1.0), m.Heartbeat) == []
    side.tell(ev.HeartbeatAnswered(link))
    commands = side.tick(h.PEER_S - 1.0)
    assert cmd.CloseLink(link) in commands
    assert side.tell(ev.HeartbeatAnswered(link)) == []


def test_an_unasked_heartbeat_reply_vouches_for_nothing():
    side = h.consumer()
    (link,) = h.connect(side)
    side.now = h.PEER_S - 1.0
    side.tell(ev.HeartbeatAnswered(link))
    assert cmd.CloseLink(link) in side.tick(1.0)


def test_a_producer_that_waits_less_for_silent_peers_than_we_do_is_trusted_no_longer_than_that():
    """It may have given us up and be sending other bytes from the same slots."""
    side = h.consumer()
    h.connect(side, timeout_ms=5000)
    (started,) = h.of(side.tell(h.load_asked()), cmd.StartReceive)
    side.tell(ev.ReceivePosted(started.read_id, 2, 1 << 20))
    side.now += 7.0
    assert h.finished(side.tell(ev.ReceiveFinished(started.read_id))) == h.failed(PeerLostError)


@pytest.mark.parametrize("theirs_s, shorter_s", [(4.0, 4.0), (60.0, h.PEER_S)])
def test_greetings_state_timeouts_and_the_shorter_one_counts(theirs_s, shorter_s):
    side = h.producer()
    (reply,) = h.messages(h.welcome(side, timeout_ms=int(theirs_s * 1000)), m.HelloReply)
    assert reply.timeout_ms == h.PEER_S * 1000
    assert not h.messages(side.tick(shorter_s - 0.5), m.Bye)
    assert h.messages(side.tick(0.5), m.Bye)


def test_heartbeats_are_as_frequent_as_the_shorter_timeout_demands():
    side = h.consumer()
    (link,) = h.connect(side, timeout_ms=3000)
    side.tick()
    for _ in range(9):
        assert len(h.messages(side.tick(1.0), m.Heartbeat)) == 1
        side.tell(ev.HeartbeatAnswered(link))


def test_a_duplicate_of_a_heartbeat_reply_vouches_for_nothing():
    """It must not be taken for the answer to a later heartbeat, which the producer never got."""
    side = h.consumer()
    (link,) = h.connect(side)
    (first,) = h.messages(side.tick(), m.Heartbeat)
    side.tell(ev.HeartbeatAnswered(link, first.number))
    assert h.messages(side.tick(h.HEARTBEAT_S), m.Heartbeat)
    side.tell(ev.HeartbeatAnswered(link, first.number))
    assert cmd.CloseLink(link) in side.tick(h.PEER_S - h.HEARTBEAT_S)


def test_heartbeats_name_what_is_still_wanted():
    side = h.consumer()
    h.connect(side)
    second = m.TransferKey(transfer_id="u", secret=h.OTHER_SECRET)
    side.tell(h.wanted("v", key=second))
    (beat,) = h.messages(side.tick(), m.Heartbeat)
    assert set(beat.transfers) == {h.KEY, second}
    side.tell(ev.LoadWithdrawn("w"))
    (beat,) = h.messages(side.tick(h.HEARTBEAT_S), m.Heartbeat)
    assert beat.transfers == (second,)


def test_an_engine_that_does_not_answer_fails_in_time_and_is_tried_again():
    side = h.consumer()
    side.tell(h.wanted(), h.load_asked())
    assert h.finished(side.tick(FIRST_GREETING_FACTOR * h.HELLO_S - 1.0)) == []
    assert h.finished(side.tick(1.0)) in (
        h.failed(PeerUnreachableError),
        h.failed(TransferTimeoutError),
    )
    side.tell(h.wanted("v"))
    assert h.of(side.tick(1.0), cmd.OpenLink)


def _lose_again_and_again(side, times):
    """Want a request of an engine whose link is lost so many times, the last time just now."""
    opened = h.of(side.tell(h.wanted()), cmd.OpenLink)
    for _ in range(times):
        while not opened:
            opened = h.of(side.tick(1.0), cmd.OpenLink)
        (command,) = opened
        side.tell(ev.LinkLost(command.link, PeerLostError("gone")))
        opened = []


def test_a_load_does_not_wait_for_ever_for_an_engine_that_fails_again_and_again():
    side = h.consumer()
    _lose_again_and_again(side, 9)
    side.tell(h.load_asked())
    commands = [command for _ in range(30) for command in side.tick(1.0)]
    assert h.finished(commands) == h.failed(TransferTimeoutError)


def test_a_fresh_request_shortens_a_long_pause():
    side = h.consumer()
    _lose_again_and_again(side, 7)
    assert not h.of(side.tick(2.0), cmd.OpenLink)
    side.tell(h.wanted("v"))
    assert h.of(side.tick(1.0), cmd.OpenLink)


def test_a_new_request_does_not_wait_for_a_directory_that_has_long_been_silent():
    """The link may have been cut while it was asked, and be whole again."""
    side = h.consumer()
    (first,) = h.of(side.tell(h.wanted()), cmd.OpenLink)
    side.now += h.PEER_S
    assert side.tell(h.wanted("v")) == []
    side.now += 0.1
    commands = side.tell(h.wanted("x"))
    (again,) = h.of(commands, cmd.OpenLink)
    assert cmd.CloseLink(first.link) in commands
    side.tell(ev.LinkLost(first.link, PeerLostError("gone")))
    side.tell(h.load_asked("x"))
    assert h.of(side.tell(ev.DirectoryArrived(again.link, h.directory())), cmd.OpenLink)


def test_an_engine_that_nobody_wants_is_forgotten():
    side = h.consumer()
    (link,) = h.connect(side)
    side.tell(ev.LoadWithdrawn("w"), ev.LinkLost(link, PeerLostError("gone")))
    assert side.tick(1.0) == []
    assert side.session.next_deadline() is None


def _beat(side, *links, seconds=h.SOON_IDLE.idle_timeout_s):
    """Let time pass while the producer lives; what the session commanded."""
    commands = []
    for _ in range(int(seconds / h.HEARTBEAT_S)):
        commands += side.tick(h.HEARTBEAT_S)
        side.tell(*[ev.HeartbeatAnswered(link) for link in links])
    return commands


def test_an_engine_that_nothing_was_wanted_from_for_long_is_disconnected_and_greeted_anew():
    side = h.consumer(peer=h.SOON_IDLE)
    links = h.connect(side, h.engine(**WIDE))
    assert not h.of(_beat(side, *links, seconds=60.0), cmd.CloseLink)  # a request waits
    side.tell(ev.LoadWithdrawn("w"))
    assert not h.of(_beat(side, *links, seconds=15.0), cmd.CloseLink)
    assert side.tick(h.HEARTBEAT_S) == [cmd.CloseLink(link) for link in links]
    assert side.session.next_deadline() is None
    late = [ev.HeartbeatAnswered(links[0]), ev.LinkLost(links[1], PeerLostError("gone"))]
    assert side.tell(*late) == []
    (again,) = h.connect(side, request_id="v")
    assert again not in links
    assert h.of(side.tell(h.load_asked("v")), cmd.StartReceive)


def test_a_request_just_before_an_engine_would_be_disconnected_keeps_it():
    side = h.consumer(peer=h.SOON_IDLE)
    (link,) = h.connect(side)
    side.tell(ev.LoadWithdrawn("w"))
    _beat(side, link, seconds=15.0)
    side.now += h.HEARTBEAT_S
    assert side.tell(h.wanted("v")) == []
    assert len(h.messages(side.tick(), m.Heartbeat)) == 1
    assert h.of(side.tell(h.load_asked("v")), cmd.StartReceive)


def test_an_engine_whose_read_drains_stays_connected_until_it_is_drained():
    side = h.consumer(peer=h.SOON_IDLE)
    (link,), (read,) = h.start_load(side)
    side.tell(ev.LoadWithdrawn("w"), ev.ReceiveStopped(read))
    assert not h.of(_beat(side, link), cmd.CloseLink)
    side.tell(ev.ReadCutShort(link, read, 2, PeerLostError("cancelled")), ev.ReceiveDrained(read))
    assert side.tick(h.HEARTBEAT_S) == [cmd.CloseLink(link)]


def test_a_greeting_that_takes_too_long_is_given_up():
    side = h.consumer()
    links = h.resolve(side)
    assert not h.of(side.tick(FIRST_GREETING_FACTOR * h.HELLO_S - 1.0), cmd.CloseLink)
    assert cmd.CloseLink(links[0].link) in side.tick(1.0)


def test_an_engine_that_was_met_before_has_less_time_to_greet():
    side = h.consumer()
    (link,) = h.connect(side)
    side.tell(ev.LinkLost(link, PeerLostError("gone")), h.wanted("v"))
    (opened,) = h.of(side.tick(2.0), cmd.OpenLink)
    assert cmd.CloseLink(opened.link) in side.tick(h.HELLO_S)


@pytest.mark.parametrize("where", ["directory", "hello", "warm-up"])
def test_a_refusal_on_the_way_fails_the_load_with_its_reason(where):
    side = h.consumer()
    if where == "directory":
        (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
        denial = m.DirectoryRefused(refusal=Refusal.INCOMPATIBLE, text="not here")
        commands = side.tell(ev.DirectoryDenied(opened.link, denial))
    else:
        (opened,) = h.resolve(side)
        side.tell(h.load_asked())
        reply = m.HelloReply(incarnation="one", refusal=Refusal.INCOMPATIBLE, text="not alike")
        event = (
            ev.HelloAnswered(opened.link, reply)
            if where == "hello"
            else ev.WarmedUp(opened.link, IncompatiblePeerError("no"))
        )
        commands = side.tell(event)
    assert h.finished(commands) == h.failed(IncompatiblePeerError)


@pytest.mark.parametrize(
    "answer, error",
    [
        (h.directory(h.engine("q")), IncompatiblePeerError),
        (h.directory(h.engine(model=attention_model(item_size_bytes=4))), IncompatiblePeerError),
        (m.Directory(geometry=PackedGeometry.of(h.engine()), workers=()), RemoteProtocolError),
    ],
)
def test_a_directory_of_something_else_fails_the_load(answer, error):
    side = h.consumer()
    (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
    assert h.finished(side.tell(ev.DirectoryArrived(opened.link, answer))) == h.failed(error)


def test_a_worker_that_answers_like_a_directory_is_left():
    side = h.consumer()
    (link,) = h.connect(side)
    assert cmd.CloseLink(link) in side.tell(ev.DirectoryArrived(link, h.directory()))


def test_a_wrong_address_does_not_disturb_the_right_one():
    side = h.consumer()
    _, (read,) = h.start_load(side)
    elsewhere = ev.EngineAddress(EngineId("p"), "tcp://127.0.0.1:9")
    (opened,) = h.of(side.tell(h.wanted("v", elsewhere), h.load_asked("v")), cmd.OpenLink)
    lost = side.tell(ev.LinkLost(opened.link, PeerUnreachableError("nobody")))
    assert h.finished(lost) == [("v", PeerUnreachableError)]
    assert h.finished(side.tell(ev.ReceiveFinished(read))) == h.OK


def test_repeated_answers_change_nothing():
    side = h.consumer()
    (link,) = h.connect(side)
    assert side.tell(ev.HelloAnswered(link, m.HelloReply(incarnation="two"))) == []
    assert side.tell(ev.WarmedUp(link)) == []
    assert side.tell(ev.WarmedUp(12345)) == []


def test_a_second_request_shares_the_way_to_the_engine_and_the_warm_up_may_come_first():
    side = h.consumer()
    (directory,) = h.of(side.tell(h.wanted(), h.wanted("v")), cmd.OpenLink)
    arrived = ev.DirectoryArrived(directory.link, h.directory())
    (worker,) = h.of(side.tell(arrived, h.wanted("x")), cmd.OpenLink)
    side.tell(ev.WarmedUp(worker.link))
    side.tell(ev.HelloAnswered(worker.link, m.HelloReply(incarnation="one")))
    assert h.of(side.tell(h.load_asked("x")), cmd.StartReceive)
