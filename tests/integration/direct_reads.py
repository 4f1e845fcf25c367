"""Engines whose consumers read the producer's pools themselves, and what every way to do so must do."""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np

from tests.integration import runtime_pair as rp
from tests.support.fakes import FakeCaches, FakeEngine, dense_of

# nothing here waits for a lease or a silent peer: neither may end because the machine is busy
PATIENT = {
    "lease": {"duration_s": 60, "early_read_s": 5},
    "peer": {"hello_timeout_s": 30, "timeout_s": 30, "backoff_initial_s": 0.1},
}
SHAPES = {
    "alike": ({}, {}),
    "layouts and block sizes": ({"layout": "HND"}, {"layout": "NHD", "block": 64}),
    "transposed keys": ({"layout": "K-transposed", "block": 32}, {"layout": "interleaved"}),
    "narrower": ({"tp_size": 4}, {"tp_size": 2, "pp_size": 2}),
    "token stripes": ({"tp_size": 4, "dcp_size": 2}, {"layout": "NHD"}),
    "wider": ({"pp_size": 2}, {"tp_size": 4, "layout": "NHD", "block": 8}),
}
PACKED = {"packed, pumped"}
NUMBERS = count()


class Engines:
    """Opens engines with these settings into `opened`, which closes them."""

    def __init__(self, opened, settings):
        self._opened, self.settings = opened, {**settings, **PATIENT}

    def here(self, engine_id, role, *, seed=0, block=16, settings=None, **shape):
        """An engine of this process, with settings of its own if it is told any."""
        shape = FakeEngine(
            engine_id, rp.model(), block_sizes=(block,), num_blocks=(1024 // block,), **shape
        )
        settings = {**self.settings, **(settings or {})}
        self._opened.append(rp.Engine(shape, role, seed, **settings))
        return self._opened[-1]

    def remote(self, engine_id, role, *, seed):
        """An engine in a process of its own."""
        self._opened.append(rp.RemoteEngine(engine_id, role, seed=seed, **self.settings))
        return self._opened[-1]

    def pair(self, ours=None, theirs=None):
        """A producer with data and a consumer, with these settings if they are told any."""
        return (
            self.here("p", "producer", seed=1, settings=ours),
            self.here("d", "consumer", settings=theirs),
        )


def published(p, d, block_ids=(1, 2), num_tokens=30):
    """An offer whose lease every producer rank has published, which it has once a later request is over."""
    name, is_here = f"later {next(NUMBERS)}", isinstance(p, rp.Engine)
    offer = p.offer if is_here else partial(p.ask, "offer")
    engines = (d, p) if is_here else (d,)
    params = offer("r", list(block_ids), num_tokens)
    d.load(name, offer(name, [0], 5), [0], 6)
    rp.until(lambda: name in (p.sent if is_here else p.ask("step")[0]), *engines)
    assert name not in d.failed
    return params


def remote_dense(seed, block_ids, num_tokens):
    """What a remote producer of this seed holds."""
    shape = rp.remote_shape("p", 16, 64)
    caches = FakeCaches(shape, shape.geometry().ranks[0], np.random.default_rng(seed))
    return dense_of([caches], [block_ids], num_tokens)


def check_read(engines, case, paths):
    """A read between engines of other shapes goes by these paths, and brings what the producer holds."""
    ours, theirs = SHAPES[case]
    p = engines.here("p", "producer", seed=1, **ours)
    d = engines.here("d", "consumer", seed=2, **theirs)
    source = list(range(200 // p.shape.block_sizes[0] + 1))[::-1]
    target = list(range(200 // d.shape.block_sizes[0] + 1))
    d.load("w", published(p, d, source, 200), target, 201)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.failed == {}
    assert d.paths["w"] == paths
    assert rp.same(p.dense(source, 200), d.dense(target, 200))


def check_read_of_another_process(engines, paths):
    """A read from another process goes by these paths, brings what that holds, and ends there."""
    p = engines.remote("p", "producer", seed=7)
    d = engines.here("d", "consumer")
    d.load("w", published(p, d, [9, 3, 4], 40), [7, 8, 1], 41)
    rp.until(lambda: "w" in d.received, d)
    assert d.failed == {}
    assert d.paths["w"] == paths
    assert rp.same(remote_dense(7, [9, 3, 4], 40), d.dense([7, 8, 1], 40))
    rp.until(lambda: "r" in p.ask("step")[0])


def check_sent(p, d):
    """A read that the engines' settings or lanes keep from the pools is sent."""
    d.load("w", p.offer("r", [1, 2], 30), [3, 4], 31)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert d.paths["w"] == PACKED
    assert rp.same(p.dense([1, 2], 30), d.dense([3, 4], 30))
