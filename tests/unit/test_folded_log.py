"""Refusals are counted and logged once a minute per peer, and the memory for peers is bounded."""

import logging

from kvconnector.folded_log import LOG_INTERVAL_S, MAX_KEYS, FoldedLog, Refusals

LOGGER = logging.getLogger("kvconnector.tests")


def test_a_peers_refusals_are_logged_once_a_minute(caplog):
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


def test_a_peers_text_is_one_line_of_the_log(caplog):
    """Otherwise it could forge lines of other peers."""
    Refusals(LOGGER, lambda: 0.0).note("p", "refused", "a\r\nWARNING forged\x1b[2J\u2028é")
    (record,) = caplog.records
    assert record.getMessage() == r"refused p: refused: a\r\nWARNING forged\x1b[2J\u2028é"


def test_peers_beyond_the_limit_share_one_key(caplog):
    refusals = Refusals(LOGGER, lambda: 0.0)
    for number in range(10 * MAX_KEYS):
        refusals.note(f"peer {number}", "forged", "MAC")
    assert refusals.counts["forged"] == 10 * MAX_KEYS
    assert len(caplog.records) == MAX_KEYS + 1
    assert f"{MAX_KEYS + 1} keys" in repr(refusals)


def test_each_minute_allows_a_burst(caplog):
    now = [0.0]
    folded = FoldedLog(LOGGER, lambda: now[0], burst=3)
    for number in range(10):
        folded.warn("cause", f"number {number}")
        now[0] += 5.0
    now[0] = LOG_INTERVAL_S
    folded.warn("cause", "the next minute")
    assert [record.getMessage() for record in caplog.records] == [
        "number 0",
        "number 1",
        "number 2",
        "the next minute (and 7 times before, since it was last logged)",
    ]


def test_the_last_flush_logs_the_suppressed_count(caplog):
    folded = FoldedLog(LOGGER, lambda: 0.0)
    for number in range(4):
        folded.warn("cause", f"number {number}")
    folded.warn("other cause", "once")
    folded.flush()
    folded.flush(is_last=True)
    folded.flush(is_last=True)
    assert [record.getMessage() for record in caplog.records] == [
        "number 0",
        "once",
        "cause: 3 more like these",
    ]
