"""Streams: prompts that are read while they are computed, at the producer and at the consumer."""

from functools import partial

import msgspec
import pytest
from msgspec.structs import replace

from kvconnector.errors import (
    LeaseExpiredError,
    OtherPromptError,
    PeerLostError,
    RemoteProtocolError,
    TransferAbortedError,
    TransferTimeoutError,
)
from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS, GroupBlocks, Watermark
from kvconnector.session import ConsumerSession, load, peers
from kvconnector.session import events as ev
from kvconnector.session.completion import Phase
from kvconnector.session.consumer import LOAD_TABLE
from kvconnector.session.engines import ENGINE_TABLE
from kvconnector.session.lease import lease_key
from kvconnector.session.link import FromPeer
from kvconnector.session.load import RemoteEngine
from kvconnector.session.orders import GrowRequest, HoldRequest, LoadRequest, WithdrawRequest
from kvconnector.session.peers import EVENT_BYTES
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import FakeGroup, FakeModel, FakePart
from tests.unit.session import harness

IDS = (3, 1, 2)
KEY_OF_FOLLOWERS = lease_key("t", harness.SECRET, ())


def _granted(num_tokens, *, is_complete=False, ids=IDS):
    blocks = (harness.GroupBlocks.of(ids[: -(-num_tokens // 4)]),)
    if is_complete:
        return HoldRequest("r", "t", harness.SECRET, blocks, num_tokens)
    return GrowRequest("r", "t", harness.SECRET, blocks, Watermark(num_tokens))


def _filling(export=None):
    """Make a producer that computes a prompt, with one follower."""
    side = harness.producer(export)
    harness.welcome(side)
    side.handle(_granted(0), harness.follow())
    return side


def _progress(calls):
    return [
        (report.watermark.num_tokens, report.is_complete)
        for report in harness.messages(calls, m.Progress)
    ]


def test_followers_get_progress_after_every_step():
    side = harness.producer()
    harness.welcome(side)
    harness.welcome(side, -2)
    assert _progress(side.handle(harness.follow())) == []
    assert _progress(side.handle(_granted(0))) == [(0, False)]
    assert _progress(side.handle(_granted(5))) == [(5, False)]
    assert _progress(side.handle(harness.follow(-2))) == [(5, False)]
    (first, _) = harness.messages(side.handle(_granted(12, is_complete=True)), m.Progress)
    assert (first.watermark.num_tokens, first.is_complete) == (12, True)
    assert first.blocks == harness.read().blocks
    assert _progress(side.handle(harness.heartbeat())) == []  # nothing is reported twice


def test_followers_that_cannot_be_told_of_a_prompts_end_lose_their_link():
    """They would wait for it as long as for a prompt."""

    def fail(lease):
        raise RuntimeError("nobody is told")

    side = _filling()
    harness.welcome(side, -2)
    side.session._notify_followers = fail
    calls = side.handle(WithdrawRequest("r"))
    assert [each.link for each in harness.of(calls, "close_link")] == [-1]
    subjects = [each.subject for each in harness.of(calls, "note_contained")]
    assert subjects == ["request r", "the followers of request r"]


def test_a_read_of_a_streamed_prompt_that_names_blocks_names_its_own():
    side = _filling()
    side.handle(_granted(12, is_complete=True))
    wrong = harness.read(1, blocks=(harness.GroupBlocks.of([3, 1, 9]),))
    assert harness.refusals(side.receive(-1, wrong)) == [Refusal.INVALID_READ]
    assert harness.of(side.receive(-1, harness.read(2)), "start_send")


def test_reads_are_expected_of_a_complete_leases_blocks():
    side = _filling()
    assert not harness.of(side.handle(_granted(8)), "expect_reads")
    (expected,) = harness.of(side.handle(_granted(12, is_complete=True)), "expect_reads")
    asked = FromPeer(-1, harness.read(1, tokens=range(12), blocks=()))
    (started,) = harness.of(side.handle(asked), "start_send")
    assert started.send.blocks is expected.blocks


def _ended(how):
    """Make a producer whose first transfer with these names has ended."""
    side = _filling(harness.EXPORT)
    side.handle(_granted(12, is_complete=True))
    ending = {"released": harness.done(), "aborted": harness.abort(), "expired": ev.Tick()}[how]
    if how == "expired":
        side.session.keep_alive(side.links[-1], harness.LEASE_S)
        side.now = harness.LEASE_S
    assert harness.released(side.handle(ending)) == [("r", how)]
    return side


@pytest.mark.parametrize("how", ["released", "aborted", "expired"])
def test_a_transfer_cannot_be_granted_again(how):
    """A late message about the first transfer would be taken for one about the second."""
    side = _ended(how)
    assert side.handle(_granted(0), _granted(8)) == []
    assert len(_refused(side.handle(harness.follow()))) == 1
    second = side.handle(_granted(12, is_complete=True))
    assert harness.released(second) == [("r", "aborted")]
    assert not harness.of(second, "publish")
    assert side.num_leases == 0


def test_late_messages_do_not_reach_the_next_transfer_of_a_name():
    side = _ended("released")
    side.handle(GrowRequest("r", "t", harness.OTHER_SECRET, harness.BLOCKS, Watermark(0)))
    late = side.handle(harness.abort(), harness.done(), harness.follow())
    assert [refusal for _, refusal, _ in _refused(late)] == [Refusal.UNKNOWN_TRANSFER]
    other = m.TransferKey(transfer_id="t", secret=harness.OTHER_SECRET)
    assert _progress(side.handle(harness.follow(-1, other))) == [(0, False)]


def test_the_report_on_a_prompt_has_as_many_phases_for_any_number_of_reads():
    """A long prompt is read in thousands of pieces, by each of its readers."""
    side = _filling()
    side.handle(_granted(8))
    for number in range(1, 101):
        side.now += 1.0
        asked = side.receive(-1, harness.read(number, tokens=range(8), blocks=()))
        (started,) = harness.of(asked, "start_send")
        side.now += 0.5
        packed = Phase("pack", side.now - 0.25, side.now)
        side.handle(ev.SendOver(started.send, phases=(packed,)))
    (ended,) = harness.of(side.handle(_granted(12, is_complete=True), harness.done()), "release")
    assert ended.trace.phases(150.0, 10.0) == (
        Phase("fill", 10.0, 160.0),
        Phase("hold", 160.0, 160.0),
        Phase("send", 11.0, 160.0),
        Phase("pack", 11.25, 160.0),
    )


def test_reads_above_the_watermark_are_refused():
    side = _filling()
    side.handle(_granted(8))
    assert harness.of(side.receive(-1, harness.read(1, tokens=range(8), blocks=())), "start_send")
    beyond = side.receive(-1, harness.read(2, tokens=range(9), blocks=()))
    assert harness.refusals(beyond) == [Refusal.INVALID_READ]


def test_a_leases_duration_starts_with_its_complete_prompt():
    side = _filling()
    side.session.keep_alive(side.links[-1], 1e6)
    side.tick(1e5)
    assert side.num_leases == 1
    side.handle(_granted(12, is_complete=True))
    assert harness.released(side.tick(harness.LEASE_S)) == [("r", "expired")]


def test_the_last_progress_carries_the_engines_extra_bytes():
    side = _filling()
    (grown,) = harness.messages(side.handle(_granted(8)), m.Progress)
    hold = msgspec.structs.replace(_granted(12, is_complete=True), extra=b"token")
    (last,) = harness.messages(side.handle(hold), m.Progress)
    (again,) = harness.messages(side.handle(harness.follow()), m.Progress)
    assert (grown.extra, last.extra, again) == (b"", b"token", last)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_load_ends_with_the_producers_extra_bytes(tp_size):
    side, links = _following(geometry=harness.engine(tp_size=tp_size))
    complete = [FromPeer(link, _report(12, is_complete=True, extra=b"token")) for link in links]
    started = harness.of(side.handle(*complete), "start_receive")
    ended = side.handle(*[ev.ReceiveFinished(each.read) for each in started])
    (finished,) = harness.of(ended, "finish_load")
    assert (finished.error, finished.load.extra) == (None, b"token")


@pytest.mark.parametrize("how", ["preempted", "elsewhere", "computed again"])
def test_blocks_taken_in_mid_prompt_abort_their_followers(how):
    side = _filling(harness.EXPORT)
    grown = _granted(8)
    again = msgspec.structs.replace(grown, watermark=Watermark(7))
    ends = {"preempted": WithdrawRequest("r"), "elsewhere": _granted(12, ids=(9, 1, 2))}
    side.handle(grown)
    calls = side.handle(ends.get(how, again))
    assert [each.refusal for each in harness.messages(calls, m.Progress)] == [Refusal.ABORTED]
    assert harness.of(calls, "retract") == [harness.call("retract", KEY_OF_FOLLOWERS)]
    assert not harness.of(calls, "release")  # the engine has the blocks already
    late = side.handle(harness.follow())
    assert [each.refusal for each in harness.messages(late, m.Progress)] == [Refusal.ABORTED]
    assert side.handle(_granted(12)) == []
    assert harness.released(side.handle(_granted(12, is_complete=True))) == [("r", "aborted")]


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_follower_that_needs_none_of_a_prompt_lets_it_be_released(is_granted):
    """It confirms before the prompt is complete, or even known here: the engine that computes it has not failed."""
    side = harness.producer()
    harness.welcome(side)
    if is_granted:
        side.handle(_granted(0), harness.follow(), harness.done())
    else:
        side.handle(harness.follow(), harness.done())
        for _ in range(20):  # a queued prompt waits for longer than a read that is early
            side.session.keep_alive(side.links[-1], side.now)
            side.tick(harness.EARLY_S / 10)
        side.handle(_granted(0))
    assert side.handle(_granted(8)) == []
    (ended,) = harness.of(side.handle(_granted(12, is_complete=True)), "release")
    assert (ended.outcome, ended.error) == ("released", None)


@pytest.mark.parametrize("tokens", [0, 8])
def test_another_engines_followers_are_told_that_a_prompt_was_released(tokens):
    """They would wait for it until it makes no progress for too long. The engine that has confirmed waits no more."""
    side = harness.producer()
    harness.welcome(side)
    harness.welcome(side, -2, geometry=harness.engine("e"))
    side.handle(_granted(tokens), harness.follow(), harness.follow(-2))
    ((link, text),) = [
        (call.link, call.message.text) for call in harness.of(side.handle(harness.done()), "send")
    ]
    assert (link, "draw names anew" in text) == (-2, True)


def _refused(calls):
    return [
        (report.transfer_id, report.refusal, report.text)
        for report in harness.messages(calls, m.Progress)
    ]


def test_a_wrong_secret_is_refused_like_an_unknown_transfer():
    side = _filling()
    wrong = m.TransferKey(transfer_id="t", secret=harness.OTHER_SECRET)
    unknown = m.TransferKey(transfer_id="u", secret=harness.SECRET)
    refused = _refused(side.handle(harness.follow(-1, wrong)))
    assert refused == [("t", Refusal.UNKNOWN_TRANSFER, "no such transfer")]
    assert _refused(side.handle(harness.follow(-1, unknown))) == []
    for _ in range(20):
        side.session.keep_alive(side.links[-1], side.now)
        refused += _refused(side.tick(harness.LEASE.early_follow_s / 20))
        refused += _refused(side.handle(harness.follow(-1, unknown)))  # does not restart the wait
    assert refused[1:] == [("u", Refusal.UNKNOWN_TRANSFER, "no such transfer")]


def test_followers_without_a_greeting_get_no_progress():
    side = _filling()
    assert harness.messages(side.handle(harness.follow(-9)), m.Progress) == []


def test_a_read_of_a_whole_prompt_waits_for_its_complete_lease():
    side = _filling()
    side.handle(_granted(5))
    assert side.receive(-1, harness.read()) == []
    grown = side.handle(_granted(8))
    assert [*harness.of(grown, "start_send"), *harness.messages(grown, m.ReadRefused)] == []
    complete = side.handle(_granted(12, is_complete=True))
    assert [started.send.read.read_id for started in harness.of(complete, "start_send")] == [1]


def test_followers_beyond_the_limit_are_refused(monkeypatch):
    num_kept = 100
    monkeypatch.setattr(peers, "MAX_EARLY_BYTES", num_kept * EVENT_BYTES)
    side = harness.producer()
    harness.welcome(side)
    for i in range(num_kept):
        key = m.TransferKey(transfer_id=f"t{i}", secret=harness.SECRET)
        assert side.handle(harness.follow(-1, key))[1:] == []
    one_more = m.TransferKey(transfer_id="u", secret=harness.SECRET)
    ((name, refusal, _),) = _refused(side.handle(harness.follow(-1, one_more)))
    assert (name, refusal) == ("u", Refusal.INTERNAL)
    assert _progress(
        side.handle(GrowRequest("r", "t0", harness.SECRET, harness.BLOCKS, Watermark(12)))
    )


def _report(num_tokens, *, is_complete=False, ids=IDS, **changes):
    blocks = (GroupBlocks(first_block=0, wire_ids=bytes(4 * len(ids[: -(-num_tokens // 4)]))),)
    fields = {"watermark": Watermark(num_tokens), "is_complete": is_complete, "blocks": blocks}
    return m.Progress(transfer_id="t", **{**fields, **changes})


def _following(tokens=(0, 12), geometry=None, **settings):
    """Make a consumer that loads a prompt while it is computed. Returns it and its links."""
    side = harness.consumer(**settings)
    links = harness.connect(side, geometry, is_followed=True)
    if tokens is not None:
        side.handle(harness.load_request(tokens=tokens))
    return side, links


def _started(calls):
    return [each.request_id for each in harness.of(calls, "producer_started")]


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize(
    "event, error",
    [
        (_report(4, refusal=Refusal.ABORTED), TransferAbortedError),
        (_report(4, refusal=Refusal.LEASE_EXPIRED), LeaseExpiredError),
        (_report(4, blocks=()), RemoteProtocolError),
        (PeerLostError("gone"), PeerLostError),
        (None, TransferTimeoutError),
    ],
)
def test_a_prompt_that_ends_early_fails_its_load(event, error, is_asked):
    """Without a load order the engine is asked for one, and the load then fails."""
    patient = harness.PeerConfig(progress_timeout_s=60.0)
    side, (link,) = _following((0, 12) if is_asked else None, peer=patient)
    if event is None:
        calls = []
        for _ in range(12):  # it answers heartbeats, and reports no progress
            side.handle(harness.heartbeat_reply(link))
            calls += side.tick(harness.HEARTBEAT_S)
    elif isinstance(event, m.Progress):
        calls = side.receive(link, event)
    else:
        calls = side.handle(ev.LinkLost(link, event))
    if not is_asked:
        assert _started(calls) == ["w"]
        calls = side.handle(harness.load_request())
    (ended,) = harness.of(calls, "finish_load")
    assert (type(ended.error), ended.load.filled_tokens) == (error, 0)
    assert side.num_loads == 0


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_load_without_new_bytes_times_out(tp_size):
    """Either the chunks or all messages of another producer rank are lost."""
    side, links = _following(geometry=harness.engine(tp_size=tp_size))
    complete = FromPeer(links[0], _report(12, is_complete=True))
    calls = side.handle(complete)
    for started in harness.of(calls, "start_receive"):
        side.handle(harness.posted(started.read))
    for _ in range(12):
        side.handle(*[harness.heartbeat_reply(link) for link in links], complete)
        calls += side.tick(harness.HEARTBEAT_S)
    for stopped in harness.of(calls, "stop_receive"):
        calls += side.handle(ev.ReceiveStopped(stopped.read))
    (ended,) = harness.of(calls, "finish_load")
    assert isinstance(ended.error, TransferTimeoutError)


def test_a_prompt_shorter_than_its_load_fails_it():
    side, (link,) = _following()
    (started,) = harness.of(side.receive(link, _report(8, is_complete=True)), "start_receive")
    (ended,) = harness.of(side.handle(ev.ReceiveFinished(started.read)), "finish_load")
    assert isinstance(ended.error, OtherPromptError)
    assert ended.load.filled_tokens == 8


def test_a_loss_after_the_last_token_keeps_all_tokens():
    """The producer has not reported yet that the prompt is complete."""
    side, (link,) = _following()
    (started,) = harness.of(side.receive(link, _report(12)), "start_receive")
    assert not harness.of(side.handle(ev.ReceiveFinished(started.read)), "finish_load")
    (ended,) = harness.of(side.handle(ev.LinkLost(link, PeerLostError("gone"))), "finish_load")
    assert (type(ended.error), ended.load.filled_tokens) == (PeerLostError, 12)


def test_rows_fill_the_tokens_that_they_stand_for():
    """Rows of four tokens beside rows of one, of a prompt of 14 tokens: the last two are in no row of four."""
    one = load.Load(
        LOAD_TABLE, harness.want(is_followed=True), RemoteEngine(ENGINE_TABLE, harness.ADDRESS), 0.0
    )
    one.engine.row_tokens = (4, 1)
    one.ask(LoadRequest("w", ((0, 3), (0, 14)), harness.BLOCKS, (), token_stop=14), 0.0)
    assert one.filled_tokens == 0
    for first, second, filled in ((2, 14, 8), (3, 9, 9), (3, 14, 14)):
        one.unread_tokens = range(first, 3), range(second, 14)
        one.note_filled()
        assert one.filled_tokens == filled
    one.engine.row_tokens, one.unread_tokens = (4,), (range(3, 3),)
    one.note_filled()
    assert one.filled_tokens == 14
    # a load whose order does not say where its tokens end
    one.ask(LoadRequest("w", ((3, 3),), harness.BLOCKS, ()), 0.0)
    assert one.filled_tokens == 12


@pytest.mark.parametrize(
    "watermark, left, rows, layers",
    [
        (Watermark(9), range(10), range(2), ALL_LAYERS),
        (Watermark(9), range(2, 10), range(2, 2), ALL_LAYERS),
        # the newest step's tokens, as far as its first layer has them
        (Watermark(12, 41, 1), range(3, 11), range(3, 10), range(1)),
        (Watermark(12, 15, 1), range(3, 11), range(3, 3), ALL_LAYERS),
    ],
)
def test_rows_are_read_once_all_of_their_tokens_are_there(watermark, left, rows, layers):
    one = load.Load(
        LOAD_TABLE, harness.want(is_followed=True), RemoteEngine(ENGINE_TABLE, harness.ADDRESS), 0.0
    )
    one.engine.row_tokens, one.unread_tokens = (4,), (left,)
    blocks = (GroupBlocks.of(IDS),)
    one.record_progress(1, m.Progress(transfer_id="t", watermark=watermark, blocks=blocks))
    piece = one._ready([1])
    assert piece.token_ranges == (rows,)
    assert not rows or piece.layers == layers


@pytest.mark.parametrize(
    "end, filled_tokens", [(_report(8, refusal=Refusal.ABORTED), 0), (PeerLostError("gone"), 8)]
)
def test_reads_of_a_withdrawn_prompt_do_not_count_as_filled(end, filled_tokens):
    """The producer's engine may have filled the blocks anew before its worker withdrew the lease."""
    side, (link,) = _following()
    (started,) = harness.of(side.receive(link, _report(8)), "start_receive")
    assert not harness.of(side.handle(ev.ReceiveFinished(started.read)), "finish_load")
    is_lost = isinstance(end, PeerLostError)
    calls = side.handle(ev.LinkLost(link, end)) if is_lost else side.receive(link, end)
    (ended,) = harness.of(calls, "finish_load")
    assert ended.load.filled_tokens == filled_tokens


def test_a_part_of_a_load_with_windows_does_not_count_as_filled():
    """A window's tokens are those that are needed at the load's end, and not before it."""
    side = harness.consumer()
    (link,) = harness.connect(side, is_followed=True)
    side.handle(replace(harness.load_request(), keeps_all=False))
    (started,) = harness.of(side.receive(link, _report(8)), "start_receive")
    side.handle(ev.ReceiveFinished(started.read))
    (ended,) = harness.of(side.handle(ev.LinkLost(link, PeerLostError("gone"))), "finish_load")
    assert ended.load.filled_tokens is None


def test_a_streamed_prompt_is_complete_without_a_group_that_its_producer_lacks():
    side = harness.consumer()
    (link,) = harness.connect(side, is_followed=True)
    both = 2 * harness.BLOCKS
    side.handle(LoadRequest("w", ((0, 12), (0, 12)), both, ()))
    (started,) = harness.of(side.receive(link, _report(12, is_complete=True)), "start_receive")
    assert harness.finished(side.handle(ev.ReceiveFinished(started.read))) == harness.OK


def _rank_without_layers():
    """Make a consumer rank that holds no layer of a model whose second stage has none, with a ready producer."""
    parts = (FakePart("k", 2, 4), FakePart("v", 2, 4))
    model = FakeModel(2, (FakeGroup((0,), parts),))
    ours = harness.engine("d", model, pp_size=2)
    settings = ours, Rank(1, 0), harness.PEER
    side = harness.Side(
        partial(ConsumerSession, *settings, chunk_bytes=harness.CHUNK_BYTES, element_orders={})
    )
    assert harness.resolve(side, harness.engine(model=model), is_followed=True) == []
    return side


def test_a_rank_without_layers_loads_a_streamed_prompt_at_once():
    side = _rank_without_layers()
    assert harness.finished(side.handle(harness.load_request())) == harness.OK
    assert side.num_loads == 0


def test_a_rank_without_layers_waits_as_long_as_its_engine():
    """No producer reports to it, so only the other ranks know how far the prompt is."""
    side = _rank_without_layers()
    for _ in range(3):
        assert _started(side.tick(harness.PEER.progress_timeout_s)) == []
    assert harness.finished(side.handle(harness.load_request())) == harness.OK


def test_an_abort_ends_what_is_kept_of_a_followed_transfer():
    side = harness.producer()
    harness.welcome(side)
    side.handle(harness.follow())
    side.tick(1.0)
    side.handle(harness.abort())
    for _ in range(9):
        side.handle(harness.heartbeat(-1))
        assert side.tick(1.0) == []
    assert harness.released(side.handle(_granted(12, is_complete=True))) == [("r", "aborted")]
    assert side.num_leases == 0


def test_a_second_reader_of_a_plain_offer_is_told_to_prefill_anew():
    side = harness.producer()
    harness.welcome(side)
    side.handle(harness.hold(), harness.done())
    (refused,) = harness.messages(side.receive(-1, harness.read()), m.ReadRefused)
    assert "prefill the request again" in refused.text
    side.handle(_granted(4), _granted(12, is_complete=True))
    named = m.TransferKey(transfer_id="u", secret=harness.SECRET)
    grown = GrowRequest("s", "u", harness.SECRET, harness.BLOCKS, Watermark(12))
    side.handle(grown, HoldRequest("s", "u", harness.SECRET, harness.BLOCKS, 12))
    side.handle(harness.done(key=named))
    ((_, _, text),) = _refused(side.handle(harness.follow(key=named)))
    assert "draw names anew" in text


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("ending", ["withdrawn", "given up"])
def test_the_reason_for_an_aborted_lease_is_reported(ending, is_read):
    side = harness.producer()
    harness.welcome(side)
    side.handle(harness.hold())
    calls = []
    if is_read:
        (started,) = harness.of(side.receive(-1, harness.read()), "start_send")
    words = "gave up the request"
    if ending == "withdrawn":
        words = "took the blocks back"
        calls += side.handle(WithdrawRequest("r"))
    else:
        calls += side.handle(harness.abort())
    if is_read:
        assert harness.released(calls) == []
        calls = side.handle(ev.SendOver(started.send, 0))
    (ended,) = harness.of(calls, "release")
    assert isinstance(ended.error, TransferAbortedError)
    assert words in str(ended.error)


def test_a_queued_prompt_waits_while_its_producer_answers():
    side, (link,) = _following(None)
    for _ in range(30):
        side.handle(harness.heartbeat_reply(link), FromPeer(link, _report(0)))
        assert _started(side.tick(harness.HEARTBEAT_S)) == []


def test_the_progress_timeout_starts_with_the_last_new_token():
    """A report without a new token does not extend the wait."""
    side, (link,) = _following(
        peer=harness.PeerConfig(transfer_timeout_s=3.0, progress_timeout_s=60.0)
    )
    calls = []
    for _ in range(11):
        side.handle(harness.heartbeat_reply(link))
        calls += side.tick(harness.HEARTBEAT_S)
    calls += side.receive(link, _report(0))
    for _ in range(11):
        side.handle(harness.heartbeat_reply(link), FromPeer(link, _report(0)))
        calls += side.tick(harness.HEARTBEAT_S)
    assert harness.of(calls, "finish_load") == []
    (ended,) = harness.of(
        side.handle(harness.heartbeat_reply(link)) + side.tick(harness.HEARTBEAT_S), "finish_load"
    )
    assert "computed no more of the prompt" in str(ended.error)
    assert "reported_tokens=[0]" in str(ended.error)


@pytest.mark.parametrize("stream", [True, False])
def test_a_started_prompt_is_reported_with_the_first_or_the_last_token(stream):
    side, (link,) = _following(None, stream=stream)
    assert _started(side.receive(link, _report(0))) == []
    reports = [_report(4), _report(12), _report(12, is_complete=True)]
    started = [_started(side.receive(link, report)) for report in reports]
    assert started == ([["w"], [], []] if stream else [[], [], ["w"]])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_are_read_once_a_piece_is_large_enough(tp_size, monkeypatch):
    def read_of_first_layer(least_bytes):
        monkeypatch.setattr(load, "MIN_PIECE_BYTES", least_bytes)
        side, links = _following(geometry=harness.engine(tp_size=tp_size))
        blocks = (GroupBlocks.of(IDS),)
        report = m.Progress(transfer_id="t", watermark=Watermark(0, 12, 1), blocks=blocks)
        calls = side.handle(*[FromPeer(link, report) for link in links])
        return sum(each.read.source.total_bytes for each in harness.of(calls, "start_receive"))

    nbytes = read_of_first_layer(1)
    assert nbytes > 0
    assert read_of_first_layer(nbytes // tp_size) == nbytes
    assert read_of_first_layer(nbytes // tp_size + 1) == 0


def test_finished_tokens_are_read_before_the_newest_layers(monkeypatch):
    monkeypatch.setattr(load, "MIN_PIECE_BYTES", 1)
    side, (link,) = _following()
    reported = side.receive(link, _report(12, watermark=Watermark(4, 12, 1)))
    sources = [each.read.source for each in harness.of(reported, "start_receive")]
    assert [(each.token_ranges, each.layer_stop) for each in sources] == [
        ((range(4),), harness.MODEL.num_layers),
        ((range(4, 12),), 1),
    ]


@pytest.mark.parametrize("layers", [1, None], ids=["layers", "tokens"])
def test_reads_stop_at_the_slowest_rank(layers, monkeypatch):
    monkeypatch.setattr(load, "MIN_PIECE_BYTES", 1)
    side, links = _following(geometry=harness.engine(tp_size=2))
    marks = [Watermark(0, stop, layers) if layers else Watermark(stop) for stop in (8, 12)]
    reports = [_report(12, watermark=mark) for mark in marks]
    calls = side.handle(*map(FromPeer, links, reports))
    read = [each.read.source.token_ranges for each in harness.of(calls, "start_receive")]
    assert read == [(range(8),)] * 2


def test_an_older_report_is_ignored():
    side, (link,) = _following(None)
    side.handle(*[FromPeer(link, _report(tokens)) for tokens in (8, 4)])
    (started,) = harness.of(side.handle(harness.load_request()), "start_receive")
    assert started.read.source.token_ranges == (range(8),)


def test_a_follow_is_repeated_until_every_worker_answers():
    side = harness.consumer()
    links = harness.connect(side, harness.engine(tp_size=2), is_followed=True)
    asked = harness.messages(side.tick(), m.Heartbeat)
    for link in links:
        assert [len(each.followed) for each in asked] == [1, 1]
        side.receive(link, _report(0))
        asked = harness.messages(side.tick(harness.HEARTBEAT_S), m.Heartbeat)
    assert [(len(each.followed), len(each.transfers)) for each in asked] == [(0, 1), (0, 1)]
