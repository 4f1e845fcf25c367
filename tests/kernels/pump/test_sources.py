"""Processes that compile at the same time take turns and share the cache."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from kvconnector_kernels.pump.sources import compiling_alone

pytestmark = pytest.mark.integration

NUM_PROCESSES = 8
DEADLINE_S = 300.0
COMPILE = """
from kvconnector_kernels.pump.copy_cpu import compile_copy
print(compile_copy().cache_hits)
"""


def _enter_often(marker, start):
    start.wait(DEADLINE_S)
    for _ in range(10):
        with compiling_alone():
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            time.sleep(1e-3)
            os.unlink(marker)


def _enter_and_stay(entered):
    with compiling_alone():
        entered.set()
        time.sleep(DEADLINE_S)


def test_one_process_compiles_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(NUM_PROCESSES)
    arguments = (str(tmp_path / "marker"), start)
    processes = [context.Process(target=_enter_often, args=arguments) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES


def test_a_killed_process_releases_the_compile_lock():
    context = multiprocessing.get_context("fork")
    entered = context.Event()
    process = context.Process(target=_enter_and_stay, args=(entered,))
    process.start()
    assert entered.wait(DEADLINE_S)
    process.kill()
    process.join(DEADLINE_S)
    with compiling_alone():
        pass


@pytest.mark.slow
def test_one_of_many_processes_fills_an_empty_cache(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_PROCESSES)
    ]
    hits = sorted(process.communicate(timeout=DEADLINE_S)[0].strip() for process in processes)
    assert hits == ["0"] + ["1"] * (NUM_PROCESSES - 1)
