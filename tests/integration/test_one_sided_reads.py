"""Consumers that get the producer's pools over UCX and ZMQ; tcp stands in for hardware that reads memory."""

from __future__ import annotations

import pytest

from kvconnector.testing.fakes import EngineShape
from tests.integration import runtime_pair as rp
from tests.integration.test_direct_reads import PATIENT, SHAPES, _published, _remote_dense

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

OVER_TCP = {
    "paths": {"direct": "never", "one_sided": "always"},
    "ucx": {"tls": "tcp"},
    **PATIENT,
}


@pytest.fixture
def opened():
    """Close what the test appends, the consumers first."""
    engines = []
    yield engines
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def reading_lanes(monkeypatch):
    """Take tcp's lanes, over which UCX asks the producer's thread, for such as read memory."""
    monkeypatch.setattr("kvconnector.datapath.pump.gets.reads_memory", lambda lanes, keys: True)


def _engine(opened, engine_id, role, *, seed=0, settings=OVER_TCP, block=16, **shape):
    shape = EngineShape(
        engine_id, rp.model(), block_sizes=(block,), num_blocks=(1024 // block,), **shape
    )
    opened.append(rp.Engine(shape, role, seed, **settings))
    return opened[-1]


@pytest.mark.usefixtures("reading_lanes")
@pytest.mark.parametrize("case", ["alike", "narrower", "token stripes"])
def test_what_is_got_is_what_the_producer_holds(opened, case):
    ours, theirs = SHAPES[case]
    p = _engine(opened, "p", "producer", seed=1, **ours)
    d = _engine(opened, "d", "consumer", seed=2, **theirs)
    source = list(range(200 // p.shape.block_sizes[0] + 1))[::-1]
    target = list(range(200 // d.shape.block_sizes[0] + 1))
    d.load("w", _published(p, d, source, 200), target, 201)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.failed == {}
    assert d.paths["w"] == {"rma, ucx"}
    assert rp.same(p.dense(source, 200), d.dense(target, 200))


@pytest.mark.usefixtures("reading_lanes")
def test_a_producer_in_another_process_is_read(opened):
    p = rp.RemoteEngine("p", "producer", seed=7, **OVER_TCP)
    opened.append(p)
    d = _engine(opened, "d", "consumer")
    d.load("w", _published(p, d, [9, 3, 4], 40), [7, 8, 1], 41)
    rp.until(lambda: "w" in d.received, d)
    assert d.failed == {}
    assert d.paths["w"] == {"rma, ucx"}
    assert rp.same(_remote_dense(7, [9, 3, 4], 40), d.dense([7, 8, 1], 40))
    rp.until(lambda: "r" in p.ask("step")[0])


def test_over_lanes_that_cannot_read_memory_all_is_sent(opened, caplog):
    caplog.set_level("INFO", "kvconnector.runtime.executor")
    p, d = _engine(opened, "p", "producer", seed=1), _engine(opened, "d", "consumer")
    d.load("w", p.offer("r", [1, 2], 30), [3, 4], 31)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.paths["w"] == {"packed, pumped"}
    assert rp.same(p.dense([1, 2], 30), d.dense([3, 4], 30))
    assert "UCX would only emulate reads" in caplog.text


def test_only_one_side_is_one_sided(opened):
    p = _engine(opened, "p", "producer", seed=1)
    d = _engine(opened, "d", "consumer", settings={**OVER_TCP, "paths": {"direct": "never"}})
    d.load("w", p.offer("r", [1, 2], 30), [3, 4], 31)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.paths["w"] == {"packed, pumped"}
    assert rp.same(p.dense([1, 2], 30), d.dense([3, 4], 30))
