"""Engines over real UCX and ZMQ, in this process or in processes of their own that tests may kill."""

from types import MappingProxyType

import msgspec
import numpy as np

from kvconnector.config import ConnectorConfig
from kvconnector.runtime import Scheduler, Worker
from kvconnector.session import KVOutputAggregator
from tests.support import waiting
from tests.support.fakes import (
    FakeEngine,
    attention_model,
    dense_of,
    equalise_replicas,
    make_caches,
)
from tests.support.remote import RemoteObject

PEER = {
    "hello_timeout_s": 30,
    "heartbeat_interval_s": 0.5,
    "timeout_s": 30,
    "backoff_initial_s": 0.1,
}
SETTINGS = {
    "control": {"insecure": True},
    "peer": PEER,
    "lease": {"early_read_s": 1},
    "staging": {"chunk_bytes": 256 << 10},
}
"""Settings with which no peer is given up and no lease ends, even on a busy machine, and no rank fills much memory."""


def shape_of(engine_id, *, head_dim=16, block=16, num_blocks=64, **changes):
    """Return the shape of an engine, of one rank unless `changes` say otherwise."""
    model = attention_model(num_layers=4, total_heads=4, head_dim=head_dim)
    return FakeEngine(engine_id, model, block_sizes=(block,), num_blocks=(num_blocks,), **changes)


class Engine:
    """Workers and scheduler halves of one engine in this process. `shape` is of `shape_of`, `place` of
    `GpuCaches.move`, `stated` are fields of its `ModelDescription`.
    """

    def __init__(
        self,
        engine_id,
        role,
        *,
        seed=0,
        shape=MappingProxyType({}),
        device="cpu",
        place=None,
        stated=MappingProxyType({}),
        **settings,
    ):
        self.shape = shape = shape_of(engine_id, **shape)
        merged = {**SETTINGS, **settings}
        self.config = ConnectorConfig.from_mapping({**merged, "engine_id": engine_id, "role": role})
        rng = np.random.default_rng(seed)
        self.caches = [make_caches(shape, rank, rng, device) for rank in shape.geometry().ranks]
        equalise_replicas(self.caches)
        for caches in self.caches if place is not None else ():
            caches.move(place)
        self.workers = []
        self.scheduler = None
        try:
            for caches in self.caches:
                rank = caches.rank.rank
                model = msgspec.structs.replace(shape.model.description(), **stated)
                worker = Worker(self.config, rank=rank, model=model)
                self.workers.append(worker)
                worker.register(caches.groups())
            metadata = [worker.handshake() for worker in self.workers]
            self.scheduler = Scheduler(self.config, metadata)
        except BaseException:
            self.close()
            raise
        self._aggregator = KVOutputAggregator(len(self.workers))
        self.sent, self.received = set(), set()
        self.failed, self.unsent, self.paths, self.extras = {}, {}, {}, {}
        self.traces = []

    def step(self):
        """Take one engine step: orders go to the workers, and their results to the scheduler."""
        step = self.scheduler.build_step()
        for worker in self.workers:
            worker.start_step(step)
        output = self._aggregator.aggregate([worker.poll() for worker in self.workers])
        self.scheduler.update(output)
        self.sent |= output.finished_sending
        self.received |= output.finished_recving
        self.failed.update(output.failed_recving)
        self.extras.update(output.extras)
        for transfer in output.stats.transfers:
            self.paths.setdefault(transfer.request_id, set()).update(transfer.path.split("+"))
        self.traces += output.stats.traces
        self.unsent.update(output.failed_sending)

    def offer(self, request_id, block_ids, num_tokens, **more):
        params = self.scheduler.offer(request_id, blocks=[block_ids], num_tokens=num_tokens, **more)
        self.step()
        return params

    def load(self, request_id, params, block_ids, num_prompt_tokens, *, steps=True):
        """Load all but the last prompt token."""
        self.scheduler.on_new_request(request_id, params)
        count, _ = self.scheduler.matched_tokens(request_id, num_prompt_tokens, 0)
        self.scheduler.load(request_id, blocks=[block_ids], num_tokens=count)
        if steps:
            self.step()

    def dense(self, block_ids, num_tokens):
        return dense_of(self.caches, [block_ids], num_tokens)

    def close(self):
        for worker in self.workers:
            worker.close()
        if self.scheduler is not None:
            self.scheduler.close()


def until(condition, *engines):
    """Step the engines until the condition holds."""

    def step():
        for engine in engines:
            engine.step()
            engine.workers[0].wait(0.002)

    waiting.until(condition, step)


def same(first, second):
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


def arrives(p, d, name, source, target, *, num_tokens=30):
    """Returns True if a request's tokens arrived in the other engine's blocks and the producer was notified."""
    d.load(name, p.offer(name, source, num_tokens), target, num_tokens + 1)
    until(lambda: name in d.received and name in p.sent, d, p)
    return name not in d.failed and same(p.dense(source, num_tokens), d.dense(target, num_tokens))


class RemoteEngine(RemoteObject):
    """An engine in a process of its own, with the methods of `Engine`."""

    def __init__(self, engine_id, role, **options):
        super().__init__("tests.integration.runtime_pair:Engine", engine_id, role, **options)

    def close(self):
        if self.child.poll() is None:
            self.call("close")
        self.release()
