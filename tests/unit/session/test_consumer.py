import pytest
from msgspec.structs import replace

from kvconnector.errors import (
    BlockIdError,
    LeaseExpiredError,
    LocalError,
    LocalProtocolError,
    TransferTimeoutError,
    TransportError,
    UnknownRequestError,
)
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.session.containment import WorkerFault
from kvconnector.session.orders import DropRequest, LoadRequest, WantRequest
from kvconnector.wire import messages as m
from tests.unit.session import harness

WIDE = {"tp_size": 2}


@pytest.fixture
def side():
    return harness.consumer()


def test_a_rank_ends_only_its_own_reads(side):
    links, reads = harness.start_load(side, harness.engine(**WIDE))
    assert side.handle(harness.read_ended(links[0], reads[1].read_id)) == []
    assert side.handle(harness.read_ended(links[1], reads[0].read_id)) == []
    assert side.handle(harness.read_ended(links[0], 999)) == []
    side.handle(ev.ReceiveFinished(reads[0]))
    assert harness.finished(side.handle(ev.ReceiveFinished(reads[1]))) == harness.OK


def test_a_stalled_load_fails_and_frees_its_slots(side):
    (link,), (read,) = harness.start_load(side)
    for _ in range(11):
        side.tick(harness.HEARTBEAT_S)
        side.handle(harness.heartbeat_reply(link))
    side.handle(ev.ReceiveAdvanced(read))
    for _ in range(11):
        assert not harness.of(side.tick(harness.HEARTBEAT_S), "stop_receive")
        side.handle(harness.heartbeat_reply(link))
    side.handle(harness.heartbeat_reply(link))
    assert harness.of(side.tick(harness.HEARTBEAT_S), "stop_receive")
    assert harness.finished(side.handle(ev.ReceiveStopped(read))) == harness.failed(
        TransferTimeoutError
    )
    closed = []
    for _ in range(12):  # the peer answers heartbeats, but not the cancellation
        side.handle(harness.heartbeat_reply(link))
        closed += side.tick(harness.HEARTBEAT_S)
    assert harness.call("close_link", link) in closed
    assert harness.call("drain_receive", read, None) in closed
    side.handle(ev.ReceiveDrained(read))
    assert side.num_reads == 0


def test_a_load_without_remote_blocks_is_refused(side):
    harness.connect(side)
    calls = side.handle(replace(harness.load_request(), remote_blocks=()))
    assert harness.finished(calls) == harness.failed(BlockIdError)
    assert not harness.of(calls, "start_receive")


def test_a_direct_read_that_hangs_is_given_up_like_any_other(side):
    """Its producer was not asked for it, and it needs no slots."""
    (link,) = harness.connect(side)
    side.handle(WantRequest("x", "y", harness.SECRET, harness.ADDRESS))
    (other,) = harness.of(side.handle(harness.load_request("x")), "start_receive")
    side.handle(harness.posted(other.read))
    (begun,) = harness.of(side.handle(harness.load_request()), "start_receive")
    begun.read.is_moving = True
    stopped = []
    for _ in range(13):
        side.handle(ev.ReceiveAdvanced(other.read), harness.heartbeat_reply(link))
        stopped += harness.of(side.tick(harness.HEARTBEAT_S), "stop_receive")
    assert side.now <= harness.PEER.transfer_timeout_s + harness.HEARTBEAT_S
    assert harness.call("stop_receive", begun.read) in stopped
    (ended,) = harness.of(side.handle(ev.ReceiveStopped(begun.read)), "finish_load")
    assert "made no progress" in str(ended.error)


def test_a_load_waits_for_slots_only_while_others_progress(side):
    (link,) = harness.connect(side)
    side.handle(WantRequest("x", "y", harness.SECRET, harness.ADDRESS))
    (first,) = harness.of(side.handle(harness.load_request()), "start_receive")
    side.handle(harness.posted(first.read))
    (second,) = harness.of(side.handle(harness.load_request("x")), "start_receive")
    for _ in range(60):
        side.handle(ev.ReceiveAdvanced(first.read))
        assert not harness.of(side.tick(harness.HEARTBEAT_S), "stop_receive")
        side.handle(harness.heartbeat_reply(link))
    stopped = []
    for _ in range(13):
        stopped += harness.of(side.tick(harness.HEARTBEAT_S), "stop_receive")
        side.handle(harness.heartbeat_reply(link))
    assert harness.call("stop_receive", second.read) in stopped
    calls = side.handle(ev.ReceiveStopped(second.read))
    assert harness.finished(calls) == [("x", TransferTimeoutError)]


def test_repeated_and_unknown_orders_are_refused(side):
    side.handle(harness.want())
    with pytest.raises(LocalError, match="wanted twice"):
        side.handle(harness.want())
    with pytest.raises(UnknownRequestError):
        side.handle(harness.load_request("unknown"))
    side.handle(harness.load_request())
    with pytest.raises(LocalProtocolError, match="LoadRequest is not possible") as refused:
        side.handle(harness.load_request())
    assert "wanted -> connecting" in str(refused.value)


@pytest.mark.parametrize("is_refused", [True, False])
def test_one_failed_read_stops_the_others_and_fails_the_load(side, is_refused):
    links, reads = harness.start_load(side, harness.engine(**WIDE))
    error = LeaseExpiredError("too late") if is_refused else TransportError("broken")
    if is_refused:
        calls = side.handle(harness.read_ended(links[0], reads[0].read_id))
        assert harness.of(calls, "drain_receive") == [harness.call("drain_receive", reads[0], 0)]
    else:
        calls = side.handle(ev.ReceiveFailed(reads[0], error))
    assert harness.call("stop_receive", reads[1]) in calls
    assert m.CancelRead(read_id=reads[1].read_id) in harness.messages(calls, m.CancelRead)
    for read in reads if is_refused else reads[1:]:
        calls = side.handle(ev.ReceiveStopped(read))
    assert harness.finished(calls) == harness.failed(type(error))


def test_a_read_that_nothing_stops_ends_the_worker(side):
    """Its blocks may still be written, so no request may get them. The peer is given up once, not again and again."""

    def fail(read, now):
        raise RuntimeError("nothing stops it")

    (link,), _ = harness.start_load(side)
    side.session._reads.stop = fail
    with pytest.raises(WorkerFault, match="nothing stops it"):
        side.handle(DropRequest("w"))
    assert harness.of(side.handle(), "close_link") == [harness.call("close_link", link)]


def test_a_load_that_cannot_be_planned_fails():
    side = harness.consumer(chunk_bytes=1)  # less than a token
    harness.connect(side)
    calls = side.handle(LoadRequest("w", ((0, 12),), harness.BLOCKS, harness.BLOCKS))
    assert [each.load.request_id for each in harness.of(calls, "finish_load") if each.error] == [
        "w"
    ]
    assert len(harness.messages(calls, m.Abort)) == 1


@pytest.mark.parametrize("refusal", [m.Refusal.UNKNOWN_TRANSFER, None])
def test_progress_under_another_secret_changes_nothing(side, refusal):
    """Two requests of one consumer name the same transfer, and only one of them has its secret."""
    (link,) = harness.connect(side, is_followed=True)
    side.handle(harness.load_request())
    report = m.Progress(transfer_id="t", watermark=Watermark(12), blocks=harness.BLOCKS)
    others = replace(report, secret=harness.OTHER_SECRET, refusal=refusal)
    assert side.receive(link, others) == []
    ours = side.receive(link, replace(report, secret=harness.SECRET))
    assert len(harness.of(ours, "start_receive")) == 1
