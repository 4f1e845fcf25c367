"""Every public function of the cache, the layouts, the topology, the aggregator and the receive transforms has a user:
where it raises, the demo's engines or `kvconnector plan` fail.

The cases are in `seed_cases`. Each runs once as it is and notes what the program under test calls, not what the test
does; then each function raises in the quickest case that calls it.
"""

import random
import subprocess
import sys
import time

import pytest
import torch

from tests.support.forked import Process
from tests.unit.minillm.seed_cases import CASES, public_functions

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(350)]

DEADLINE_S = 60.0
SAMPLE = 12
# what engines on the CPU have another function for
ON_A_GPU = {"cache.block_table.BlockTable.device_tensor"}


def run(case, folder, raising=""):
    """Exit status and output of one case in a process of its own."""
    command = [sys.executable, "-m", "tests.unit.minillm.seed_cases", case, str(folder), raising]
    with (folder / "log").open("w") as log:
        process = Process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
    return status, (folder / "log").read_text()


@pytest.fixture(scope="module")
def quickest(tmp_path_factory):
    """By function, the case that calls it and takes the least time."""
    folder = tmp_path_factory.mktemp("cases")
    callers = {}
    run("plan", folder)  # starts the process that all others are forked from
    for case in CASES:
        started = time.monotonic()
        status, output = run(case, folder)
        assert status == 0, output
        found = (time.monotonic() - started, case)
        for name in (folder / "called").read_text().split():
            callers[name] = min(found, callers.get(name, found))
    return {name: case for name, (_, case) in callers.items()}


def missed(names, quickest, folder):
    """Those of the functions that may raise without failing a case. Prints who notices the others."""
    found = []
    for name in names:
        status, _ = run(quickest[name], folder, raising=name)
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
