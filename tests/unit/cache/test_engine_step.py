"""New and running requests of an engine's step, in the scheduler's order."""

from __future__ import annotations

from types import SimpleNamespace

from kvconnector.cache.engine_step import yield_req_data


def test_new_and_running_requests_are_yielded_in_order():
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", block_ids=([1, 2], [3]))],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["running", "resumed"],
            new_block_ids=[None, ([7], [8])],
            resumed_req_ids={"resumed"},
        ),
    )
    assert list(yield_req_data(step)) == [
        ("new", ([1, 2], [3]), False),
        ("running", None, False),
        ("resumed", ([7], [8]), True),
    ]
