"""Consumers that get the producer's pools over UCX and ZMQ; tcp stands in for hardware that reads memory."""

from __future__ import annotations

import pytest

from tests.integration.direct_reads import (
    Engines,
    check_read,
    check_read_of_another_process,
    check_sent,
)

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

ONE_SIDED = {"rma, ucx"}
NEVER = {"paths": {"direct": "never"}}


@pytest.fixture
def engines(opened):
    always = {"direct": "never", "one_sided": "always"}
    return Engines(opened, {"paths": always, "ucx": {"tls": "tcp"}})


@pytest.fixture
def reading_lanes(monkeypatch):
    """Take tcp's lanes, over which UCX asks the producer's thread, for such as read memory."""
    monkeypatch.setattr("kvconnector.datapath.pump.gets.reads_memory", lambda lanes, keys: True)


@pytest.mark.usefixtures("reading_lanes")
@pytest.mark.parametrize("case", ["alike", "narrower", "token stripes"])
def test_what_is_got_is_what_the_producer_holds(engines, case):
    check_read(engines, case, ONE_SIDED)


@pytest.mark.usefixtures("reading_lanes")
def test_a_producer_in_another_process_is_read(engines):
    check_read_of_another_process(engines, ONE_SIDED)


def test_over_lanes_that_cannot_read_memory_all_is_sent(engines, caplog):
    caplog.set_level("INFO", "kvconnector.runtime.executor")
    check_sent(*engines.pair())
    assert "UCX would only emulate reads" in caplog.text


@pytest.mark.usefixtures("reading_lanes")
@pytest.mark.parametrize("settings", [(NEVER, None), (None, NEVER)], ids=["producer", "consumer"])
def test_either_side_may_not_be_one_sided(engines, settings):
    check_sent(*engines.pair(*settings))
