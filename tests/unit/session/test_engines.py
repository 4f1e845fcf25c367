import pytest
from msgspec.structs import replace

from kvconnector.errors import (
    IncompatiblePeerError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferTimeoutError,
)
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.engines import FIRST_GREETING_FACTOR
from kvconnector.session.orders import DropRequest
from kvconnector.wire import messages as m
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import attention_model
from tests.unit.session import harness as h

WIDE = {"tp_size": 2}


@pytest.fixture
def side():
    return h.consumer()


@pytest.mark.parametrize("theirs_s, shorter_s", [(4.0, 4.0), (60.0, h.PEER_S)])
def test_greetings_state_timeouts_and_the_shorter_one_counts(theirs_s, shorter_s):
    side = h.producer()
    (reply,) = h.messages(h.welcome(side, timeout_ms=int(theirs_s * 1000)), m.HelloReply)
    assert reply.timeout_ms == h.PEER_S * 1000
    assert not h.messages(side.tick(shorter_s - 0.5), m.Bye)
    assert h.messages(side.tick(0.5), m.Bye)


def test_heartbeats_are_as_frequent_as_the_shorter_timeout_demands(side):
    (link,) = h.connect(side, timeout_ms=3000)
    side.tick()
    for _ in range(9):
        assert len(h.messages(side.tick(1.0), m.Heartbeat)) == 1
        side.tell(h.beat(link))


def test_heartbeats_name_what_is_still_wanted(side):
    h.connect(side)
    second = m.TransferKey(transfer_id="u", secret=h.OTHER_SECRET)
    side.tell(h.wanted("v", key=second))
    (beat,) = h.messages(side.tick(), m.Heartbeat)
    assert set(beat.transfers) == {h.KEY, second}
    side.tell(DropRequest("w"))
    (beat,) = h.messages(side.tick(h.HEARTBEAT_S), m.Heartbeat)
    assert beat.transfers == (second,)


def test_an_engine_that_does_not_answer_fails_in_time_and_is_tried_again(side):
    side.tell(h.wanted(), h.load_asked())
    assert h.finished(side.tick(FIRST_GREETING_FACTOR * h.HELLO_S - 1.0)) == []
    assert h.finished(side.tick(1.0)) in (
        h.failed(PeerUnreachableError),
        h.failed(TransferTimeoutError),
    )
    side.tell(h.wanted("v"))
    assert h.of(side.tick(1.0), cmd.OpenLink)


def test_a_new_request_does_not_wait_for_a_directory_that_has_long_been_silent(side):
    """The link may have been cut while it was asked, and be whole again."""
    (first,) = h.of(side.tell(h.wanted()), cmd.OpenLink)
    side.now += h.PEER_S
    assert side.tell(h.wanted("v")) == []
    side.now += 0.1
    commands = side.tell(h.wanted("x"))
    (again,) = h.of(commands, cmd.OpenLink)
    assert cmd.CloseLink(first.link) in commands
    side.tell(ev.LinkLost(first.link, PeerLostError("gone")))
    side.tell(h.load_asked("x"))
    assert h.of(side.tell(ev.FromPeer(again.link, h.directory())), cmd.OpenLink)


def _beat(side, *links, seconds=h.SOON_IDLE.idle_timeout_s):
    """Let time pass while the producer lives; what the session commanded."""
    commands = []
    for _ in range(int(seconds / h.HEARTBEAT_S)):
        commands += side.tick(h.HEARTBEAT_S)
        side.tell(*[h.beat(link) for link in links])
    return commands


def test_a_request_just_before_an_engine_would_be_disconnected_keeps_it():
    side = h.consumer(peer=h.SOON_IDLE)
    (link,) = h.connect(side)
    side.tell(DropRequest("w"))
    _beat(side, link, seconds=15.0)
    side.now += h.HEARTBEAT_S
    assert side.tell(h.wanted("v")) == []
    assert len(h.messages(side.tick(), m.Heartbeat)) == 1
    assert h.of(side.tell(h.load_asked("v")), cmd.StartReceive)


def test_an_engine_whose_read_drains_stays_connected_until_it_is_drained():
    side = h.consumer(peer=h.SOON_IDLE)
    (link,), (read,) = h.start_load(side)
    side.tell(DropRequest("w"), ev.ReceiveStopped(read))
    assert not h.of(_beat(side, link), cmd.CloseLink)
    side.tell(h.cut_short(link, read, 2), ev.ReceiveDrained(read))
    assert side.tick(h.HEARTBEAT_S) == [cmd.CloseLink(link)]


