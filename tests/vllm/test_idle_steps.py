from __future__ import annotations

import pytest

from tests.vllm import scheduler_world as w

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("is_async", [False, True])
def test_workers_wait_for_loads_only_where_nothing_is_computed(world, is_async):
    """Neither in the step nor in the one before it, if that may still run."""
    engine = world(is_async=is_async)
    idle = []
    engine.add(100, w.offer(100))
    for number in range(6):
        if number == 1:
            engine.add(50, max_tokens=2)
        planned = engine.scheduler.schedule()
        idle.append(planned.kv_connector_metadata.is_idle)
        engine.complete(planned)
    assert idle == [True, False, False, not is_async, True, True]
