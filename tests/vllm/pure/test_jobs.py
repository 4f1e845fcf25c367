"""The jobs of the harness: however often a run is told to end, it ends with its cases."""

import os
import signal
import subprocess
import sys
import time

from tests.support.forked import environment

RUN = """
import os, signal, time
from dataclasses import dataclass
from types import SimpleNamespace
from tests.vllm.harness import jobs

@dataclass(frozen=True)
class Device:
    first: int = 0

def case(*_):
    # as one whose engines hang
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(100.0)

jobs.run_case, jobs.GRACE_S = case, 1.0
signal.signal(signal.SIGTERM, signal.default_int_handler)
for _ in jobs.run_jobs([(SimpleNamespace(scenario=None), "x")], None, Device(), at_once=1, limit_s=60.0):
    pass
"""


def test_a_run_that_is_told_twice_to_end_ends_with_its_cases():
    """As `timeout` tells it: the process, and then its group."""
    command = [sys.executable, "-c", RUN]
    run = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    with run:
        case = int(run.stdout.readline())
        for _ in range(2):
            run.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        try:
            run.wait(20.0)
        finally:
            run.kill()
    assert not os.path.exists(f"/proc/{case}")
