"""The lifetime of a worker, its caches, leases and thread."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

import kvconnector as kvc
from kvconnector.errors import LocalError
from kvconnector.runtime import driver_thread
from kvconnector.runtime.layers import StepLayers
from tests.support.waiting import until

CONFIG = kvc.Config.from_mapping({"engine_id": "e", "role": "both", "control": {"insecure": True}})
SHAPE = (4, 2, 16, 8)
DEADLINE_S = 60.0

FORKS = """
import gc, os, signal, sys, torch
import kvconnector as kvc

kvc.Worker, kvc.Scheduler
for number, program in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        signal.alarm(50)
        sys.stderr = open(str(number), "w")
        exec(program)
        break
else:
    sys.exit(any(os.wait()[1] for _ in sys.argv[1:]))
"""
"""Runs programs in forked processes, each with a file for its errors: torch is imported once."""
LEFT = """
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
def test_a_prompt_whose_offer_is_refused_while_the_worker_sleeps_is_given_up():
    streamed = {"do_remote_decode": True, "transfer_id": "t", "transfer_secret": "5" * 32}
    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            worker.quiesce(DEADLINE_S)
            scheduler.on_new_request("r", streamed)
            worker.start_step(scheduler.build_step())
            holds = worker._thread._driver.producer.holds
            until(lambda: holds("r"))
            scheduler.offer("r", blocks=[[1]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            assert worker.poll().failed_sending.keys() == {"r"}
            until(lambda: not holds("r"))


@pytest.mark.ucx
@pytest.mark.parametrize("broken", ["__init__", "written"])
def test_a_step_whose_layers_cannot_be_reported_is_read_as_a_whole(broken, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("an accident")

    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            monkeypatch.setattr(StepLayers, broken, fail)
            scheduler.offer("r", blocks=[[1]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            for layer in range(2):
                worker.layer_written(layer)
            monkeypatch.undo()
            holds = worker._thread._driver.producer.holds
            until(lambda: holds("r"))
            assert worker.poll().stats.contained == {"ZeroDivisionError": 1}
            scheduler.withdraw("r")
            worker.start_step(scheduler.build_step())
            until(lambda: "r" in worker.poll().finished_sending)
    assert caplog.text.count("Traceback") == 1


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
def test_processes_without_close_end(tmp_path):
    programs = [LEFT + drives + ending for drives in ("", DRIVES) for ending in ("", COLLECTED)]
    command = [sys.executable, "-W", "always", "-c", FORKS, *programs]
    subprocess.run(command, timeout=DEADLINE_S, check=True, cwd=tmp_path)
    logs = [(tmp_path / f"{number}").read_text() for number in range(len(programs))]
    warns = ["ResourceWarning: a kvconnector worker" in log for log in logs]
    assert warns == [False, True, False, True]


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