def test_an_engine_that_was_met_before_has_less_time_to_greet(side):
    (link,) = h.connect(side)
    side.tell(ev.LinkLost(link, PeerLostError("gone")), h.wanted("v"))
    (opened,) = h.of(side.tick(2.0), cmd.OpenLink)
    assert cmd.CloseLink(opened.link) in side.tick(h.HELLO_S)


def test_a_warm_up_that_fails_fails_the_load_with_its_reason(side):
    (opened,) = h.resolve(side)
    side.tell(h.load_asked())
    failed = side.tell(ev.WarmedUp(opened.link, IncompatiblePeerError("no")))
    assert h.finished(failed) == h.failed(IncompatiblePeerError)


@pytest.mark.parametrize(
    "answer, error",
    [
        (h.directory(h.engine("q")), IncompatiblePeerError),
        (h.directory(h.engine(model=attention_model(item_size_bytes=4))), IncompatiblePeerError),
        (
            m.Directory(
                geometry=PackedGeometry.of(h.engine()),
                workers=h.directory(h.engine(tp_size=2)).workers,
            ),
            RemoteProtocolError,
        ),
    ],
)
def test_a_directory_of_something_else_fails_the_load(side, answer, error):
    (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
    assert h.finished(side.tell(ev.FromPeer(opened.link, answer))) == h.failed(error)


def test_a_directory_that_leaves_out_what_it_was_asked_for_fails_the_load(side):
    (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
    empty = ev.FromPeer(opened.link, replace(h.directory(), workers=()))
    assert h.messages(side.tell(empty), m.DirectoryRequest)
    assert h.finished(side.tell(empty)) == h.failed(RemoteProtocolError)


def test_an_engine_that_is_met_is_logged_with_how_it_differs(side):
    (opened,) = h.of(side.tell(h.wanted(), h.load_asked()), cmd.OpenLink)
    (met,) = h.of(side.tell(ev.FromPeer(opened.link, h.directory())), cmd.LogEngine)
    same = "tp 1, pp 1, block size 1; blocks are copied as they are"
    assert (met.engine_id, met.summary) == ("p", same)


def test_a_worker_that_answers_like_a_directory_is_left(side):
    (link,) = h.connect(side)
    assert cmd.CloseLink(link) in side.tell(ev.FromPeer(link, h.directory()))


def test_a_wrong_address_does_not_disturb_the_right_one(side):
    _, (read,) = h.start_load(side)
    elsewhere = EngineAddress(EngineId("p"), "tcp://127.0.0.1:9")
    (opened,) = h.of(side.tell(h.wanted("v", elsewhere), h.load_asked("v")), cmd.OpenLink)
    lost = side.tell(ev.LinkLost(opened.link, PeerUnreachableError("nobody")))
    assert h.finished(lost) == [("v", PeerUnreachableError)]
    assert h.finished(side.tell(ev.ReceiveFinished(read))) == h.OK


@pytest.mark.parametrize("is_duplicate", [True, False])
def test_only_the_answer_to_a_heartbeat_vouches_for_a_producer(side, is_duplicate):
    """A duplicate must not be taken for the answer to a later one, which the producer never got."""
    (link,) = h.connect(side)
    number = 0
    if is_duplicate:
        number = h.messages(side.tick(), m.Heartbeat)[0].number
        side.tell(h.beat(link, number))
        assert h.messages(side.tick(h.HEARTBEAT_S), m.Heartbeat)
    side.tell(h.beat(link, number))
    assert cmd.CloseLink(link) in side.tick(h.PEER_S - side.now)
    assert side.tell(h.beat(link, number)) == []


def test_a_fresh_request_shortens_the_long_pause_after_many_losses(side):
    opened = h.of(side.tell(h.wanted()), cmd.OpenLink)
    for _ in range(7):
        while not opened:
            opened = h.of(side.tick(1.0), cmd.OpenLink)
        side.tell(ev.LinkLost(opened.pop().link, PeerLostError("gone")))
    assert not h.of(side.tick(2.0), cmd.OpenLink)
    side.tell(h.wanted("v"))
    assert h.of(side.tick(1.0), cmd.OpenLink)


def test_a_consumer_that_drops_a_request_while_connecting_tells_the_producer_then(side):
    (link,) = [command.link for command in h.resolve(side)]
    assert not h.messages(side.tell(DropRequest("w")), m.Abort)
    side.tell(ev.FromPeer(link, m.HelloReply(incarnation="one")))
    (abort,) = h.messages(side.tell(ev.WarmedUp(link)), m.Abort)
    assert (abort.transfer_id, abort.secret) == (h.KEY.transfer_id, h.KEY.secret)
    assert side.num_loads == 0
