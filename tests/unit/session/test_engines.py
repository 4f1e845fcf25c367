import pytest
from msgspec.structs import replace

from kvconnector.agenda import NEVER
from kvconnector.errors import (
    IncompatiblePeerError,
    PeerLostError,
    PeerUnreachableError,
    RemoteProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
)
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.session import events as ev
from kvconnector.session.engines import FIRST_GREETING_FACTOR, QUICK_GREETING_S
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import DropRequest
from kvconnector.wire import messages as m
from kvconnector.wire import versions
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import attention_model
from tests.support.lines import lines_of
from tests.unit.session import harness

WIDE = {"tp_size": 2}
MANY_HEADS = attention_model(num_layers=2, total_heads=64, head_dim=2)


@pytest.fixture
def side():
    return harness.consumer()


@pytest.mark.parametrize("theirs_s, shorter_s", [(4.0, 4.0), (60.0, harness.PEER_S)])
def test_the_shorter_of_both_stated_timeouts_applies(theirs_s, shorter_s):
    side = harness.producer()
    (reply,) = harness.messages(
        harness.welcome(side, timeout_ms=int(theirs_s * 1000)), m.HelloReply
    )
    assert reply.timeout_ms == harness.PEER_S * 1000
    assert not harness.messages(side.tick(shorter_s - 0.5), m.Bye)
    assert harness.messages(side.tick(0.5), m.Bye)


@pytest.mark.parametrize("stated", ["timeout_ms", "lease_ms"])
def test_heartbeats_are_frequent_enough_for_the_peers_timeouts(side, stated):
    (link,) = harness.connect(side, **{stated: 3000})
    side.tick()
    for _ in range(9):
        assert len(harness.messages(side.tick(1.0), m.Heartbeat)) == 1
        side.handle(harness.heartbeat_reply(link))


def test_heartbeats_name_the_requests_still_wanted(side):
    harness.connect(side)
    second = m.TransferKey(transfer_id="u", secret=harness.OTHER_SECRET)
    side.handle(harness.want("v", key=second))
    (heartbeat,) = harness.messages(side.tick(), m.Heartbeat)
    assert set(heartbeat.transfers) == {harness.KEY, second}
    side.handle(DropRequest("w"))
    (heartbeat,) = harness.messages(side.tick(harness.HEARTBEAT_S), m.Heartbeat)
    assert heartbeat.transfers == (second,)


def test_a_silent_engine_fails_its_loads_and_is_retried(side):
    side.handle(harness.want(), harness.load_request())
    assert harness.finished(side.tick(FIRST_GREETING_FACTOR * harness.HELLO_S - 1.0)) == []
    assert harness.finished(side.tick(1.0)) in (
        harness.failed(PeerUnreachableError),
        harness.failed(TransferTimeoutError),
    )
    side.handle(harness.want("v"))
    assert harness.of(side.tick(1.0), "open_link")


def _lines_of_a_workers_events(num_workers):
    """Return the lines executed for an answer to a greeting, and for one to a heartbeat."""
    side = harness.consumer(geometry=harness.engine("d", model=MANY_HEADS))
    opened = harness.resolve(side, harness.engine(tp_size=num_workers, model=MANY_HEADS))
    *others, measured, last = [each.link for each in opened]
    assert len(others) == num_workers - 2
    for link in others:
        side.handle(*harness.accepted(link))
    greeting = lines_of(lambda: side.handle(*harness.accepted(measured)))
    side.handle(*harness.accepted(last))
    side.settle()
    return greeting, lines_of(lambda: side.handle(harness.heartbeat_reply(measured)))


def test_a_workers_event_is_as_much_work_for_any_number_of_workers():
    assert _lines_of_a_workers_events(64) == _lines_of_a_workers_events(4)


def test_each_silent_worker_is_noticed_in_its_own_time():
    side = harness.consumer(geometry=harness.engine("d", model=MANY_HEADS))
    links = harness.connect(side, harness.engine(tp_size=4, model=MANY_HEADS))
    for second in range(1, 3 * int(harness.PEER_S)):
        lost = harness.of(side.tick(1.0), "close_link")
        if lost:
            break
        # the last one never answers, the others do until half of the time is over
        for link in links[: 3 if second < harness.PEER_S / 2 else 2]:
            side.handle(harness.heartbeat_reply(link))
    assert second == harness.PEER_S


