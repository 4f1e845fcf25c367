"""A full producer takes back an offer for which no consumer has asked, and tells who comes later."""

import pytest

from kvconnector.errors import OfferReclaimedError
from kvconnector.session import events as ev
from kvconnector.session.orders import ReclaimRequest
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error
from tests.unit.session import harness


@pytest.fixture
def side():
    side = harness.producer()
    harness.welcome(side)
    return side


def test_an_unread_offer_ends_and_who_reads_it_late_is_told_so(side):
    side.handle(harness.hold())
    calls = side.handle(ReclaimRequest("r"))
    assert harness.released(calls) == [("r", "expired")]
    (ended,) = harness.of(calls, "release")
    assert isinstance(ended.error, OfferReclaimedError)
    (refusal,) = harness.refusals(side.receive(-1, harness.read(7)))
    assert refusal is m.Refusal.RECLAIMED
    assert isinstance(refusal_error(refusal, "no"), OfferReclaimedError)
    assert side.handle(ReclaimRequest("r"), ReclaimRequest("unknown")) == []


def test_an_offer_that_a_consumer_may_be_about_to_name_stays_as_long():
    """A consumer of this host may be reading it, of which the first that its producer hears is a heartbeat."""
    side = harness.producer(named_within_s=harness.HEARTBEAT_S)
    harness.welcome(side)
    begun = side.now
    for name in ("r", "s"):
        side.handle(harness.hold(name, name))
    side.now = begun + harness.HEARTBEAT_S - 1.0
    assert harness.released(side.handle(ReclaimRequest("r"), ReclaimRequest("s"))) == []
    read = m.TransferKey(transfer_id="r", secret=harness.SECRET)
    side.handle(harness.heartbeat(-1, read))
    side.now = begun + harness.HEARTBEAT_S
    calls = side.handle(ev.Tick())
    assert harness.released(calls) == [("s", "expired")]
    (ended,) = harness.of(calls, "release")
    assert isinstance(ended.error, OfferReclaimedError)
    side.handle(harness.done(-1, read))
    assert side.num_leases == 0


@pytest.mark.parametrize("interest", ["heartbeat", "read", "follow"])
def test_an_offer_that_a_consumer_has_asked_for_stays(side, interest):
    side.handle(harness.hold())
    if interest == "heartbeat":
        side.handle(harness.heartbeat(-1, harness.KEY))
    elif interest == "read":
        side.receive(-1, harness.read(7))
    else:
        side.handle(harness.follow())
    assert harness.released(side.handle(ReclaimRequest("r"))) == []
    assert side.num_leases == 1
