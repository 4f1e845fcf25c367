from __future__ import annotations

import numpy as np
import pytest

from kvconnector.errors import LocalError, PeerLostError, TransportError
from kvconnector.planning import CHUNK_DTYPE
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.lease import lease_key
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import attention_model
from tests.unit.session import harness as h


def _reading():
    """A producer whose lease is read through one link."""
    side = h.producer()
    side.tell(h.granted())
    h.welcome(side)
    started = side.tell(ev.ReadAsked(-1, h.read()))
    assert [command.read.read_id for command in h.of(started, cmd.StartSend)] == [1]
    return side


def _released(commands):
    return [(c.request_id, c.outcome) for c in h.of(commands, cmd.ReleaseBlocks)]


def test_a_lease_is_published_until_just_before_its_blocks_are_released():
    side = h.producer(h.EXPORT)
    h.welcome(side)
    key = lease_key("t", h.SECRET, h.BLOCKS)
    assert side.tell(h.granted(num_tokens=12)) == [cmd.PublishLease(key, 12)]
    assert side.tell(h.done()) == [cmd.RetractLease(key), cmd.ReleaseBlocks("r", "released")]


def test_a_lease_that_ends_during_a_send_is_retracted_at_once():
    side = h.producer(h.EXPORT)
    side.tell(h.granted())
    h.welcome(side)
    side.tell(ev.ReadAsked(-1, h.read()))
    key = lease_key("t", h.SECRET, h.BLOCKS)
    assert side.tell(ev.Withdrawn("r")) == [cmd.RetractLease(key), cmd.StopSend(-1, 1)]
    assert side.tell(ev.SendStopped(-1, 1, 0))[-1] == cmd.ReleaseBlocks("r", "aborted")


def test_consumers_are_told_of_the_export_and_without_one_nothing_is_published():
    replies = [h.messages(h.welcome(h.producer(e)), m.HelloReply) for e in (h.EXPORT, None)]
    assert [reply.export for (reply,) in replies] == [h.EXPORT, None]
    assert h.producer().tell(h.granted()) == []


@pytest.mark.parametrize("ending", ["time", "consumer", "producer"])
def test_an_ending_lease_waits_for_the_pack_under_way(ending):
    side = _reading()
    if ending == "time":
        side.tell(h.heartbeat())  # keeps the consumer; its lease then runs out
        for _ in range(2):
            side.now += 14.0
            side.session.heard(-1, side.now)
        commands = side.tick(2.0)
    else:
        commands = side.tell(h.given_up() if ending == "consumer" else ev.Withdrawn("r"))
    assert h.of(commands, cmd.StopSend) == [cmd.StopSend(-1, 1)]
    assert _released(commands) == []
    refused = h.messages(side.tell(ev.ReadAsked(-1, h.read(2))), m.ReadRefused)
    expected = Refusal.LEASE_EXPIRED if ending == "time" else Refusal.ABORTED
    assert [reply.refusal for reply in refused] == [expected]
    side.tell(h.heartbeat(), h.done(), h.given_up(), ev.Withdrawn("r"))  # all too late
    stopped = side.tell(ev.SendStopped(-1, 1, 1))
    assert _released(stopped) == [("r", "expired" if ending == "time" else "aborted")]
    assert [reply.sent_chunks for reply in h.messages(stopped, m.ReadEnded)] == [1]
    late = h.messages(side.tell(ev.ReadAsked(-1, h.read(3))), m.ReadRefused)
    assert [reply.refusal for reply in late] == [expected]


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"blocks": ()}, "another number of cache groups"),
        (
            {"blocks": (m.ReadBlocks(first_block=0, block_ids=b"\1"),)},
            "block ids are not the leased",
        ),
        (
            {"blocks": (m.ReadBlocks(first_block=0, block_ids=np.int32([3, 1, 9]).tobytes()),)},
            "are not the leased ones",
        ),
        (
            {"blocks": (m.ReadBlocks(first_block=1, block_ids=np.int32([3, 1, 2]).tobytes()),)},
            "are not the leased ones",
        ),
        ({"segments": ()}, "needs segments"),
        ({"chunks": b"123"}, "not a multiple of a record's"),
        ({"chunks": np.array([(1, 0, 1, 0, 1)], CHUNK_DTYPE).tobytes()}, "segment index"),
        ({"chunks": np.array([(0, 0, 1, 11, 2)], CHUNK_DTYPE).tobytes()}, "outside the lease"),
        ({"chunks": np.array([(0, 0, 4, 0, 12)], CHUNK_DTYPE).tobytes()}, "larger than a staging"),
    ],
)
def test_a_read_beyond_its_lease_is_refused_and_costs_nothing(changes, text):
    side = h.producer()
    side.tell(h.granted())
    h.welcome(side)
    commands = side.tell(ev.ReadAsked(-1, h.read(**changes)))
    assert not h.of(commands, cmd.StartSend)
    (refused,) = h.messages(commands, m.ReadRefused)
    assert (refused.refusal, refused.read_id) == (Refusal.INVALID_READ, 1)
    assert text in refused.text
    assert h.of(side.tell(ev.ReadAsked(-1, h.read(2))), cmd.StartSend)


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("group", 1, "no such cache group"),
        ("family", 1, "no such part family"),
        ("head_stop", 3, "does not hold these heads"),
        ("head_start", 2, "does not hold these heads"),
        ("first_layer", 7, "does not hold these layers"),
        ("num_layers", 3, "does not hold these layers"),
        ("num_layers", 0, "does not hold these layers"),
    ],
)
def test_a_segment_that_this_rank_does_not_hold_is_refused(field, value, text):
    side = h.producer()
    side.tell(h.granted())
    h.welcome(side)
    segment = h.read().segments[0]
    fields = {name: getattr(segment, name) for name in segment.__struct_fields__}
    wrong = m.ReadSegment(**{**fields, field: value})
    (refused,) = h.messages(side.tell(ev.ReadAsked(-1, h.read(segments=(wrong,)))), m.ReadRefused)
    assert refused.refusal is Refusal.INVALID_READ
    assert text in refused.text


