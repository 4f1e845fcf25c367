from __future__ import annotations

import pytest

from kvconnector.errors import (
    BlockIdError,
    LeaseExpiredError,
    LocalError,
    LocalProtocolError,
    PeerLostError,
    TransferAbortedError,
    TransferTimeoutError,
    TransportError,
    UnknownRequestError,
)
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.wire import messages as m
from tests.unit.session import harness as h

WIDE = {"tp_size": 2}


def test_a_load_asks_every_rank_and_confirms_to_every_rank():
    side = h.consumer()
    links, reads = h.start_load(side, h.engine(**WIDE))
    assert len(links) == len(reads) == 2
    assert h.finished(side.tell(ev.ReceiveFinished(reads[0]))) == []
    ended = side.tell(ev.ReceiveAdvanced(reads[1]), ev.ReceiveFinished(reads[1]))
    assert h.finished(ended) == h.OK
    confirmed = [c.link for c in h.of(ended, cmd.SendMessage) if isinstance(c.message, m.Done)]
    assert confirmed == links
    assert side.num_loads == side.num_reads == 0


@pytest.mark.parametrize("ready_first", [True, False])
def test_a_load_that_cannot_be_planned_fails(ready_first):
    side = h.consumer()
    impossible = ev.LoadAsked("w", (range(12), range(12)), h.BLOCKS, h.BLOCKS)
    if ready_first:
        h.connect(side)
        commands = side.tell(impossible)
    else:
        (link,) = [command.link for command in h.resolve(side)]
        side.tell(impossible)
        side.tell(ev.HelloAnswered(link, m.HelloReply(incarnation="one")))
        commands = side.tell(ev.WarmedUp(link))
    assert [c.request_id for c in h.of(commands, cmd.FinishLoad) if c.error] == ["w"]
    assert len(h.messages(commands, m.Abort)) == 1


def test_a_rank_that_holds_nothing_is_ready_without_greeting_anybody():
    side = h.consumer(h.EMPTY_STAGE)
    assert h.resolve(side) == []
    assert h.finished(side.tell(h.load_asked())) == h.OK


@pytest.mark.parametrize("state", ["wanted", "connecting", "reading", "draining"])
def test_a_request_can_be_dropped_in_every_state(state):
    side = h.consumer()
    error = TransferAbortedError
    if state in ("wanted", "connecting"):
        side.tell(h.wanted())
        if state == "connecting":
            side.tell(h.load_asked())
        commands = side.tell(ev.LoadWithdrawn("w"))
        assert h.finished(commands) == ([] if state == "wanted" else h.failed(error))
    else:
        (link,), (read,) = h.start_load(side)
        stopped = side.tell(ev.LoadWithdrawn("w"))
        assert h.finished(stopped) == []
        assert h.of(stopped, cmd.StopReceive) == [cmd.StopReceive(read)]
        assert h.messages(stopped, m.CancelRead) == [m.CancelRead(read_id=read)]
        if state == "draining":
            assert side.tell(ev.LoadWithdrawn("w")) == []
        assert h.finished(side.tell(ev.ReceiveStopped(read))) == h.failed(error)
        assert side.num_reads == 1
        cut = ev.ReadCutShort(link, read, 2, TransferAbortedError("cancelled"))
        assert side.tell(cut) == [cmd.DrainReceive(read, 2)]
        side.tell(ev.ReceiveDrained(read))
    assert side.num_loads == side.num_reads == 0
    assert side.tell(ev.LoadWithdrawn("w")) == []


def test_a_refusal_fails_the_load_and_stops_the_other_reads():
    side = h.consumer()
    links, reads = h.start_load(side, h.engine(**WIDE))
    commands = side.tell(ev.ReadCutShort(links[0], reads[0], 0, LeaseExpiredError("too late")))
    assert h.of(commands, cmd.DrainReceive) == [cmd.DrainReceive(reads[0], 0)]
    assert {command.read_id for command in h.of(commands, cmd.StopReceive)} == set(reads)
    assert h.messages(commands, m.CancelRead) == [m.CancelRead(read_id=reads[1])]


def test_a_rank_speaks_for_its_own_reads_only():
    side = h.consumer()
    links, reads = h.start_load(side, h.engine(**WIDE))
    assert side.tell(ev.ReadCutShort(links[0], reads[1], 0, LeaseExpiredError("no"))) == []
    assert side.tell(ev.ReadCutShort(links[1], reads[0], 0, LeaseExpiredError("no"))) == []
    assert side.tell(ev.ReadCutShort(links[0], 999, 0, LeaseExpiredError("no"))) == []
    side.tell(ev.ReceiveFinished(reads[0]))
    assert h.finished(side.tell(ev.ReceiveFinished(reads[1]))) == h.OK