def test_a_request_after_a_pause_of_this_process_is_not_lost_with_the_older_ones(side):
    (link,) = harness.connect(side)
    side.handle(harness.load_request())
    side.now += harness.PEER_S  # no tick came: the process was stopped
    calls = side.handle(harness.want("v"), harness.load_request("v"))
    assert harness.call("close_link", link) in calls
    calls += side.settle()
    assert [each.read.load.request_id for each in harness.of(calls, "stop_receive")] == ["w"]
    side.now += 2.0
    calls = side.settle()
    assert not harness.finished(calls)
    (opened,) = harness.of(calls, "open_link")
    assert harness.of(answers(side, opened) + side.settle(), "start_receive")


def test_an_engine_without_requests_is_not_retried(side):
    side.handle(harness.want(), harness.load_request())
    assert harness.finished(side.tick(FIRST_GREETING_FACTOR * harness.HELLO_S))
    while (deadline := side.session.next_deadline()) < NEVER:
        side.now = deadline
        assert not harness.of(side.tick(), "open_link")


def test_a_repeated_hello_reply_is_ignored(side):
    (worker,) = harness.resolve(side)
    reply = m.HelloReply(incarnation="one", transport_address=b"p", export=harness.EXPORT)
    answers = [side.receive(worker.link, reply) for _ in range(2)]
    assert [each.call for each in answers[0]] == ["connect_back"]
    assert not answers[1]


def test_pools_that_change_twice_at_once_are_mapped_once(side):
    """Both replies come before the first one's pools are unmapped. A mapping more would never be closed."""
    (link,) = harness.connect(side, export=harness.EXPORT)
    exports = [replace(harness.EXPORT, epoch=epoch) for epoch in (1, 2)]
    replies = [m.HelloReply(incarnation="one", export=each) for each in exports]
    calls = side.handle(*[FromPeer(link, each) for each in replies])
    assert len(harness.of(calls, "unmap_pools")) == 2
    (mapped,) = harness.of(side.handle(ev.PoolsUnmapped(link)), "map_pools")
    assert mapped.export == exports[1]
    link.maps_pools = True
    assert not harness.of(side.handle(ev.PoolsUnmapped(link)), "map_pools")


@pytest.mark.parametrize(
    "change", [{"incarnation": "two"}, {"refusal": m.Refusal.INTERNAL}], ids=str
)
def test_a_further_answer_of_another_start_or_with_a_refusal_changes_no_mapping(side, change):
    """A worker that was started anew has other memory, and answers no link of the old one."""
    (link,) = harness.connect(side, export=harness.EXPORT)
    other = replace(harness.EXPORT, epoch=1)
    reply = m.HelloReply(**{"incarnation": "one", "export": other, **change})
    calls = side.receive(link, reply) + side.handle(ev.PoolsUnmapped(link))
    assert not harness.of(calls, "unmap_pools")
    assert [each.export for each in harness.of(calls, "map_pools")] == [harness.EXPORT]


def test_who_has_no_answer_yet_may_map_the_pools_at_any_time(side):
    """A heartbeat that denies it would arrive after the greeting, and the producer would not wait for it."""
    (opened,) = harness.resolve(side)
    (heartbeat,) = harness.messages(side.tick(QUICK_GREETING_S), m.Heartbeat)
    assert heartbeat.maps_pools
    calls = side.handle(*harness.accepted(opened.link)) + side.tick()
    (heartbeat,) = harness.messages(calls, m.Heartbeat)
    assert not heartbeat.maps_pools


def test_a_new_request_replaces_the_link_to_a_silent_directory(side):
    """The link may have been cut after the request was sent, and may work again."""
    (first,) = harness.of(side.handle(harness.want()), "open_link")
    side.now += harness.PEER_S
    assert side.handle(harness.want("v")) == []
    side.now += 0.1
    calls = side.handle(harness.want("x"))
    (again,) = harness.of(calls, "open_link")
    assert harness.call("close_link", first.link) in calls
    side.handle(ev.LinkLost(first.link, PeerLostError("gone")))
    side.handle(harness.load_request("x"))
    assert harness.of(side.receive(again.link, harness.directory()), "open_link")


