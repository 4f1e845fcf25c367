"""The lifetime of a worker, its caches, leases and thread."""

import gc
import inspect
import os
import re
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

import kvconnector as kvc
from kvconnector.datapath import device_memory
from kvconnector.datapath.pump import opening
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.errors import ConfigError, GeometryError, LocalError, WorkerStuckError
from kvconnector.runtime import channels, driver_thread
from kvconnector.runtime.step_layers import StepLayers
from kvconnector.session import WorkerOutput
from kvconnector.transport.ucx import UcxTransport
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
CHILD = """
calls = {
    "poll": worker.poll, "wait": lambda: worker.wait(0.1), "handshake": worker.handshake,
    "start_step": lambda: worker.start_step(kvc.StepMetadata()), "resume": worker.resume,
    "quiesce": lambda: worker.quiesce(0.1), "close": worker.close,
    "offer": lambda: scheduler.offer("s", blocks=[[2]], num_tokens=3),
    "build_step": scheduler.build_step, "close scheduler": scheduler.close,
    "with": lambda: worker.__exit__(),
}
if os.fork() == 0:
    signal.alarm(20)
    for name, call in calls.items():
        try:
            print(name, call(), file=sys.stderr)
        except kvc.errors.LocalError as error:
            print(name, error, file=sys.stderr)
    own = kvc.Worker(config, rank=(0, 0), model="m")
    own.register({0: (torch.zeros(4, 2, 16, 8), torch.zeros(4, 2, 16, 8))})
    own.close()
    print("made its own", file=sys.stderr, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
scheduler.offer("t", blocks=[[3]], num_tokens=3)
worker.start_step(scheduler.build_step())
scheduler.withdraw("t")
worker.start_step(scheduler.build_step())
while "t" not in worker.poll().finished_sending:
    worker.wait(0.1)
worker.close()
scheduler.close()
"""
"""Continues `LEFT` and `DRIVES`, with a child of its own."""
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
def test_a_worker_that_sleeps_before_its_first_step_withdraws_and_renews_its_memory(monkeypatch):
    """It has no driver yet, and consumers greet it later: they must map the memory that it has by then."""
    with _worker() as worker:
        worker.register(_caches())
        path, called = worker._thread._datapath, []
        monkeypatch.setattr(DataPath, "maps_segments", True)
        for name in ("withdraw", "renew"):
            monkeypatch.setattr(path, name, lambda what=name: called.append(what))
        worker.quiesce(DEADLINE_S)
        assert called == ["withdraw"]
        worker.resume()
        assert called == ["withdraw", "renew"]


