"""Runs programs for as long as they work, however slow the machine is."""

import os
import resource
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import DEADLINE_S

PROCESSOR_S = 30
"""The most seconds of a processor for each process: one that goes round for ever ends by SIGXCPU."""
LOOK_S = 0.05


def run_while_working(command, env):
    """Run a program and the processes that it starts. Returns it as `subprocess.run` does, once it has ended.

    A hung one is ended after `DEADLINE_S` in which none of its processes was given a processor, and one that goes round
    for ever after `PROCESSOR_S` of work. So it does not matter what else the machine does, and the time that passes
    measures nothing.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            resource.prlimit(program.pid, resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
            work, since_s = work_of(program.pid), time.monotonic()
            while program.poll() is None and time.monotonic() < since_s + DEADLINE_S:
                time.sleep(LOOK_S)
                if (now := work_of(program.pid)) != work:
                    work, since_s = now, time.monotonic()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, program.returncode, out.read(), err.read())


def work_of(session):
    """Return the processes of a session with the ticks of a processor that each was given."""
    work = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                work[stat.parent.name] = int(fields[11]) + int(fields[12])
    return work
