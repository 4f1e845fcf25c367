"""Every public function of the cache, the layouts, the topology, the aggregator and the receive transforms has a user:
where it raises, the demo's engines or `kvconnector plan` fail.

The cases are in `seed_cases`. Each runs once as it is and notes what the program under test calls, not what the test
does; then each function raises in the quickest case that calls it.
"""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.forked import Process
from tests.unit.minillm.seed_cases import CASES, public_functions

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(350)]

DEADLINE_S = 60.0
SAMPLE = 12
STARTING = threading.Lock()
# what engines on the CPU have another function for
ON_A_GPU = {"cache.block_table.BlockTable.device_tensor"}


def run(case, folder, raising=""):
    """Seconds, exit status and output of one case in a process of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.unit.minillm.seed_cases", case, str(folder), raising]
    started = time.monotonic()
    with (folder / "log").open("w") as log, STARTING:
        process = Process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
    return time.monotonic() - started, status, (folder / "log").read_text()


def side_by_side(*cases):
    """What `run` returns of each, by two processes at a time: a case keeps about one core busy."""
    with ThreadPoolExecutor(2) as pool:
        return [started.result() for started in [pool.submit(run, *case) for case in cases]]


@pytest.fixture(scope="module")
def quickest(tmp_path_factory):
    """By function, the case that calls it and takes the least time."""
    folder = tmp_path_factory.mktemp("cases")
    folders = {case: folder / str(number) for number, case in enumerate(CASES)}
    callers = {}
    for case, (seconds, status, output) in zip(
        folders, side_by_side(*folders.items()), strict=True
    ):
        assert status == 0, output
        for name in (folders[case] / "called").read_text().split():
            callers[name] = min((seconds, case), callers.get(name, (seconds, case)))
    return {name: case for name, (_, case) in callers.items()}


def missed(names, quickest, folder):
    """Those of the functions that may raise without failing a case. Prints who notices the others."""
    found = []
    for name, (_, status, _) in zip(
        names, side_by_side(*((quickest[name], folder / name, name) for name in names)), strict=True
    ):
        print(f"{name:70} {quickest[name] if status else 'NOBODY'}")  # noqa: T201  the table
        found += [] if status else [name]
    return found


def test_every_public_function_is_called_by_a_case(quickest, tmp_path):
    unreachable = set() if torch.cuda.is_available() else ON_A_GPU
    assert set(public_functions()) - set(quickest) <= unreachable
    sample = random.Random(0).sample(sorted(quickest), SAMPLE)
    assert missed(sample, quickest, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_public_function_that_raises_fails_a_case(quickest, tmp_path):
    assert missed(sorted(quickest), quickest, tmp_path) == []
