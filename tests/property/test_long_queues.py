"""Ten thousand requests in the queues of two engines: real drivers and sessions over in-memory links."""

from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from kvconnector.ids import EngineAddress, EngineId, new_secret
from kvconnector.layout import NO_TOKENS, GroupBlocks
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    StepMetadata,
    WantRequest,
)
from tests.support.fakes import FakeEngine, attention_model
from tests.support.world import Offer, World

MANY = 10_000
NUM_BLOCKS = 64
NUM_SERVED = 256
NO_BLOCKS = (GroupBlocks.of(()),)


class LongQueue:
    """Two engines, and requests of one block each in both of their queues."""

    def __init__(self, *, over_ucx, num_requests=MANY):
        shapes = [
            FakeEngine(name, attention_model(), num_blocks=(NUM_BLOCKS,)) for name in ("p", "d")
        ]
        self.world = World(settings={"control": {"insecure": True, "over_ucx": over_ucx}})
        self.p = self.world.start(shapes[0], role="producer")
        self.d = self.world.start(shapes[1], role="consumer")
        self.names = [f"r{number}" for number in range(num_requests)]
        self.secret = new_secret()
        self.started, self.loaded, self.failed, self.released = set(), set(), {}, set()

    def order(self, engine, orders):
        for worker in engine.workers:
            for some in batched(orders, 100):
                worker.start_step(StepMetadata(orders=some))

    def wants(self):
        address = EngineAddress(EngineId("p"), self.p.directory.address)
        return [WantRequest(n, n, self.secret, address, True) for n in self.names]

    def want(self):
        self.order(self.d, self.wants())

    def hold(self, name, block=None):
        """The producer's order for a queued request, or for a complete one in `block`."""
        names = name, name, self.secret
        if block is None:
            return GrowRequest(*names, NO_BLOCKS, NO_TOKENS)
        return HoldRequest(*names, (GroupBlocks.of((block,)),), 4)

    def run(self, until, **how):
        def is_over():
            for worker in (*self.p.workers, *self.d.workers):
                output = worker.poll()
                self.started |= output.producer_started
                self.loaded |= output.finished_recving - output.failed_recving.keys()
                self.failed |= output.failed_recving
                self.released |= output.finished_sending
            return until()

        return self.world.run(is_over, **how)

    def links(self):
        """The numbers of all links; a link that is opened again has a new number."""
        workers = self.p.workers + self.d.workers
        return [[link.number for link in worker.driver.links] for worker in workers]

    def num_leases(self):
        return sum(len(worker.driver.producer._leases) for worker in self.p.workers)


def batched(orders, length):
    """`itertools.batched` of Python 3.12."""
    rest = iter(orders)
    while some := tuple(islice(rest, length)):
        yield some


def _serve(queue, names):
    """Let the producer compute these requests, as many at a time as it has blocks, and the consumer load each one."""
    for first in range(0, len(names), NUM_BLOCKS):
        batch = names[first : first + NUM_BLOCKS]
        queue.order(queue.p, [queue.hold(name, block) for block, name in enumerate(batch)])
        assert queue.run(lambda batch=batch: queue.started >= {*batch}), (
            "prompts that the consumer does not notice"
        )
        for block, name in enumerate(batch):
            for worker in queue.d.workers:
                worker.caches.scribble(0, [block])
            queue.d.load(name, _offer(queue, name), [[block]], [range(4)])
        assert queue.run(lambda batch=batch: queue.released >= {*batch}), "blocks are not released"
        for ours, theirs in zip(queue.d.workers, queue.p.workers, strict=True):
            for key, array in ours.caches.arrays.items():
                count = len(batch)
                np.testing.assert_array_equal(array[:count], theirs.caches.arrays[key][:count])
    assert queue.loaded >= {*names}


def _offer(queue, name):
    return Offer("p", queue.p.directory.address, name, queue.secret, (), 4)


@pytest.mark.parametrize("over_ucx", [True, False])
def test_ten_thousand_queued_requests_keep_their_links_and_leases(over_ucx):
    queue = LongQueue(over_ucx=over_ucx)
    with closing(queue.world):
        queue.want()  # before the producer knows the requests
        queue.run(lambda: False, max_turns=40, seconds_per_turn=1.0)
        queue.order(queue.p, [queue.hold(name) for name in queue.names])
        queue.run(lambda: False, max_turns=60, seconds_per_turn=1.0)
        links = queue.links()
        assert queue.num_leases() == MANY
        _serve(queue, queue.names[:NUM_SERVED])
        queue.run(lambda: False, max_turns=60, seconds_per_turn=1.0)
        _serve(queue, queue.names[-NUM_SERVED:])
        assert not queue.failed
        rest = queue.names[NUM_SERVED:-NUM_SERVED]
        queue.order(queue.d, [DropRequest(name) for name in rest])
        assert queue.run(lambda: queue.num_leases() == 0), "aborts were lost"
        assert queue.links() == links


def test_requests_unknown_to_the_producer_are_refused():
    queue = LongQueue(over_ucx=True, num_requests=1000)
    with closing(queue.world):
        queue.want()
        assert not queue.run(lambda: queue.started, max_turns=110, seconds_per_turn=1.0)
        assert queue.run(lambda: len(queue.started) == 1000, max_turns=30, seconds_per_turn=1.0)
        for name in queue.names[:3]:
            queue.d.load(name, _offer(queue, name), [[0]], [range(4)])
        assert queue.run(lambda: len(queue.failed) == 3)
        assert all("no such transfer" in text for text in queue.failed.values())
        (driver,) = [worker.driver for worker in queue.p.workers]
        assert driver.links.refusals.counts["unknown_transfer"] == 1000
