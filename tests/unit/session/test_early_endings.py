from __future__ import annotations

import pytest

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
