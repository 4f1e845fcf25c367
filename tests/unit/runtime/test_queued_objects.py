"""The number of objects that a queued request keeps and that Python's garbage collector traverses."""

import gc

import pytest
from msgspec.structs import replace

from kvconnector.config import ConnectorConfig
from kvconnector.runtime import Scheduler
from tests.property.test_long_queues import LongQueue
from tests.support.fakes import metadata_of

MANY = 2000
CONFIG = ConnectorConfig.from_mapping(
    {"engine_id": "d", "role": "consumer", "control": {"insecure": True}}
)
STRANGERS = 0.1
"""Objects per request by which the rest of the process may grow or shrink meanwhile."""


@pytest.fixture
def queue():
    queue = LongQueue(over_ucx=True, num_requests=MANY)
    yield queue
    queue.world.close()


def num_tracked():
    gc.collect()
    return len(gc.get_objects())


def ask(queue, engine, orders):
    """Let an engine's worker handle orders, and its peer the messages that follow."""
    (worker,) = engine.workers
    worker.outbox.expect(orders)
    worker.driver.put(orders)
    queue.run(lambda: False, max_turns=100)
    assert worker.driver.num_queued == 0


def test_a_worker_has_three_objects_for_a_request_that_it_follows_and_one_for_its_lease(queue):
    wants = queue.wants()
    holds = [queue.hold(name) for name in queue.names]
    ask(queue, queue.d, wants[:1])
    ask(queue, queue.p, holds[:1])
    empty = num_tracked()
    ask(queue, queue.d, wants[1:])
    ask(queue, queue.p, holds[1:])
    assert queue.num_leases() == MANY
    assert num_tracked() - empty <= (3 + 1 + STRANGERS) * MANY


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_scheduler_has_no_object_for_a_request_that_is_streamed(role):
    asked = {"do_remote_decode": True, "transfer_secret": "5" * 32}
    if role == "consumer":
        place = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 5}
        asked = {"do_remote_prefill": True, "transfer_secret": "5" * 32, **place}
    with Scheduler(replace(CONFIG, role=role), metadata_of(role=role)) as scheduler:
        empty = num_tracked()
        for number in range(MANY):
            scheduler.on_new_request(f"r{number}", {**asked, "transfer_id": f"t{number}"})
        assert len(scheduler.build_step().orders) == MANY
        assert num_tracked() - empty <= STRANGERS * MANY
