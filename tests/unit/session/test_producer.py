import hashlib

import pytest

from kvconnector.errors import LocalError, PeerLostError, TransportError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.session.lease import LEASE_KEY_BYTES, lease_key
from kvconnector.session.orders import HoldRequest, WithdrawRequest
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal
from tests.support.fakes import attention_model
from tests.unit.session import harness as h


@pytest.fixture
def side():
    return h.producer()


def _reading():
    """A producer whose lease is read through one link."""
    side = h.producer()
    side.tell(h.granted())
    h.welcome(side)
    started = side.tell(ev.FromPeer(-1, h.read()))
    assert [command.read.read_id for command in h.of(started, cmd.StartSend)] == [1]
    return side


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
        commands = side.tell(h.given_up() if ending == "consumer" else WithdrawRequest("r"))
    assert h.of(commands, cmd.StopSend) == [cmd.StopSend(-1, 1)]
    assert h.released(commands) == []
    refused = h.messages(side.tell(ev.FromPeer(-1, h.read(2))), m.ReadRefused)
    expected = Refusal.LEASE_EXPIRED if ending == "time" else Refusal.ABORTED
    assert [reply.refusal for reply in refused] == [expected]
    side.tell(h.heartbeat(), h.done(), h.given_up(), WithdrawRequest("r"))  # all too late
    stopped = side.tell(ev.SendStopped(-1, 1, 1))
    assert h.released(stopped) == [("r", "expired" if ending == "time" else "aborted")]
    assert [reply.sent_chunks for reply in h.messages(stopped, m.ReadEnded)] == [1]
    late = h.messages(side.tell(ev.FromPeer(-1, h.read(3))), m.ReadRefused)
    assert [reply.refusal for reply in late] == [expected]


@pytest.mark.parametrize("secret", [h.OTHER_SECRET, "\u00e9" * 32])
def test_without_the_secret_nothing_can_be_read_renewed_confirmed_or_aborted(side, secret):
    side.tell(h.granted())
    h.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=secret)
    (refused,) = h.messages(side.tell(ev.FromPeer(-1, h.read(key=key))), m.ReadRefused)
    assert refused.refusal is Refusal.UNKNOWN_TRANSFER
    side.now = 20.0
    side.tell(h.heartbeat(-1, key), h.done(key=key), h.given_up(key=key))
    assert side.num_leases == 1
    assert h.released(side.tick(10.0)) == [("r", "expired")]


def test_a_new_request_under_an_old_name_may_be_read_early_as_well(side):
    side.tell(h.granted(), WithdrawRequest("r"))
    h.welcome(side)
    key = m.TransferKey(transfer_id="t", secret=h.OTHER_SECRET)
    assert side.tell(ev.FromPeer(-1, h.read(key=key))) == []
    assert h.of(side.tell(h.granted(secret=h.OTHER_SECRET)), cmd.StartSend)


def test_reads_of_strangers_and_of_a_former_start_are_refused(side):
    side.tell(h.granted())
    (stranger,) = h.messages(side.tell(ev.FromPeer(-1, h.read())), m.ReadRefused)
    h.welcome(side)
    stale = side.tell(ev.FromPeer(-1, h.read(incarnation="zero")))
    assert stranger.refusal is Refusal.NOT_GREETED
    assert [r.refusal for r in h.messages(stale, m.ReadRefused)] == [Refusal.STALE_INCARNATION]


def test_a_cancelled_read_ends_and_the_lease_stays_for_as_long_as_it_is_renewed():
    side = _reading()
    assert side.tell(h.cancel(-1, 1)) == [cmd.StopSend(-1, 1)]
    side.tell(ev.SendStopped(-1, 1, 1))
    assert side.tell(h.cancel(-1, 1)) == []
    side.now = 29.0
    side.tell(h.heartbeat())
    assert h.released(side.tick(29.0)) == []
    assert h.released(side.tick(2.0)) == [("r", "expired")]


def test_a_failing_data_plane_is_told_to_the_consumer():
    side = _reading()
    ended = h.messages(side.tell(ev.SendStopped(-1, 1, 1, TransportError("broken"))), m.ReadEnded)
    assert [(reply.refusal, reply.text) for reply in ended] == [(Refusal.INTERNAL, "broken")]


def test_only_who_has_greeted_is_sent_something_to_measure_by(side):
    probe = m.Probe(first_tag=7, nbytes=100, count=3)
    assert side.tell(ev.FromPeer(-1, probe)) == []
    h.welcome(side)
    assert side.tell(ev.FromPeer(-1, probe)) == [cmd.SendProbe(-1, probe)]


def test_an_early_read_is_cancelled_lost_with_its_link_refused_in_time_or_served(side):
    for link in (-1, -2, -3):
        h.welcome(side, link)
        side.tell(ev.FromPeer(link, h.read(-link)))
    cancelled = h.messages(side.tell(h.cancel(-1, 1)), m.ReadEnded)
    assert [reply.sent_chunks for reply in cancelled] == [0]
    side.tell(ev.LinkLost(-2, PeerLostError("gone")))
    refused = h.messages(side.tick(h.EARLY_S), m.ReadRefused)
    assert [(reply.read_id, reply.refusal) for reply in refused] == [(3, Refusal.UNKNOWN_TRANSFER)]
    side.tell(ev.FromPeer(-3, h.read(4)))
    sent = h.of(side.tell(h.granted()), cmd.StartSend)
    assert [command.read.read_id for command in sent] == [4]


