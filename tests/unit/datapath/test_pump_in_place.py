"""Sending from the pools: no copy where there is one run, and no block given back while something may read it."""

import time

import pytest

from kvconnector.errors import PeerLostError, TransferTimeoutError
from kvconnector.session import events as ev
from kvconnector_kernels.pump import records as r
from tests.support.fakes import AheadClock
from tests.unit.datapath.caches import Shape
from tests.unit.datapath.pump_pair import DEADLINE_S, QUARANTINE_S, TO_D

pytestmark = pytest.mark.ucx

# 16 KiB a token and part, so that a chunk of all tokens is no message that UCX buffers
SHAPE = Shape(layers=4, heads=2, dim=1024, item=8, block=4, blocks=12, layout="NHD")
TOKENS = range(48)
CUT = {"order": "NHD", "chunk_tokens": 48, "chunk_rows": 1}
SLOT_BYTES = 1 << 20
IN_A_ROW = list(range(12))


@pytest.fixture
def clock():
    return AheadClock(0.0)


@pytest.fixture
def pair(make_pair, clock):
    return make_pair(SHAPE, slot_bytes=SLOT_BYTES, min_in_place_bytes=0, clock=clock)


def step_producer(side):
    side.path.pump(2e-4, ())
    return side.path.step()


def begin(pair):
    """A read whose chunks are posted, and which the consumer does not move on."""
    send = pair.p.program(IN_A_ROW, TOKENS, **CUT)
    pair.serve(pair.ask(1, pair.d.program(IN_A_ROW, TOKENS, **CUT)), send)
    for _ in range(3):
        pair.events += step_producer(pair.p)
    assert num_posted(pair.p) > 0
    return send


def num_posted(side):
    return int((side.path.machine.send_slots.rows["state"] == r.POSTED).sum())


def test_stopped_send_keeps_its_blocks_until_the_consumer_has_what_is_in_flight(pair):
    send = begin(pair)
    pair.p.path.stop_send(TO_D, 1)
    for _ in range(50):
        pair.events += step_producer(pair.p)
    assert pair.find(ev.SendStopped) is None
    pair.until(lambda: pair.find(ev.SendStopped) is not None)
    assert num_posted(pair.p) == 0
    stopped = pair.find(ev.SendStopped)
    assert stopped.error is None
    assert 0 < stopped.sent_chunks < len(send.chunks)
    pair.d.path.stop_receive(1)
    pair.d.path.drain_receive(1, stopped.sent_chunks)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)


def test_closed_endpoint_keeps_the_blocks_until_ucx_lets_go_or_the_quarantine_ends(pair, clock):
    begin(pair)
    pair.p.path.close_endpoint(TO_D)
    clock.now_s = QUARANTINE_S / 2
    for _ in range(50):
        pair.events += step_producer(pair.p)
    assert pair.find(ev.SendStopped) is None
    assert num_posted(pair.p) == 0  # the rows are free for others
    clock.now_s = QUARANTINE_S + 1
    deadline = time.monotonic() + DEADLINE_S
    while pair.find(ev.SendStopped) is None and time.monotonic() < deadline:
        pair.events += step_producer(pair.p)
    assert isinstance(pair.find(ev.SendStopped).error, PeerLostError)
    assert pair.find(ev.EndpointFailed) is None


def test_consumer_that_takes_nothing_is_given_up_before_its_blocks_are_given_back(pair, clock):
    begin(pair)
    pair.p.path.stop_send(TO_D, 1)
    seen = []
    deadline = time.monotonic() + DEADLINE_S
    while ev.SendStopped not in seen and time.monotonic() < deadline:
        clock.now_s += 1.0
        for event in step_producer(pair.p):
            seen.append(type(event))
            if isinstance(event, ev.EndpointFailed):
                assert isinstance(event.error, TransferTimeoutError)
                pair.p.path.close_endpoint(TO_D)
    assert seen == [ev.EndpointFailed, ev.SendStopped]
    assert clock.now_s >= 2 * QUARANTINE_S