@pytest.mark.parametrize("secret", [h.OTHER_SECRET, "\u00e9" * 32])
def test_without_the_secret_nothing_can_be_read_renewed_confirmed_or_aborted(secret):
    side = h.producer()
    side.tell(h.granted())
    h.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=secret)
    (refused,) = h.messages(side.tell(ev.ReadAsked(-1, h.read(key=key))), m.ReadRefused)
    assert refused.refusal is Refusal.UNKNOWN_TRANSFER
    side.now = 20.0
    side.tell(h.heartbeat(-1, key), h.done(key=key), h.given_up(key=key))
    assert side.num_leases == 1
    assert _released(side.tick(10.0)) == [("r", "expired")]


def test_a_read_may_come_before_its_lease():
    side = h.producer()
    h.welcome(side)
    assert side.tell(ev.ReadAsked(-1, h.read())) == []
    assert h.of(side.tell(h.granted()), cmd.StartSend)


def test_an_early_read_is_cancelled_refused_in_time_or_lost_with_its_link():
    side = h.producer()
    for link in (-1, -2, -3):
        h.welcome(side, link)
        side.tell(ev.ReadAsked(link, h.read(-link)))
    cancelled = h.messages(side.tell(ev.ReadCancelled(-1, 1)), m.ReadEnded)
    assert [reply.sent_chunks for reply in cancelled] == [0]
    side.tell(ev.LinkLost(-2, PeerLostError("gone")))
    refused = h.messages(side.tick(h.EARLY_S), m.ReadRefused)
    assert [(reply.read_id, reply.refusal) for reply in refused] == [(3, Refusal.UNKNOWN_TRANSFER)]
    assert not h.of(side.tell(h.granted()), cmd.StartSend)


def test_a_new_request_under_an_old_name_may_be_read_early_as_well():
    side = h.producer()
    side.tell(h.granted(), ev.Withdrawn("r"))
    h.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=h.OTHER_SECRET)
    assert side.tell(ev.ReadAsked(-1, h.read(key=key))) == []
    assert h.of(side.tell(h.granted(secret=h.OTHER_SECRET)), cmd.StartSend)


def test_reads_of_strangers_and_of_a_former_start_are_refused():
    side = h.producer()
    side.tell(h.granted())
    (stranger,) = h.messages(side.tell(ev.ReadAsked(-1, h.read())), m.ReadRefused)
    h.welcome(side)
    stale = side.tell(ev.ReadAsked(-1, h.read(incarnation="zero")))
    assert stranger.refusal is Refusal.NOT_GREETED
    assert [r.refusal for r in h.messages(stale, m.ReadRefused)] == [Refusal.STALE_INCARNATION]


def test_a_duplicate_of_a_read_or_of_a_greeting_changes_nothing():
    side = _reading()
    assert side.tell(ev.ReadAsked(-1, h.read())) == []
    ready, half_greeted = (ev.Greeted(link, h.hello(h.engine("d"))) for link in (-1, -2))
    assert len(side.tell(ready, half_greeted, half_greeted)) == 1
    assert _released(side.tell(ev.SendFinished(-1, 1), h.done())) == [("r", "released")]


