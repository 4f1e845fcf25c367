"""Neither engine gives memory to a request for which the other one may have none left."""

import time
from collections import deque
from contextlib import closing

import pytest

from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import DEADLINE_S, Pair
from tests.sglang.pure.pools import Model

pytestmark = pytest.mark.ucx

PAGES, TOKENS = [1, 2, 3, 4, 5], 18
QUIET_S = 0.3
"""Long enough for a report that should not come."""


@pytest.fixture
def pair():
    with closing(Pair(Model(), decode={"tp_size": 2})) as made:
        yield made


def test_a_decode_engine_allocates_once_the_prefill_engine_has(pair):
    sent, wanted = pair.send(1), pair.want(1)
    until_s = time.monotonic() + QUIET_S
    while time.monotonic() < until_s:
        assert {each.poll() for each in wanted} == {Stage.BOOTSTRAPPING}
    pair.compute(sent, PAGES, 0, 16)
    pair.until_started(*wanted)
    assert {each.poll() for each in wanted} == {Stage.WAITING}


def test_requests_that_the_engines_take_in_other_orders_all_finish(pair):
    """Each engine has memory for one request. The prefill engine takes the last one first."""
    rooms = [11, 12, 13]
    sent = {room: pair.send(room) for room in rooms}
    wanted = {room: pair.want(room) for room in rooms}
    to_compute, to_load = deque(reversed(rooms)), deque(rooms)
    computed = loaded = None
    until_s = time.monotonic() + DEADLINE_S
    while to_compute or to_load or computed or loaded:
        assert time.monotonic() < until_s, (computed, loaded)
        if computed is None and to_compute:
            computed = to_compute.popleft()
            pair.compute(sent[computed], PAGES, 0, TOKENS, is_last=True)
        if loaded is None:
            loaded = next((room for room in to_load if _may_allocate(wanted[room])), None)
            if loaded is not None:
                to_load.remove(loaded)
                pair.load(wanted[loaded], PAGES, TOKENS)
        if computed and {each.poll() for each in sent[computed]} == {Stage.DONE}:
            computed = None
        if loaded and {each.poll() for each in wanted[loaded]} == {Stage.DONE}:
            pair.check(PAGES, TOKENS)
            loaded = None
        time.sleep(0.001)


def _may_allocate(wanted):
    return {each.poll() for each in wanted} == {Stage.WAITING}
