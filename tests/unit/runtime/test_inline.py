"""Inline progress releases the data path, wherever an interrupt arrives."""

import sys
import threading
from itertools import count

import pytest

from kvconnector.datapath.pump import datapath, driver_lock
from kvconnector.runtime import driver as driver_module
from kvconnector.runtime import driver_thread
from kvconnector.runtime.driver import Driver
from tests.support.fakes import FakeEngine, attention_model
from tests.support.waiting import DEADLINE_S
from tests.support.world import World

INTERRUPTED = [module.__file__ for module in (driver_thread, datapath, driver_lock, driver_module)]


@pytest.fixture
def worker():
    world = World()
    yield world.start(FakeEngine("e", attention_model()), role="both").workers[0]
    world.close()


class Inline(driver_thread.DriverThread):
    """The engine's side of a driver whose thread would be asleep. `fail` gets the error that broke the driver."""

    def __init__(self, worker, fail):
        self._driver, self._datapath, self._fail = worker.driver, worker.datapath, fail
        self._context, self._is_stopping = None, False


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th instruction, as a signal's handler might."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, event, argument):
        if frame.f_code.co_filename not in INTERRUPTED:
            return None
        frame.f_trace_opcodes = True
        return self.step

    def step(self, frame, event, argument):
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.step


def test_the_data_path_is_released_wherever_an_interrupt_arrives(worker):
    failures, driven = [], []
    progress = Inline(worker, failures.append)
    # the driver's thread would be asleep in the loop
    worker.datapath.lock.release(0.0)
    for at in count(1):
        interrupt = Interrupt(at)
        try:
            with interrupt:
                progress._run_inline(driven.append)
        except KeyboardInterrupt:
            pass
        assert not worker.datapath.lock.is_ours, f"instruction {at}"
        if interrupt.left > 0:
            break  # it ended earlier
    assert len(driven) > 1
    assert failures


def test_a_data_path_that_another_thread_owns_is_left_alone(worker):
    progress = Inline(worker, pytest.fail)
    # as while the driver's thread works
    assert not progress._run_inline(pytest.fail)


def test_a_waking_engine_leaves_the_gil_to_the_driver_that_it_waits_for(worker, monkeypatch):
    progress, renewed = Inline(worker, pytest.fail), []
    monkeypatch.setattr(Driver, "renew_pools", renewed.append)
    may_run = threading.Lock()

    def work_on():
        with may_run:  # a call that gives the GIL back
            worker.datapath.lock.release(0.0)

    interval_s = sys.getswitchinterval()
    with may_run:
        thread = threading.Thread(target=work_on)
        thread.start()
        # from here on no thread takes the GIL from this one
        sys.setswitchinterval(10 * DEADLINE_S)
    try:
        progress.renew_pools()
    finally:
        sys.setswitchinterval(interval_s)
        thread.join(DEADLINE_S)
    assert renewed == [worker.driver]