def test_workers_are_greeted_in_the_directorys_wire_version(side, monkeypatch):
    monkeypatch.setattr(versions, "SPOKEN", versions.WireVersions(3, 5))
    calls = side.handle(harness.want())
    (asked,) = harness.of(calls, "open_link")
    (request,) = harness.messages(calls, m.DirectoryRequest)
    assert (asked.version, request.oldest_version, request.newest_version) == (3, 3, 5)
    named = replace(harness.directory(), wire_version=4)
    (worker,) = harness.of(side.receive(asked.link, named), "open_link")
    assert worker.version == 4


def _stay_alive(side, *links, seconds=harness.SOON_IDLE.idle_timeout_s):
    """Let time pass while the producer answers heartbeats. Returns the session's calls."""
    calls = []
    for _ in range(int(seconds / harness.HEARTBEAT_S)):
        calls += side.tick(harness.HEARTBEAT_S)
        side.handle(*[harness.heartbeat_reply(link) for link in links])
    return calls


def test_a_new_request_keeps_an_idle_engine_connected():
    side = harness.consumer(peer=harness.SOON_IDLE)
    (link,) = harness.connect(side)
    side.handle(DropRequest("w"))
    _stay_alive(side, link, seconds=15.0)
    side.now += harness.HEARTBEAT_S
    assert side.handle(harness.want("v")) == []
    assert len(harness.messages(side.tick(), m.Heartbeat)) == 1
    assert harness.of(side.handle(harness.load_request("v")), "start_receive")


def test_an_idle_engine_stays_connected_while_a_read_drains():
    side = harness.consumer(peer=harness.SOON_IDLE)
    (link,), (read,) = harness.start_load(side)
    side.handle(DropRequest("w"), ev.ReceiveStopped(read))
    assert not harness.of(_stay_alive(side, link), "close_link")
    side.handle(harness.read_ended(link, read.read_id, 2), ev.ReceiveDrained(read))
    assert side.tick(harness.HEARTBEAT_S) == [harness.call("close_link", link)]


def test_a_reconnecting_engine_has_less_time_to_greet(side):
    (link,) = harness.connect(side)
    side.handle(ev.LinkLost(link, PeerLostError("gone")), harness.want("v"))
    (opened,) = harness.of(side.tick(2.0), "open_link")
    assert harness.call("close_link", opened.link) in side.tick(harness.HELLO_S)


def test_a_lost_engine_is_not_told_later_what_ended_meanwhile(side):
    """A request of the same name may be new, as of an SGLang room, and another engine may read what this one lost."""
    (link,) = harness.connect(side)
    side.handle(harness.load_request())
    (stopped,) = harness.of(side.handle(ev.LinkLost(link, PeerLostError("gone"))), "stop_receive")
    ended = side.handle(ev.ReceiveStopped(stopped.read), ev.ReceiveDrained(stopped.read))
    assert harness.finished(ended) == [("w", PeerLostError)]
    side.handle(harness.want("again"))
    (opened,) = harness.of(side.tick(2.0), "open_link")
    calls = answers(side, opened) + side.settle()
    assert not harness.messages(calls, m.Abort)
    beats = harness.messages(calls, m.Heartbeat)
    assert harness.KEY in [key for beat in beats for key in beat.transfers]


def test_nothing_is_known_of_an_engine_that_no_request_wants_any_more(side):
    """Each start of an engine may have another name or address."""
    (link,) = harness.connect(side)
    side.handle(DropRequest("w"), ev.LinkLost(link, PeerLostError("gone")))
    side.tick(2.0)
    (opened,) = harness.of(side.handle(harness.want("v")), "open_link")
    left = harness.call("close_link", opened.link)
    assert left not in side.tick(harness.HELLO_S)
    assert left in side.tick((FIRST_GREETING_FACTOR - 1) * harness.HELLO_S)


def test_a_failed_warm_up_fails_the_load(side):
    (opened,) = harness.resolve(side)
    side.handle(harness.load_request())
    failed = side.handle(ev.WarmedUp(opened.link, IncompatiblePeerError("no")))
    assert harness.finished(failed) == harness.failed(IncompatiblePeerError)


