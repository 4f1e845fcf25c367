"""The demo leaves no process behind, whatever ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network import descendants

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

EXIT_S = 20.0
# three engines and their five ranks
DEMO_PROCESSES = 8
SIGTERM = pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow)


def is_alive(pid):
    """Whether `pid` runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids):
    """Wait until none of `pids` runs; returns those that still do at the deadline."""
    deadline = time.monotonic() + EXIT_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="int"),
        SIGTERM,
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path, number):
    command = [sys.executable, "-m", "minillm.demo", "--prompts", "7"]
    paths = os.pathsep.join(path for path in sys.path if path)
    with (tmp_path / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
        )
        deadline = time.monotonic() + EXIT_S
        below = []
        while len(below) < DEMO_PROCESSES and time.monotonic() < deadline:
            below = descendants(demo.pid)
            time.sleep(0.05)
        assert len(below) >= DEMO_PROCESSES
        demo.send_signal(number)
        code = demo.wait(EXIT_S)
    assert code == (-number if number == signal.SIGKILL else 130)
    assert wait_gone(below) == []
