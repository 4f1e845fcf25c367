"""Every public function of the cache and the topology is needed: where it raises, a case from end to end fails.

The cases are in `seed_cases`. Each runs once as it is and notes what it calls; then each function raises in the
quickest case that calls it.
"""

import random
import subprocess
import sys
import time

import pytest

from tests.support.forked import Process
from tests.unit.minillm.seed_cases import CASES, public_functions

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(350)]

DEADLINE_S = 60.0
SAMPLE = 12


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
    run("command line", folder)  # starts the process that all others are forked from
    for case in CASES:
        started = time.monotonic()
        status, output = run(case, folder)
        assert status == 0, output
        found = (time.monotonic() - started, case)
        for name in (folder / "called").read_text().split():
            callers[name] = min(found, callers.get(name, found))
    return {name: case for name, (_, case) in callers.items()}


def missed(names, quickest, folder):
    """Those of the functions that may raise without failing a case."""
    return [name for name in names if not run(quickest[name], folder, raising=name)[0]]


def test_every_public_function_is_called_by_a_case(quickest, tmp_path):
    assert set(public_functions()) - set(quickest) == set()
    sample = random.Random(0).sample(sorted(quickest), SAMPLE)
    assert missed(sample, quickest, tmp_path) == []


@pytest.mark.slow
def test_every_public_function_that_raises_fails_a_case(quickest, tmp_path):
    assert missed(sorted(quickest), quickest, tmp_path) == []