@pytest.mark.parametrize(
    "answer, error",
    [
        (harness.directory(harness.engine("q")), IncompatiblePeerError),
        (replace(harness.directory(), wire_version=99), IncompatiblePeerError),
        (
            harness.directory(harness.engine(model=attention_model(item_size_bytes=4))),
            IncompatiblePeerError,
        ),
        (
            m.Directory(
                geometry=PackedGeometry.of(harness.engine()),
                workers=harness.directory(harness.engine(tp_size=2)).workers,
            ),
            RemoteProtocolError,
        ),
    ],
)
def test_an_unusable_directory_fails_the_load(side, answer, error):
    (opened,) = harness.of(side.handle(harness.want(), harness.load_request()), "open_link")
    assert harness.finished(side.receive(opened.link, answer)) == harness.failed(error)


def test_a_directory_that_omits_workers_twice_fails_the_load(side):
    (opened,) = harness.of(side.handle(harness.want(), harness.load_request()), "open_link")
    empty = FromPeer(opened.link, replace(harness.directory(), workers=()))
    assert harness.messages(side.handle(empty), m.DirectoryRequest)
    assert harness.finished(side.handle(empty)) == harness.failed(RemoteProtocolError)


def test_a_greeted_engine_is_logged_with_its_differences(side):
    (opened,) = harness.of(side.handle(harness.want(), harness.load_request()), "open_link")
    (met,) = harness.of(side.receive(opened.link, harness.directory()), "log_peer_met")
    same = "tp 1, pp 1, block size 1; blocks are copied as they are"
    assert (met.engine_id, met.summary) == ("p", same)


@pytest.mark.parametrize("kind", [m.HelloReply, m.HeartbeatReply])
def test_a_directory_service_that_answers_like_a_worker_fails_the_load(side, kind):
    (opened,) = harness.of(side.handle(harness.want(), harness.load_request()), "open_link")
    answer = kind(incarnation="one") if kind is m.HelloReply else kind(number=1)
    calls = side.receive(opened.link, answer)
    assert harness.finished(calls) == harness.failed(RemoteProtocolError)
    assert not harness.of(calls, "note_contained")


def test_a_worker_that_sends_a_directory_is_disconnected(side):
    (link,) = harness.connect(side)
    assert harness.call("close_link", link) in side.receive(link, harness.directory())


def test_a_wrong_address_does_not_affect_a_right_one(side):
    _, (read,) = harness.start_load(side)
    elsewhere = EngineAddress(EngineId("p"), "tcp://127.0.0.1:9")
    (opened,) = harness.of(
        side.handle(harness.want("v", elsewhere), harness.load_request("v")), "open_link"
    )
    lost = side.handle(ev.LinkLost(opened.link, PeerUnreachableError("no answer")))
    assert harness.finished(lost) == [("v", PeerUnreachableError)]
    assert harness.finished(side.handle(ev.ReceiveFinished(read))) == harness.OK


@pytest.mark.parametrize("is_duplicate", [True, False])
def test_only_a_reply_to_the_last_heartbeat_renews_the_timeout(side, is_duplicate):
    """A duplicate must not count as the reply to a later heartbeat, which the producer never got."""
    (link,) = harness.connect(side)
    number = 0
    if is_duplicate:
        number = harness.messages(side.tick(), m.Heartbeat)[0].number
        side.handle(harness.heartbeat_reply(link, number))
        assert harness.messages(side.tick(harness.HEARTBEAT_S), m.Heartbeat)
    side.handle(harness.heartbeat_reply(link, number))
    assert harness.call("close_link", link) in side.tick(harness.PEER_S - side.now)
    assert side.handle(harness.heartbeat_reply(link, number)) == []


def test_a_new_request_shortens_the_reconnect_pause(side):
    opened = harness.of(side.handle(harness.want()), "open_link")
    for _ in range(7):
        while not opened:
            opened = harness.of(side.tick(1.0), "open_link")
        side.handle(ev.LinkLost(opened.pop().link, PeerLostError("gone")))
    assert not harness.of(side.tick(2.0), "open_link")
    side.handle(harness.want("v"))
    assert harness.of(side.tick(1.0), "open_link")


