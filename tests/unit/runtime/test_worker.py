"""The lifetime of a worker, its caches, leases and thread."""

import gc
import subprocess
import sys
import time
import weakref

import pytest
import torch

import kvconnector as kvc
from kvconnector.errors import LocalError
from kvconnector.runtime import driver_thread

CONFIG = kvc.Config.from_mapping({"engine_id": "e", "role": "both", "control": {"insecure": True}})
SHAPE = (4, 2, 16, 8)
DEADLINE_S = 60.0

LEFT = """
import gc
import torch
import kvconnector as kvc

config = kvc.Config.from_mapping({"engine_id": "e", "role": "both", "control": {"insecure": True}})
worker = kvc.Worker(config, rank=(0, 0), model="m")
worker.register({0: (torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8))})
scheduler = kvc.Scheduler(config, [worker.handshake()])
"""
DRIVES = (
    'scheduler.offer("r", blocks=[[1]], num_tokens=3)\nworker.start_step(scheduler.build_step())\n'
)
COLLECTED = "del worker, scheduler\ngc.collect()\n"


def _caches():
    return {layer: (torch.zeros(SHAPE), torch.zeros(SHAPE)) for layer in range(2)}


def until(is_so):
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _worker():
    return kvc.Worker(CONFIG, rank=(0, 0), model="m")


@pytest.mark.ucx
@pytest.mark.parametrize("as_group", [False, True], ids=["tensors", "cache group"])
def test_a_worker_keeps_its_caches_until_it_is_closed(as_group):
    caches = _caches()
    tensors = [weakref.ref(tensor) for parts in caches.values() for tensor in parts]
    worker = _worker()
    worker.register([kvc.cache_group(caches)] if as_group else caches)
    del caches
    gc.collect()
    assert all(tensor() is not None for tensor in tensors)
    worker.close()
    gc.collect()
    assert all(tensor() is None for tensor in tensors)


@pytest.mark.ucx
@pytest.mark.parametrize("is_loaded", [False, True], ids=["aborted", "loaded"])
def test_requests_that_end_while_the_worker_sleeps_are_dropped(is_loaded):
    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            offered = scheduler.offer("r", blocks=[[1]], num_tokens=3)
            scheduler.on_new_request("w", {**offered, "remote_port": 9})
            worker.start_step(scheduler.build_step())
            loads = worker._thread._driver.consumer._loads
            until(lambda: "w" in loads)
            worker.quiesce(DEADLINE_S)
            if is_loaded:
                assert scheduler.matched_tokens("w", 4, 0) == (3, True)
                scheduler.load("w", blocks=[[2]], num_tokens=3)
            else:
                scheduler.finish("w")
            worker.start_step(scheduler.build_step())
            until(lambda: "w" not in loads)
            assert worker.poll().failed_recving.keys() == ({"w"} if is_loaded else set())


@pytest.mark.ucx
def test_a_collected_workers_caches_live_as_long_as_its_driver():
    caches = _caches()
    tensor = weakref.ref(caches[0][0])
    worker = _worker()
    worker.register(caches)
    del caches
    with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
        scheduler.offer("r", blocks=[[1]], num_tokens=3)
        worker.start_step(scheduler.build_step())
    thread = worker._thread
    with pytest.warns(ResourceWarning, match="was not closed"):
        del worker
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()
    assert thread not in driver_thread._held
    del thread
    gc.collect()
    assert tensor() is None


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.parametrize("drives", ["", DRIVES], ids=["idle", "driving"])
@pytest.mark.parametrize("ending", ["", COLLECTED], ids=["at exit", "collected"])
def test_a_process_without_close_ends(drives, ending):
    command = [sys.executable, "-W", "always", "-c", LEFT + drives + ending]
    ended = subprocess.run(command, timeout=DEADLINE_S, check=True, capture_output=True, text=True)
    assert ("ResourceWarning: a kvconnector worker" in ended.stderr) == bool(ending)


@pytest.mark.ucx
def test_a_with_statement_closes_the_worker(monkeypatch):
    with _worker() as worker:
        worker.register(_caches())
        assert "open" in repr(worker)
    assert "closed" in repr(worker)
    with pytest.raises(LocalError, match="close last"):
        worker.handshake()
    with pytest.raises(LocalError, match="registered once"):
        worker.register(_caches())


@pytest.mark.ucx
def test_a_worker_retries_to_start_its_thread_in_the_next_step(monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            scheduler.offer("r", blocks=[[1]], num_tokens=3)
            step = scheduler.build_step()
            with monkeypatch.context() as broken:
                broken.setattr(driver_thread.threading.Thread, "start", fail)
                with pytest.raises(RuntimeError):
                    worker.start_step(step)
            worker.start_step(step)
            scheduler.abort("r")
            worker.start_step(scheduler.build_step())
            until(lambda: "r" in worker.poll().finished_sending)