def test_a_request_is_granted_once_and_withdrawn_at_will():
    side = h.producer()
    side.tell(h.granted())
    with pytest.raises(LocalError, match="granted twice"):
        side.tell(h.granted())
    assert _released(side.tell(ev.Withdrawn("r"))) == [("r", "aborted")]
    assert side.tell(ev.Withdrawn("r")) == []


def test_a_cancelled_read_ends_and_the_lease_stays_for_as_long_as_it_is_renewed():
    side = _reading()
    assert side.tell(ev.ReadCancelled(-1, 1)) == [cmd.StopSend(-1, 1)]
    side.tell(ev.SendStopped(-1, 1, 1))
    assert side.tell(ev.ReadCancelled(-1, 1)) == []
    side.now = 29.0
    side.tell(h.heartbeat())
    assert _released(side.tick(29.0)) == []
    assert _released(side.tick(2.0)) == [("r", "expired")]


def test_a_failing_data_plane_is_told_to_the_consumer():
    side = _reading()
    ended = h.messages(side.tell(ev.SendStopped(-1, 1, 1, TransportError("broken"))), m.ReadEnded)
    assert [(reply.refusal, reply.text) for reply in ended] == [(Refusal.INTERNAL, "broken")]


@pytest.mark.parametrize("loss", ["link", "endpoint", "silence", "second hello"])
def test_a_lost_consumer_stops_its_sends_and_is_told_so(loss):
    side = _reading()
    if loss == "silence":
        commands = side.tick(h.PEER_S)
    else:
        error = PeerLostError("gone")
        event = {
            "link": ev.LinkLost(-1, error),
            "endpoint": ev.EndpointFailed(-1, error),
            "second hello": ev.Greeted(-1, h.hello(h.engine("e"))),
        }[loss]
        commands = side.tell(event)
    assert h.of(commands, cmd.StopSend) == [cmd.StopSend(-1, 1)]
    assert h.of(commands, cmd.CloseEndpoint) == [cmd.CloseEndpoint(-1)]
    assert len(h.messages(commands, m.Bye)) == 1
    assert commands[-1] == cmd.CloseLink(-1)
    assert not h.messages(side.tell(ev.SendStopped(-1, 1, 0)), m.ReadEnded)
    assert side.num_leases == 1


@pytest.mark.parametrize("loss", ["link", "endpoint", "silence", "second hello"])
def test_a_greeting_that_does_not_come_to_its_end(loss):
    side = h.producer()
    greeted = ev.Greeted(-1, h.hello(h.engine("d")))
    side.tell(greeted)
    error = PeerLostError("gone")
    commands = {
        "link": lambda: side.tell(ev.LinkLost(-1, error)),
        "endpoint": lambda: side.tell(ev.EndpointFailed(-1, error)),
        "silence": lambda: side.tick(h.PEER_S),
        "second hello": lambda: side.tell(ev.Greeted(-1, h.hello(h.engine("e")))),
    }[loss]()
    assert commands[-1] == cmd.CloseLink(-1)
    refusals = [reply.refusal for reply in h.messages(commands, m.HelloReply)]
    assert refusals == ([Refusal.INTERNAL] if loss == "endpoint" else [])
    assert side.tell(ev.EndpointOpened(-1)) == []


@pytest.mark.parametrize(
    "geometry, text",
    [
        (h.engine("d", attention_model(total_heads=3)), "kv_heads="),
        (h.engine("d", attention_model(item_size_bytes=4)), "item_size_bytes="),
        (h.engine("d", attention_model(num_layers=3)), "num_layers="),
    ],
)
def test_an_incompatible_consumer_is_told_in_what(geometry, text):
    side = h.producer()
    (reply,) = h.messages(side.tell(ev.Greeted(-1, h.hello(geometry))), m.HelloReply)
    assert reply.refusal is Refusal.INCOMPATIBLE
    assert text in reply.text


def test_only_who_has_greeted_is_sent_something_to_measure_by():
    side = h.producer()
    probe = m.Probe(first_tag=7, nbytes=100, count=3)
    assert side.tell(ev.Probed(-1, probe)) == []
    h.welcome(side)
    assert side.tell(ev.Probed(-1, probe)) == [cmd.SendProbe(-1, probe)]


def test_a_rank_outside_its_own_engine_is_refused():
    side = h.producer()
    (reply,) = h.messages(
        side.tell(ev.Greeted(-1, h.hello(h.engine("d"), tp_rank=1))), m.HelloReply
    )
    assert reply.refusal is Refusal.INCOMPATIBLE


def test_a_consumer_may_give_up_what_it_never_read():
    side = h.producer()
    side.tell(h.granted())
    assert side.tell(h.given_up()) == []  # it did not say hello
    h.welcome(side)
    assert _released(side.tell(h.given_up())) == [("r", "aborted")]