def test_a_load_that_was_asked_for_is_given_up_whatever_its_request_needs(side):
    """It is never reported as complete: its blocks are not filled."""
    _, (read,) = harness.start_load(side)
    side.handle(DropRequest("w", needs_none=True))
    calls = side.handle(ev.ReceiveStopped(read))
    assert harness.finished(calls) == harness.failed(TransferAbortedError)
    assert harness.messages(calls, m.Abort)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_request_that_needs_none_of_its_blocks_ends_as_if_it_had_read_them(side, is_connected):
    """The producer's engine has not failed: its server answers."""
    links = harness.connect(side) if is_connected else ()
    (link,) = links or [opened.link for opened in harness.resolve(side)]
    calls = side.handle(DropRequest("w", needs_none=True))
    if not is_connected:
        side.receive(link, m.HelloReply(incarnation="one"))
        calls = side.handle(ev.WarmedUp(link))
    (done,) = harness.messages(calls, m.Done)
    assert done.transfer_id == harness.KEY.transfer_id
    assert not harness.messages(calls, m.Abort)
    assert not harness.of(calls, "finish_load")


def test_a_request_dropped_while_connecting_is_aborted_later(side):
    (link,) = [opened.link for opened in harness.resolve(side)]
    assert not harness.messages(side.handle(DropRequest("w")), m.Abort)
    side.receive(link, m.HelloReply(incarnation="one"))
    (abort,) = harness.messages(side.handle(ev.WarmedUp(link)), m.Abort)
    assert (abort.transfer_id, abort.secret) == (harness.KEY.transfer_id, harness.KEY.secret)
    assert side.num_loads == 0


def strange(number):
    return EngineAddress(EngineId("p"), f"tcp://192.0.2.1:{number + 1}")


@pytest.mark.parametrize(
    "refusal, error",
    [
        (m.Refusal.INCOMPATIBLE, IncompatiblePeerError),
        (m.Refusal.NOT_GREETED, RemoteProtocolError),
    ],
)
def test_a_load_fails_with_the_reason_of_a_refused_look_up(side, refusal, error):
    (opened,) = harness.of(side.handle(harness.want(), harness.load_request()), "open_link")
    refused = m.DirectoryRefused(refusal=refusal, text="another engine is here")
    (ended,) = harness.of(side.receive(opened.link, refused), "finish_load")
    assert type(ended.error) is error
    assert "another engine is here" in str(ended.error)


def wanted_of(number):
    key = m.TransferKey(transfer_id=f"t{number}", secret=harness.SECRET)
    return harness.want(f"w{number}", address=strange(number), key=key)


def test_requests_cannot_have_any_number_of_unknown_engines_greeted_at_once():
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=3))
    opened = [harness.of(side.handle(wanted_of(number)), "open_link") for number in range(300)]
    assert [len(links) for links in opened] == [1] * 3 + [0] * 297
    # one answers, one is lost: the next two have their turn, in the order in which they were named
    calls = side.receive(opened[0][0].link, harness.directory())
    for worker in harness.of(calls, "open_link"):
        side.handle(*harness.accepted(worker.link))
    side.handle(ev.LinkLost(opened[1][0].link, PeerLostError("gone")))
    next_opened = harness.of(side.settle(), "open_link")
    assert [each.address for each in next_opened] == [strange(3).address, strange(4).address]


def test_an_engine_that_never_has_its_turn_is_unreachable_after_its_time():
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    side.handle(wanted_of(0))
    side.handle(wanted_of(1), harness.load_request("w1"))
    side.now = FIRST_GREETING_FACTOR * harness.HELLO_S - 1.0
    assert harness.finished(side.settle()) == []
    side.now += 1.0
    ((request_id, error),) = harness.finished(side.settle())
    assert request_id == "w1"
    assert error in (PeerUnreachableError, TransferTimeoutError)