@pytest.mark.parametrize("is_reading", [True, False])
@pytest.mark.parametrize("loss", ["link", "endpoint", "silence", "second hello"])
def test_a_consumer_that_is_lost_is_told_so_and_its_sends_stop(loss, is_reading):
    """Also in the middle of its greeting."""
    side = _reading() if is_reading else h.producer()
    if not is_reading:
        side.tell(ev.FromPeer(-1, h.hello(h.engine("d"))))
    error = PeerLostError("gone")
    commands = {
        "link": lambda: side.tell(ev.LinkLost(-1, error)),
        "endpoint": lambda: side.tell(ev.EndpointFailed(-1, error)),
        "silence": lambda: side.tick(h.PEER_S),
        "second hello": lambda: side.tell(ev.FromPeer(-1, h.hello(h.engine("e")))),
    }[loss]()
    assert h.of(commands, cmd.StopSend) == [cmd.StopSend(-1, 1)] * is_reading
    assert h.of(commands, cmd.CloseEndpoint) == [cmd.CloseEndpoint(-1)]
    assert len(h.messages(commands, m.Bye)) == 1
    assert commands[-1] == cmd.CloseLink(-1)
    refusals = [reply.refusal for reply in h.messages(commands, m.HelloReply)]
    assert refusals == [Refusal.INTERNAL] * (loss == "endpoint" and not is_reading)
    if is_reading:
        assert not h.messages(side.tell(ev.SendStopped(-1, 1, 0)), m.ReadEnded)
        assert side.num_leases == 1
    else:
        assert side.tell(ev.EndpointOpened(-1)) == []


@pytest.mark.parametrize(
    "geometry, tp_rank, text",
    [
        (h.engine("d", attention_model(total_heads=3)), 0, "kv_heads="),
        (h.engine("d"), 1, "rank is outside its engine"),
    ],
)
def test_a_consumer_that_does_not_fit_is_told_in_what(side, geometry, tp_rank, text):
    (reply,) = h.messages(side.tell(ev.FromPeer(-1, h.hello(geometry, tp_rank))), m.HelloReply)
    assert reply.refusal is Refusal.INCOMPATIBLE
    assert text in reply.text


def test_a_request_is_granted_once(side):
    side.tell(h.granted())
    for again in (h.granted(), h.granted("r", "u"), h.granted("s", "t")):
        with pytest.raises(LocalError, match="granted twice"):
            side.tell(again)
    assert side.num_leases == 1


ENDINGS = {"done": h.done, "abort": h.given_up}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_may_come_before_its_lease(side, ending):
    h.welcome(side)
    assert side.tell(ENDINGS[ending]()) == []
    (released,) = h.of(side.tell(h.granted()), cmd.ReleaseBlocks)
    assert released.outcome == {"done": "released", "abort": "aborted"}[ending]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_early_ending_needs_the_secret_and_is_forgotten_in_time(side, ending):
    h.welcome(side)
    wrong = m.TransferKey(transfer_id="t", secret=h.OTHER_SECRET)
    side.tell(ENDINGS[ending](key=wrong), ENDINGS[ending](link=-9))
    assert not h.of(side.tell(h.granted()), cmd.ReleaseBlocks)
    other = m.TransferKey(transfer_id="u", secret=h.SECRET)
    side.tell(ENDINGS[ending](key=other))
    assert side.tick(h.EARLY_S) == []
    assert not h.of(side.tell(h.granted("s", "u")), cmd.ReleaseBlocks)


def test_a_duplicate_ending_does_not_end_a_later_lease_of_the_name(side):
    h.welcome(side)
    side.tell(h.granted(), h.given_up(), h.given_up())
    assert not h.of(side.tell(h.granted(secret=h.OTHER_SECRET)), cmd.ReleaseBlocks)


def test_a_lease_may_last_longer_than_the_configured_one(side):
    side.tell(HoldRequest("r", "t", h.SECRET, h.BLOCKS, 12, lease_duration_s=4 * h.LEASE_S))
    h.welcome(side)
    side.tell(h.heartbeat())
    # the silent consumer is given up, its heartbeat did not shorten the lease
    assert not h.of(side.tick(2 * h.LEASE_S), cmd.ReleaseBlocks)
    assert h.of(side.tick(2 * h.LEASE_S), cmd.ReleaseBlocks)


def test_both_ends_make_the_same_bytes_whatever_their_version():
    key = lease_key("request-1", "s" * 32, [h.GroupBlocks.of([7, 1 << 30], 2)])
    told = hashlib.blake2b(digest_size=LEASE_KEY_BYTES)
    told.update((9).to_bytes(8, "little") + b"request-1")
    told.update((32).to_bytes(8, "little") + b"s" * 32)
    told.update((2).to_bytes(8, "little") + (2).to_bytes(8, "little"))
    told.update((7).to_bytes(4, "little") + (1 << 30).to_bytes(4, "little"))
    assert key == told.digest()
