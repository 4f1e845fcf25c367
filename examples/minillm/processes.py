"""Child processes that never outlive their parent, and a worded error when one fails."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

PARENT_VARIABLE = "MINILLM_PARENT_PID"
PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 25

Result = TypeVar("Result")


class ChildFailedError(Exception):
    """A child process ended or did not become ready; the text carries the end of its log."""


def die_with_parent(death_signal: signal.Signals) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends (Linux); exit if it has ended."""
    expected = os.environ.pop(PARENT_VARIABLE, None)
    if expected is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != int(expected):
        raise SystemExit("the parent process is gone")


def log_tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last `lines` lines of a log, or a note that there is none."""
    try:
        text = path.read_text(errors="replace").rstrip()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def run_until_signal(main: Coroutine[Any, Any, Result]) -> Result | None:
    """`asyncio.run`, with the first SIGTERM or SIGINT cancelling `main` so that it cleans up; None if that happened."""

    async def supervised() -> Result | None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def ask() -> None:
            # only once: a second Ctrl-C must not interrupt the clean-up, which is bounded
            if not asked.is_set():
                asked.set()
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ask)
        try:
            return await task
        except asyncio.CancelledError:
            if asked.is_set():
                return None
            raise

    return asyncio.run(supervised())


def log_to_stderr() -> None:
    """Log to stderr with time, level and name; the parent keeps it as the process's log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")


class Child:
    """One started process with its log file. Its own session, so that Ctrl-C reaches the parent alone."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    @classmethod
    async def start(cls, name: str, module: str, arguments: Sequence[str], log_path: Path) -> Child:
        """Run `python -m module arguments...` with stdout and stderr in `log_path`."""
        # one thread each, or the ranks on a small host would fight for cores
        environment = {"OMP_NUM_THREADS": "1", **os.environ, PARENT_VARIABLE: str(os.getpid())}
        # the child imports the same modules as this process, wherever its path came from
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return cls(name, process, log_path)

    @property
    def is_running(self) -> bool:
        """Returns True if the process has not ended yet."""
        return self.process.returncode is None

    def failure(self, what: str) -> ChildFailedError:
        """Return an error that says `what` happened, with the end of the log."""
        code = "running" if self.is_running else f"exit status {self.process.returncode}"
        return ChildFailedError(
            f"{self.name} (pid {self.process.pid}, {code}) {what}\n"
            f"--- end of {self.log_path} ---\n{log_tail(self.log_path)}"
        )

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`; returns once the process is reaped."""
        if self.is_running:
            self._signal(signal.SIGTERM)
            await self.wait_or_kill(timeout_s=grace_s)

    async def wait_or_kill(self, *, timeout_s: float) -> None:
        """Wait for the process to end by itself, at most `timeout_s`, then SIGKILL it."""
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._signal(signal.SIGKILL)
            await self.process.wait()
            if isinstance(error, asyncio.CancelledError):
                raise

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running:
            try:
                self.process.send_signal(number)
            except ProcessLookupError:
                return  # it ended in between