def test_an_engine_that_nobody_wants_any_more_has_no_turn():
    """Its only load has failed before the engine was greeted, and the engine of the request has not asked for it."""
    peer = harness.PeerConfig(max_unknown_engines=1, progress_timeout_s=5.0)
    side = harness.consumer(peer=peer)
    (first,) = harness.of(side.handle(wanted_of(0)), "open_link")
    side.handle(replace(wanted_of(1), is_followed=True))
    side.now = 5.0
    assert [each.request_id for each in harness.of(side.settle(), "producer_started")] == ["w1"]
    side.handle(ev.LinkLost(first.link, PeerLostError("gone")))
    assert not harness.of(side.settle(), "open_link")


def test_requests_that_keep_coming_do_not_prolong_the_greeting_of_an_engine():
    """Otherwise an address where nobody answers keeps its place, and other unknown engines never have their turn."""
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    side.handle(wanted_of(0))
    side.now = harness.PEER_S + 1.0
    again = side.handle(harness.want("again", address=strange(0)))
    assert [each.address for each in harness.of(again, "open_link")] == [strange(0).address]
    side.handle(wanted_of(1))
    side.now = FIRST_GREETING_FACTOR * harness.HELLO_S
    opened = harness.of(side.settle(), "open_link")
    assert [each.address for each in opened] == [strange(1).address]


def test_engines_that_were_met_do_not_wait_for_unknown_ones():
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    (link,) = harness.connect(side)
    side.handle(ev.LinkLost(link, PeerLostError("gone")))
    side.handle(wanted_of(5))
    side.handle(harness.want("v"))
    again = harness.of(side.tick(1.0), "open_link")
    assert [each.address for each in again] == [harness.ADDRESS.address]


def answers(side, opened):
    """Let the engine whose directory was connected to be ready. Returns the calls."""
    (worker,) = harness.of(side.receive(opened.link, harness.directory()), "open_link")
    return side.handle(*harness.accepted(worker.link))


def test_a_request_that_ends_while_its_engine_is_queued_is_aborted_once_that_is_greeted():
    """Otherwise the producer would hold its blocks until the lease ends."""
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    first = harness.of(side.handle(wanted_of(0)), "open_link")
    key = m.TransferKey(transfer_id="u", secret=harness.SECRET)
    side.handle(harness.want(), harness.want("v", key=key))
    assert not harness.of(side.handle(DropRequest("v")), "open_link")
    side.handle(ev.LinkLost(first[0].link, PeerLostError("gone")))
    (opened,) = harness.of(side.settle(), "open_link")
    assert opened.address == harness.ADDRESS.address
    aborts = harness.messages(answers(side, opened), m.Abort)
    assert [abort.transfer_id for abort in aborts] == ["u"]


def test_a_queued_engine_that_no_request_wants_any_more_is_told_so_after_all_others_are_greeted():
    """It holds blocks for the request until it hears that, or its lease ends."""
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    (opened,) = harness.of(side.handle(wanted_of(0)), "open_link")
    for number in (1, 2, 3):
        side.handle(wanted_of(number))
    side.handle(DropRequest("w1"), DropRequest("w2"))
    key = m.TransferKey(transfer_id="t4", secret=harness.SECRET)
    side.handle(harness.want("w4", address=strange(2), key=key))  # wanted again
    order = []
    while opened is not None:
        aborted = [each.transfer_id for each in harness.messages(answers(side, opened), m.Abort)]
        order.append((opened.address, aborted))
        opened = next(iter(harness.of(side.settle(), "open_link")), None)
    addresses = [strange(number).address for number in range(4)]
    assert order == [
        (addresses[0], []),
        (addresses[3], []),
        (addresses[2], ["t2"]),
        (addresses[1], ["t1"]),
    ]


def test_a_queued_engine_that_is_to_be_told_of_an_ending_has_as_much_time_as_others():
    side = harness.consumer(peer=harness.PeerConfig(max_unknown_engines=1))
    (opened,) = harness.of(side.handle(wanted_of(0)), "open_link")
    side.handle(wanted_of(1), wanted_of(2), DropRequest("w1"))
    side.now = FIRST_GREETING_FACTOR * harness.HELLO_S - 1.0
    side.handle(ev.LinkLost(opened.link, PeerLostError("gone")))
    assert [each.address for each in harness.of(side.settle(), "open_link")] == [strange(2).address]
    for _ in range(5):
        side.tick(1.0)
    assert strange(1) not in side.session._engines._engines
