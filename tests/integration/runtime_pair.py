"""Engines over real UCX and ZMQ, in this process or in one of their own that tests may kill."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np

from kvconnector.config import ConnectorConfig
from kvconnector.ids import Rank
from kvconnector.runtime import Scheduler, Worker
from kvconnector.session import KVOutputAggregator
from tests.support import forked
from tests.support.fakes import (
    FakeCaches,
    FakeEngine,
    FakeGroup,
    FakeModel,
    FakePart,
    dense_of,
    equalise_replicas,
)

DEADLINE_S = 40.0
QUICK = {
    "peer": {
        "hello_timeout_s": 8,
        "heartbeat_interval_s": 0.5,
        "timeout_s": 2,
        "backoff_initial_s": 0.1,
        "backoff_max_s": 0.5,
    },
    "lease": {"duration_s": 4, "early_read_s": 1},
}


def model(head_dim=16, **changes):
    parts = tuple(FakePart(name, 4, head_dim) for name in ("k", "v"))
    return FakeModel(4, (FakeGroup((0, 1, 2, 3), parts),), **changes)


class Engine:
    """Workers and scheduler halves of one engine in this process."""

    def __init__(self, shape, role="both", seed=0, **settings):
        self.shape = shape
        merged = {"control": {"insecure": True}, **QUICK, **settings}
        self.config = ConnectorConfig.from_mapping(
            {**merged, "engine_id": shape.engine_id, "role": role}
        )
        geometry = shape.geometry()
        rng = np.random.default_rng(seed)
        self.caches = [FakeCaches(shape, rank, rng) for rank in geometry.ranks]
        equalise_replicas(self.caches)
        self.workers = []
        self.scheduler = None
        try:
            for caches in self.caches:
                rank = Rank(caches.rank.pp_rank, caches.rank.tp_rank)
                worker = Worker(self.config, rank=rank, model=shape.model.description())
                self.workers.append(worker)
                worker.register(caches.groups())
            metadata = [worker.handshake() for worker in self.workers]
            self.scheduler = Scheduler(self.config, metadata)
        except BaseException:
            self.close()
            raise
        self._aggregator = KVOutputAggregator(len(self.workers))
        self.sent, self.received = set(), set()
        self.failed, self.unsent, self.paths = {}, {}, {}
        self.traces = []

    def step(self):
        """One engine step: news down, results up."""
        step = self.scheduler.build_step()
        for worker in self.workers:
            worker.start_step(step)
        output = self._aggregator.aggregate([worker.poll() for worker in self.workers])
        self.scheduler.update(output)
        self.sent |= output.finished_sending
        self.received |= output.finished_recving
        self.failed.update(output.failed_recving)
        for transfer in output.stats.transfers:
            self.paths.setdefault(transfer.request_id, set()).update(transfer.path.split("+"))
        self.traces += output.stats.traces
        self.unsent.update(output.failed_sending)

    def offer(self, request_id, block_ids, num_tokens):
        params = self.scheduler.offer(request_id, blocks=[block_ids], num_tokens=num_tokens)
        self.step()
        return params

    def load(self, request_id, params, block_ids, num_prompt_tokens):
        """Load all but the last prompt token; how many those are."""
        self.scheduler.on_new_request(request_id, params)
        count, _ = self.scheduler.matched_tokens(request_id, num_prompt_tokens, 0)
        self.scheduler.load(request_id, blocks=[block_ids], num_tokens=count)
        self.step()
        return count

    def dense(self, block_ids, num_tokens):
        return dense_of(self.caches, [block_ids], num_tokens)

    def close(self):
        for worker in self.workers:
            worker.close()
        if self.scheduler is not None:
            self.scheduler.close()


def until(condition, *engines):
    """Step the engines until the condition holds; fail after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        for engine in engines:
            engine.step()
            engine.workers[0].wait(0.002)


def same(first, second):
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


class RemoteEngine:
    """An engine in a process of its own; `ask` runs one of `_Commands` there."""

    def __init__(self, engine_id, role, *, head_dim=16, num_blocks=64, seed=0, **settings):
        arguments = json.dumps([engine_id, role, head_dim, num_blocks, seed, settings])
        self.process = forked.Process(
            [sys.executable, "-m", "tests.integration.runtime_pair", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._read()

    def ask(self, command, *arguments):
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        if not self.process.stdin.closed:
            self.process.stdin.close()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith(b"answer "):
                return json.loads(line.removeprefix(b"answer "))
        raise AssertionError("the engine's process ended")


def remote_shape(engine_id, head_dim, num_blocks):
    return FakeEngine(
        engine_id, model(head_dim), block_sizes=(16,), num_blocks=(num_blocks,), layout="HND"
    )


def _serve(arguments):
    engine_id, role, head_dim, num_blocks, seed, settings = arguments
    engine = Engine(remote_shape(engine_id, head_dim, num_blocks), role, seed, **settings)
    _answer("ready")
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "offer":
            _answer(engine.offer(*arguments))
        elif command == "load":
            _answer(engine.load(*arguments))
        else:
            engine.step()
            _answer([sorted(engine.sent), sorted(engine.received), engine.failed])
    engine.close()


def _answer(value):
    sys.stdout.write("answer " + json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