@pytest.mark.parametrize("wide", [True, False])
def test_a_data_plane_failure_fails_the_load(wide):
    side = h.consumer()
    _, reads = h.start_load(side, h.engine(**WIDE) if wide else None)
    commands = side.tell(ev.ReceiveFailed(reads[0], TransportError("broken")))
    assert m.CancelRead(read_id=reads[0]) in h.messages(commands, m.CancelRead)
    if wide:
        commands = side.tell(ev.ReceiveStopped(reads[1]))
    assert h.finished(commands) == h.failed(TransportError)


def test_a_load_that_makes_no_progress_fails_and_its_slots_are_bounded():
    side = h.consumer()
    (link,), (read,) = h.start_load(side)
    for _ in range(11):
        side.tick(h.HEARTBEAT_S)
        side.tell(ev.HeartbeatAnswered(link))
    side.tell(ev.ReceiveAdvanced(read))
    for _ in range(11):
        assert not h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(ev.HeartbeatAnswered(link))
    side.tell(ev.HeartbeatAnswered(link))
    assert h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
    assert h.finished(side.tell(ev.ReceiveStopped(read))) == h.failed(TransferTimeoutError)
    closed = []
    for _ in range(12):  # the peer lives and never answers the cancellation
        side.tell(ev.HeartbeatAnswered(link))
        closed += side.tick(h.HEARTBEAT_S)
    assert cmd.CloseLink(link) in closed
    assert cmd.DrainReceive(read, None) in closed
    side.tell(ev.ReceiveDrained(read))
    assert side.num_reads == 0


def test_a_load_waits_for_slots_while_others_come_further_and_no_longer():
    side = h.consumer()
    (link,) = h.connect(side)
    side.tell(ev.Wanted("x", "y", h.SECRET, h.ADDRESS))
    (first,) = h.of(side.tell(h.load_asked()), cmd.StartReceive)
    side.tell(ev.ReceivePosted(first.read_id, 2, 1 << 20))
    (second,) = h.of(side.tell(h.load_asked("x")), cmd.StartReceive)
    for _ in range(60):
        side.tell(ev.ReceiveAdvanced(first.read_id))
        assert not h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(ev.HeartbeatAnswered(link))
    stopped = []
    for _ in range(13):
        stopped += h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(ev.HeartbeatAnswered(link))
    assert cmd.StopReceive(second.read_id) in stopped
    commands = side.tell(ev.ReceiveStopped(second.read_id))
    assert h.finished(commands) == [("x", TransferTimeoutError)]


def test_a_read_that_is_stopped_while_it_waits_is_never_asked_for():
    side = h.consumer()
    h.connect(side)
    (started,) = h.of(side.tell(h.load_asked()), cmd.StartReceive)
    assert not h.messages(side.tell(ev.LoadWithdrawn("w")), m.CancelRead)
    posted = side.tell(ev.ReceivePosted(started.read_id, 2, 1 << 20))
    assert posted == [cmd.DrainReceive(started.read_id, 0)]


def test_what_arrived_after_a_long_sleep_is_not_believed():
    side = h.consumer()
    _, (read,) = h.start_load(side)
    side.now += h.PEER_S  # the producer may have given us up, and reused what it was sending
    assert h.finished(side.tell(ev.ReceiveFinished(read))) == h.failed(PeerLostError)


def test_a_mistaken_engine_is_told_so():
    side = h.consumer()
    side.tell(h.wanted())
    with pytest.raises(LocalError, match="wanted twice"):
        side.tell(h.wanted())
    with pytest.raises(UnknownRequestError):
        side.tell(h.load_asked("nobody"))
    side.tell(h.load_asked())
    with pytest.raises(LocalProtocolError, match="LoadAsked is not possible") as refused:
        side.tell(h.load_asked())
    assert "wanted -> connecting" in str(refused.value)


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_load_that_cannot_be_fails_at_once_and_its_producer_is_told(is_connected):
    side = h.consumer()
    if is_connected:
        h.connect(side)
    else:
        side.tell(h.wanted())
    commands = side.tell(ev.LoadAsked("w", (), (), (), BlockIdError("too far")))
    assert h.finished(commands) == [("w", BlockIdError)]
    assert len(h.messages(commands, m.Abort)) == is_connected
    assert (side.num_loads, side.num_reads) == (0, 0)
