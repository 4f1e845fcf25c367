import pytest

from kvconnector.errors import (
    LeaseExpiredError,
    LocalError,
    LocalProtocolError,
    TransferTimeoutError,
    TransportError,
    UnknownRequestError,
)
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.orders import LoadRequest, WantRequest
from kvconnector.wire import messages as m
from tests.unit.session import harness as h

WIDE = {"tp_size": 2}


@pytest.fixture
def side():
    return h.consumer()


def test_a_rank_speaks_for_its_own_reads_only(side):
    links, reads = h.start_load(side, h.engine(**WIDE))
    assert side.tell(h.cut_short(links[0], reads[1])) == []
    assert side.tell(h.cut_short(links[1], reads[0])) == []
    assert side.tell(h.cut_short(links[0], 999)) == []
    side.tell(ev.ReceiveFinished(reads[0]))
    assert h.finished(side.tell(ev.ReceiveFinished(reads[1]))) == h.OK


def test_a_load_that_makes_no_progress_fails_and_its_slots_are_bounded(side):
    (link,), (read,) = h.start_load(side)
    for _ in range(11):
        side.tick(h.HEARTBEAT_S)
        side.tell(h.beat(link))
    side.tell(ev.ReceiveAdvanced(read))
    for _ in range(11):
        assert not h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(h.beat(link))
    side.tell(h.beat(link))
    assert h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
    assert h.finished(side.tell(ev.ReceiveStopped(read))) == h.failed(TransferTimeoutError)
    closed = []
    for _ in range(12):  # the peer lives and never answers the cancellation
        side.tell(h.beat(link))
        closed += side.tick(h.HEARTBEAT_S)
    assert cmd.CloseLink(link) in closed
    assert cmd.DrainReceive(read, None) in closed
    side.tell(ev.ReceiveDrained(read))
    assert side.num_reads == 0


def test_a_load_waits_for_slots_while_others_come_further_and_no_longer(side):
    (link,) = h.connect(side)
    side.tell(WantRequest("x", "y", h.SECRET, h.ADDRESS))
    (first,) = h.of(side.tell(h.load_asked()), cmd.StartReceive)
    side.tell(ev.ReceivePosted(first.read_id, 2, 1 << 20))
    (second,) = h.of(side.tell(h.load_asked("x")), cmd.StartReceive)
    for _ in range(60):
        side.tell(ev.ReceiveAdvanced(first.read_id))
        assert not h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(h.beat(link))
    stopped = []
    for _ in range(13):
        stopped += h.of(side.tick(h.HEARTBEAT_S), cmd.StopReceive)
        side.tell(h.beat(link))
    assert cmd.StopReceive(second.read_id) in stopped
    commands = side.tell(ev.ReceiveStopped(second.read_id))
    assert h.finished(commands) == [("x", TransferTimeoutError)]


def test_a_mistaken_engine_is_told_so(side):
    side.tell(h.wanted())
    with pytest.raises(LocalError, match="wanted twice"):
        side.tell(h.wanted())
    with pytest.raises(UnknownRequestError):
        side.tell(h.load_asked("nobody"))
    side.tell(h.load_asked())
    with pytest.raises(LocalProtocolError, match="LoadRequest is not possible") as refused:
        side.tell(h.load_asked())
    assert "wanted -> connecting" in str(refused.value)


@pytest.mark.parametrize("is_refused", [True, False])
def test_one_failed_read_stops_the_others_and_fails_the_load(side, is_refused):
    links, reads = h.start_load(side, h.engine(**WIDE))
    error = LeaseExpiredError("too late") if is_refused else TransportError("broken")
    if is_refused:
        commands = side.tell(h.cut_short(links[0], reads[0]))
        assert h.of(commands, cmd.DrainReceive) == [cmd.DrainReceive(reads[0], 0)]
    else:
        commands = side.tell(ev.ReceiveFailed(reads[0], error))
    assert cmd.StopReceive(reads[1]) in commands
    assert m.CancelRead(read_id=reads[1]) in h.messages(commands, m.CancelRead)
    for read in reads if is_refused else reads[1:]:
        commands = side.tell(ev.ReceiveStopped(read))
    assert h.finished(commands) == h.failed(type(error))


def test_a_load_that_cannot_be_planned_fails(side):
    h.connect(side)
    commands = side.tell(LoadRequest("w", ((0, 12), (0, 12)), h.BLOCKS, h.BLOCKS))
    assert [c.request_id for c in h.of(commands, cmd.FinishLoad) if c.error] == ["w"]
    assert len(h.messages(commands, m.Abort)) == 1
