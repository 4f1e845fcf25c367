from __future__ import annotations

import pytest

from kvconnector.errors import BlockIdError, LocalError, PeerLostError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.wire import messages as m
from tests.unit.session import harness as h

ENDINGS = {"done": h.done, "abort": h.given_up}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_may_come_before_its_lease(ending):
    side = h.producer()
    h.welcome(side)
    assert side.tell(ENDINGS[ending]()) == []
    (released,) = h.of(side.tell(h.granted()), cmd.ReleaseBlocks)
    assert released.outcome == {"done": "released", "abort": "aborted"}[ending]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_early_ending_needs_the_secret_and_is_forgotten_in_time(ending):
    side = h.producer()
    h.welcome(side)
    wrong = m.TransferKey(transfer_id="t", secret=h.OTHER_SECRET)
    side.tell(ENDINGS[ending](key=wrong), ENDINGS[ending](link=-9))
    assert not h.of(side.tell(h.granted()), cmd.ReleaseBlocks)
    other = m.TransferKey(transfer_id="u", secret=h.SECRET)
    side.tell(ENDINGS[ending](key=other))
    assert side.tick(h.EARLY_S) == []
    assert not h.of(side.tell(h.granted("s", "u")), cmd.ReleaseBlocks)


def test_a_duplicate_ending_does_not_end_a_later_lease_of_the_name():
    side = h.producer()
    h.welcome(side)
    side.tell(h.granted(), h.given_up(), h.given_up())
    assert not h.of(side.tell(h.granted(secret=h.OTHER_SECRET)), cmd.ReleaseBlocks)


def test_all_ranks_may_confirm_early():
    geometry = h.engine("d", tp_size=2)
    side = h.producer()
    h.welcome(side, -1, geometry, 0)
    h.welcome(side, -2, geometry, 1)
    side.tell(h.done(-1), h.done(-2))
    assert h.of(side.tell(h.granted()), cmd.ReleaseBlocks)


def test_an_early_ending_is_lost_with_its_link():
    side = h.producer()
    h.welcome(side)
    side.tell(h.given_up(), ev.LinkLost(-1, PeerLostError("gone")))
    assert not h.of(side.tell(h.granted()), cmd.ReleaseBlocks)


def test_a_lease_may_last_longer_than_the_configured_one():
    side = h.producer()
    side.tell(ev.Granted("r", "t", h.SECRET, h.BLOCKS, 12, lease_duration_s=4 * h.LEASE_S))
    h.welcome(side)
    side.tell(h.heartbeat())
    # the silent consumer is given up, its heartbeat did not shorten the lease
    assert not h.of(side.tick(2 * h.LEASE_S), cmd.ReleaseBlocks)
    assert h.of(side.tick(2 * h.LEASE_S), cmd.ReleaseBlocks)


def test_a_consumer_that_drops_a_request_while_connecting_tells_the_producer_then():
    side = h.consumer()
    (link,) = [command.link for command in h.resolve(side)]
    assert not h.messages(side.tell(ev.LoadWithdrawn("w")), m.Abort)
    side.tell(ev.HelloAnswered(link, m.HelloReply(incarnation="one")))
    (abort,) = h.messages(side.tell(ev.WarmedUp(link)), m.Abort)
    assert (abort.transfer_id, abort.secret) == (h.KEY.transfer_id, h.KEY.secret)
    assert side.num_loads == 0


def test_a_dropped_request_of_an_engine_that_never_answers_is_forgotten():
    side = h.consumer()
    (link,) = [command.link for command in h.resolve(side)]
    side.tell(ev.LoadWithdrawn("w"), ev.LinkLost(link, PeerLostError("gone")))
    side.tick(h.EARLY_S)  # the pause is over, and nobody wants the engine
    (link,) = [command.link for command in h.resolve(side)]
    side.tell(ev.HelloAnswered(link, m.HelloReply(incarnation="one")))
    assert not h.messages(side.tell(ev.WarmedUp(link)), m.Abort)


@pytest.mark.parametrize("export", [None, h.EXPORT])
def test_a_lease_that_cannot_be_ends_at_once_and_readers_hear_so(export):
    """Also one who came before it, and had to wait."""
    side = h.producer(export)
    h.welcome(side)
    assert side.tell(ev.ReadAsked(-1, h.read(1))) == []
    refused = ev.Granted("r", "t", h.SECRET, (), 12, error=BlockIdError("too far"))
    commands = side.tell(refused)
    assert h.of(commands, cmd.ReleaseBlocks) == [cmd.ReleaseBlocks("r", "aborted")]
    assert not h.of(commands, cmd.PublishLease)
    commands += side.tell(ev.ReadAsked(-1, h.read(2)))
    refusals = h.messages(commands, m.ReadRefused)
    assert [(each.read_id, each.refusal) for each in refusals] == [
        (1, m.Refusal.ABORTED),
        (2, m.Refusal.ABORTED),
    ]
    assert side.num_leases == 0
    with pytest.raises(LocalError, match="granted twice"):
        side.tell(h.granted("s", "u"), ev.Granted("s", "v", h.SECRET, (), 1, error=LocalError("")))
    assert side.num_leases == 1
