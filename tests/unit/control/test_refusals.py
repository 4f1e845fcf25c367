"""Refusals are counted, each peer's are logged once a minute, and many peers cost no memory."""

import logging

from kvconnector.control.refusals import LOG_INTERVAL_S, MAX_PEERS, Refusals

LOGGER = logging.getLogger("kvconnector.tests")


def test_a_peer_is_logged_once_a_minute_with_the_number_of_the_others(caplog):
    now = [0.0]
    refusals = Refusals(LOGGER, lambda: now[0])
    for _ in range(5):
        refusals.note("p", "forged", "MAC")
    refusals.note("q", "too long", "9 bytes")
    assert [record.getMessage() for record in caplog.records] == [
        "refused p: forged: MAC",
        "refused q: too long: 9 bytes",
    ]
    now[0] = LOG_INTERVAL_S
    refusals.note("p", "forged", "MAC")
    assert "4 times before" in caplog.records[-1].getMessage()
    assert refusals.counts == {"forged": 6, "too long": 1}


def test_peers_without_end_are_counted_and_remembered_together(caplog):
    refusals = Refusals(LOGGER, lambda: 0.0)
    for number in range(10 * MAX_PEERS):
        refusals.note(f"peer {number}", "forged", "MAC")
    assert refusals.counts["forged"] == 10 * MAX_PEERS
    assert len(caplog.records) == MAX_PEERS + 1
    assert len(refusals._unlogged) <= len(refusals._logged_at) == MAX_PEERS + 1
