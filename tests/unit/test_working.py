"""The helper that lets a program run for as long as it works."""

import os
import signal
import sys

from tests.support import working

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"


def run(text):
    return working.run_while_working([sys.executable, "-c", text], dict(os.environ))


def test_a_program_that_works_longer_than_the_deadline_is_not_ended(monkeypatch):
    monkeypatch.setattr(working, "DEADLINE_S", 0.5)
    text = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass\nprint('done')"
    done = run(text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_program_that_hangs_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(working, "DEADLINE_S", 0.5)
    assert run(CHILD).returncode == -signal.SIGKILL


def test_a_program_that_goes_round_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(working, "PROCESSOR_S", 1)
    assert run("while True: pass").returncode in (-signal.SIGXCPU, -signal.SIGKILL)