@pytest.mark.ucx
def test_a_worker_that_wakes_up_does_not_wait_for_a_busy_driver_for_ever(monkeypatch, caplog):
    with _worker() as worker, kvc.Scheduler(CONFIG, [_registered(worker)]) as scheduler:
        worker.start_step(scheduler.build_step())
        monkeypatch.setattr(driver_thread, "RENEW_TIMEOUT_S", 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(worker._thread, "_run_inline", lambda drive: False)
            worker.resume()
    assert "no consumer can read these pools directly: the driver is busy" in caplog.text


def _registered(worker):
    worker.register(_caches())
    return worker.handshake()


class Held:
    """A worker whose driver's thread does not return from a call until the test lets it."""

    def __init__(self, worker, monkeypatch):
        self.thread, self._step = worker._thread._thread, worker._thread._datapath.step
        self.is_in, self.may_return = threading.Event(), threading.Event()
        monkeypatch.setattr(worker._thread._datapath, "step", self.step)

    def step(self, **how):
        if threading.current_thread() is self.thread:
            self.is_in.set()
            self.may_return.wait(DEADLINE_S)
        self._step(**how)


@pytest.mark.ucx
def test_an_engine_hears_of_a_driver_that_is_stuck_in_a_call(monkeypatch, caplog):
    config = structs.replace(CONFIG, stuck_after_s=1.0)
    ended = WorkerOutput()

    def look():
        output = worker.poll()
        for name in ("finished_sending", "failed_sending", "failed_recving", "producer_started"):
            getattr(ended, name).update(getattr(output, name))
        return ended

    with kvc.Worker(config, rank=(0, 0), model="m") as worker:
        worker.register(_caches())
        with kvc.Scheduler(config, [worker.handshake()]) as scheduler:
            scheduler.offer("r", blocks=[[1]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            holds = worker._thread._driver.producer.holds
            until(lambda: holds("r"))
            held = Held(worker, monkeypatch)
            until(held.is_in.is_set)
            offered = scheduler.offer("s", blocks=[[2]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            until(lambda: "the driver is stuck" in caplog.text, look)
            assert "self.may_return.wait(DEADLINE_S)" in caplog.text
            assert "they do not end: ['r', 's']" in caplog.text
            # new requests fail at once, since no thread touches their blocks
            scheduler.on_new_request("w", {**offered, "remote_port": 9})
            assert scheduler.matched_tokens("w", 4, 0) == (3, True)
            scheduler.load("w", blocks=[[3]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            until(lambda: look().failed_recving)
            assert re.fullmatch(
                r"WorkerStuckError: the connector's driver does not return from a call"
                r" \[place='threading.py:\d+ in wait', stuck_after_s=1.0\]; restart this engine.*",
                ended.failed_recving["w"],
            )
            assert not ended.finished_sending
            # the call returns after all: nothing touches the blocks any more
            held.may_return.set()
            until(lambda: len(look().finished_sending) == 2)
            assert ended.failed_sending.keys() == {"r", "s"}
            assert "WorkerStuckError" in ended.failed_sending["r"]


@pytest.mark.ucx
def test_a_driver_is_not_stuck_while_the_engines_thread_is_away(monkeypatch):
    """It may have waited for the GIL, or the process may have been stopped."""
    looks = []
    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            scheduler.offer("r", blocks=[[1]], num_tokens=3)
            worker.start_step(scheduler.build_step())
            thread = worker._thread
            monkeypatch.setattr(thread, "_driver", SimpleNamespace(num_turns=7))
            for now_s in (0.0, 1.0, 1e6, *[1e6 + second for second in range(1, 58)]):
                thread.look_for_stuck(now_s)
                looks.append(thread._failure)
            assert looks == [None] * 60
            thread.look_for_stuck(1e6 + 59)
            thread.look_for_stuck(1e6 + 60)
            assert isinstance(thread._failure, WorkerStuckError)


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
@pytest.mark.integration
def test_a_forked_child_can_use_neither_half_and_harms_neither(tmp_path):
    """Threads, sockets and shared memory are the parent's: a child that closed its worker waited for ever, and took the
    parent with it.
    """
    command = [sys.executable, "-c", FORKS, LEFT + DRIVES + CHILD]
    subprocess.run(command, timeout=DEADLINE_S, check=True, cwd=tmp_path)
    found = (tmp_path / "0").read_text().splitlines()
    assert [line for line in found if "the process that made it" not in line] == ["made its own"]
    assert len(found) == 12


@pytest.mark.ucx
def test_two_threads_that_take_the_first_step_start_one_driver(monkeypatch):
    begun, both = [], threading.Barrier(2, timeout=DEADLINE_S)
    check, begin = kvc.Worker._check_engine, driver_thread.DriverThread.begin

    def meet(worker, *arguments):
        check(worker, *arguments)
        both.wait()

    def count(thread, *arguments):
        begun.append(thread)
        begin(thread, *arguments)

    monkeypatch.setattr(kvc.Worker, "_check_engine", meet)
    monkeypatch.setattr(driver_thread.DriverThread, "begin", count)
    with _worker() as worker:
        worker.register(_caches())
        with kvc.Scheduler(CONFIG, [worker.handshake()]) as scheduler:
            steps = [scheduler.build_step()] * 2
        threads = [threading.Thread(target=worker.start_step, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(begun) == 1


@pytest.mark.ucx
@pytest.mark.parametrize("seconds", [None, "1", float("nan"), float("inf"), True])
def test_a_wait_is_a_finite_number_of_seconds(seconds):
    with _worker() as worker:
        worker.register(_caches())
        for call in (worker.wait, worker.quiesce):
            with pytest.raises(LocalError, match="timeout_s must be a finite number of seconds"):
                call(seconds)


@pytest.mark.ucx
@pytest.mark.parametrize("number", ["1", -1, 1.5, None])
def test_a_number_of_optional_groups_is_a_count(number):
    with pytest.raises(GeometryError, match="num_optional must be an integer"):
        _worker().register(_caches(), num_optional=number)


@pytest.mark.parametrize("rank", [(True, 0), (0.5, 0), (0, "0")])
def test_a_rank_is_two_numbers(rank):
    with pytest.raises(ConfigError, match="a worker's rank must be"):
        kvc.Worker(CONFIG, rank=rank, model="m")


def test_a_model_has_a_name():
    with pytest.raises(ConfigError, match="model must be a name"):
        kvc.Worker(CONFIG, rank=(0, 0), model="")


@pytest.mark.ucx
def test_a_with_statement_closes_the_worker(monkeypatch):
    with _worker() as worker:
        worker.register(_caches())
        assert "open" in repr(worker)
    assert "closed" in repr(worker)
    with pytest.raises(LocalError, match="do not call it after close"):
        worker.handshake()
    with pytest.raises(LocalError, match="registered only once"):
        worker.register(_caches())


def test_all_that_a_closing_worker_may_wait_for_fits_into_its_limit():
    """Otherwise it says that its thread did not stop, and not which consumer or GPU it waited for."""
    transport = inspect.signature(UcxTransport).parameters["close_timeout_s"].default
    waits = driver_thread.UNMAP_TIMEOUT_S, device_memory.CLOSE_S, transport, channels.LINGER_S
    assert sum(waits) < driver_thread.CLOSE_TIMEOUT_S


@pytest.mark.ucx
@pytest.mark.parametrize("what", ["open_control", "DataPath"])
def test_a_registration_that_fails_leaves_nothing_behind(what, monkeypatch, tmp_path):
    """Its caches may be registered again, once the mistake is corrected."""

    def fail(*_, **__):
        raise ConfigError("the address cannot be used")

    config = structs.replace(
        CONFIG, paths=structs.replace(CONFIG.paths, shared_folder=str(tmp_path))
    )
    caches = {0: (torch.zeros(256, 2, 64, 256),)}
    worker = kvc.Worker(config, rank=(0, 0), model="m")
    with monkeypatch.context() as broken:
        broken.setattr(driver_thread if what == "open_control" else opening, what, fail)
        for _ in range(2):
            before = set(os.listdir("/proc/self/fd"))
            with pytest.raises(ConfigError):
                worker.register(caches)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name == "kvconnector-memory"]
    assert list(tmp_path.iterdir()) == []
    worker.register(caches)
    assert len(list(tmp_path.iterdir())) == 1
    worker.close()


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
