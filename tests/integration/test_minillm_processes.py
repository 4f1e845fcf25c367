"""The demo leaves no process running, however it ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.hosts.network import descendants
from tests.support.forked import environment
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

DEADLINE_S = 60.0
# three engines and their five ranks
DEMO_PROCESSES = 8


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="int"),
        pytest.param(signal.SIGTERM, id="term", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="kill", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path, number):
    command = [sys.executable, "-m", "minillm.demo", "--prompts", "7"]
    with (tmp_path / "demo.log").open("wb") as log:
        demo = subprocess.Popen(
            command, stdout=log, stderr=log, env={**environment(), "TMPDIR": str(tmp_path)}
        )
        below = until(lambda: len(found := descendants(demo.pid)) >= DEMO_PROCESSES and found)
        ends = [os.pidfd_open(pid) for pid in below]
        demo.send_signal(number)
        code = demo.wait(DEADLINE_S)
    assert code == (-number if number == signal.SIGKILL else 130)
    for end in ends:
        assert select.select([end], [], [], DEADLINE_S)[0], "a process is left"
        os.close(end)
