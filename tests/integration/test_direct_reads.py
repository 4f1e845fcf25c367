"""Consumers that read the producer's pools themselves, over processes, UCX and ZMQ: right bytes or a clear error."""

import threading

import numpy as np
import pytest

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.driver_lock import DriverLock
from kvconnector.runtime import step_layers
from kvconnector.session import load
from tests.integration.runtime_pair import same, until
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

DIRECT = {"paths": {"direct": "always"}}


@pytest.mark.parametrize("direct, path", [("always", "direct"), ("never", "packed")])
def test_layers_of_a_step_arrive_before_the_others_are_computed(start, direct, path, monkeypatch):
    """Also, a producer may refuse direct reads."""
    for module in (step_layers, load):
        monkeypatch.setattr(module, "MIN_PIECE_BYTES", 1)
    p = start("p", "producer", seed=1, shape={"tp_size": 2}, paths={"direct": direct})
    d = start("d", "consumer", shape={"block": 64, "layout": "NHD"}, **DIRECT)
    source, target, num_tokens = list(range(13)), [3, 1, 2, 0], 200
    arrays = [(key[1], each) for caches in p.caches for key, each in caches.arrays.items()]
    computed = [array[source].copy() for _, array in arrays]
    expected = p.dense(source, num_tokens)
    for caches in p.caches:
        caches.scribble(0, source)
    names = {"transfer_id": "t", "transfer_secret": "5" * 32}
    offer = p.offer("other", [20], 5)
    address = {key: offer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    d.scheduler.on_new_request("w", {"do_remote_prefill": True, **address, **names})
    p.scheduler.on_new_request("r", {"do_remote_decode": True, **names})
    p.scheduler.grow("r", blocks=[source], num_tokens=0, ahead_tokens=num_tokens)
    p.step()
    until(lambda: not d.scheduler.is_early("w"), d)
    d.scheduler.matched_tokens("w", num_tokens + 1, 0)
    d.scheduler.load("w", blocks=[target], num_tokens=num_tokens)

    def has(layer):
        found = d.dense(target, num_tokens)
        return all(np.array_equal(found[key], expected[key]) for key in found if key[1] == layer)

    for layer in (0, 1):
        for (number, array), values in zip(arrays, computed, strict=True):
            if number == layer:
                array[source] = values
        for worker in p.workers:
            worker.layer_written(layer)
    until(lambda: has(0) and has(1), d)
    assert [has(layer) for layer in range(4)] == [True, True, False, False]
    assert not d.received
    for (_, array), values in zip(arrays, computed, strict=True):
        array[source] = values
    p.offer("r", source, num_tokens, extra=b"token")
    until(lambda: "w" in d.received and "r" in p.sent, d, p)
    assert (d.failed, d.paths["w"], d.extras) == ({}, {path}, {"w": b"token"})
    assert same(expected, d.dense(target, num_tokens))


def remote_offer(p, d):
    """Make an offer whose lease the producer has published, as it has once a later request is over."""
    params = p.offer("r", [9, 3], 30)
    name = f"later {p.child.pid}"
    d.load(name, p.offer(name, [0], 5), [0], 6)
    until(lambda: p.step() or name in p.call("sent"), d)
    return params


def test_another_process_is_read_directly_may_be_killed_meanwhile_and_serves_again(
    start, monkeypatch
):
    """The consumer is held right after it finds the lease, and its engine's thread makes no inline progress. Mapped
    memory outlives the producer, and the lease was never taken back.
    """
    found, may_go_on, original = threading.Event(), threading.Event(), RemotePools.is_published

    def is_published(pools, *arguments):
        answer = original(pools, *arguments)
        if answer and not found.is_set():
            found.set()
            assert may_go_on.wait(DEADLINE_S)
        return answer

    p = start("p", "producer", elsewhere=True, seed=3, **DIRECT)
    d = start("d", "consumer", **DIRECT)
    params, expected = remote_offer(p, d), p.dense([9, 3], 30)
    with monkeypatch.context() as patch:
        patch.setattr(RemotePools, "is_published", is_published)
        patch.setattr(DriverLock, "try_acquire", lambda lock: False)
        d.load("w", params, [5, 6], 31)
        assert found.wait(DEADLINE_S)
        p.kill()
        may_go_on.set()
        until(lambda: "w" in d.received, d)
    assert d.failed == {}
    assert same(expected, d.dense([5, 6], 30))

    again = start("p", "producer", elsewhere=True, seed=4, **DIRECT)
    d.load("v", remote_offer(again, d), [5, 6], 31)
    until(lambda: "v" in d.received, d)
    assert "v" not in d.failed
    assert d.paths["v"] == {"direct"}
    assert same(again.dense([9, 3], 30), d.dense([5, 6], 30))
