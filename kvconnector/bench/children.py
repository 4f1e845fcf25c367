"""The parent's side: starting ranks as processes, asking all of an engine's ranks at once, and ending them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TypeVar

from kvconnector.bench import messages as m
from kvconnector.bench.messages import ChildFailedError
from kvconnector.bench.owner import Owner
from kvconnector.errors import KVConnectorError

LOG_TAIL_BYTES = 3000
STOP_TIMEOUT_S = 10.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

AnswerType = TypeVar("AnswerType")


class Child:
    """One process. Its stdout and stderr go to a file, whose end explains a failure."""

    def __init__(
        self, name: str, *, timeout_s: float, environment: Mapping[str, str], site: str
    ) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        ours.settimeout(timeout_s)
        self._connection = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        paths = [site] if site else []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvconnector.bench.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    **environment,
                    "PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)]),
                },
            )

    def send(self, request: m.Request) -> None:
        """Ask. Raises ChildFailedError if the process is gone."""
        try:
            m.send_message(self._connection, request)
        except KVConnectorError as error:
            raise self._failure(str(error)) from error

    def receive(self, expected: type[AnswerType]) -> AnswerType:
        """The answer.

        Raises:
            ChildFailedError: the process failed, ended, or did not answer in time.
        """
        try:
            answer = m.receive_answer(self._connection)
        except KVConnectorError as error:
            raise self._failure(str(error)) from error
        if isinstance(answer, m.Failed):
            raise ChildFailedError(f"{self.name} failed: {answer.text.strip()}")
        if not isinstance(answer, expected):
            raise ChildFailedError(f"{self.name} answered {type(answer).__name__}")
        return answer

    def pause(self) -> None:
        """Keep the process from running until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process run."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process: asked first, killed after `STOP_TIMEOUT_S`."""
        self.resume()
        self._connection.settimeout(STOP_TIMEOUT_S)
        try:
            m.send_message(self._connection, m.Stop())
            self._process.wait(STOP_TIMEOUT_S)
        except (KVConnectorError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._connection.close()
            self._log.close()

    def _failure(self, what: str) -> ChildFailedError:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        log = self._log.read().decode(errors="replace").strip()
        return ChildFailedError(f"{self.name}: {what}; its output ends: {log or 'nothing'}")


def _outcome(child: Child, expected: type[AnswerType]) -> AnswerType | ChildFailedError:
    try:
        return child.receive(expected)
    except ChildFailedError as error:
        return error


class EngineProcesses(Owner):
    """All ranks of one engine, in rank order. A context manager: leaving it ends the processes."""

    def __init__(
        self,
        engine_id: str,
        opens: Sequence[m.Open],
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        site: str = "",
    ) -> None:
        self.engine_id = engine_id
        self.opens = tuple(opens)
        self._children: list[Child] = []
        with ExitStack() as exits:
            for each in opens:
                name = f"{engine_id} pp{each.pp_rank}tp{each.tp_rank}"
                child = Child(name, timeout_s=each.timeout_s, environment=environment, site=site)
                exits.callback(child.stop)
                self._children.append(child)
            self.ask_each(opens, m.Ok)
            super().__init__(exits)

    def ask_all(self, request: m.Request, expected: type[AnswerType]) -> list[AnswerType]:
        """The same request to every rank; all answers."""
        return self.ask_each([request] * len(self._children), expected)

    def ask_each(
        self, requests: Sequence[m.Request], expected: type[AnswerType]
    ) -> list[AnswerType]:
        """One request to each rank; all answers. The ranks work at the same time.

        Raises:
            ChildFailedError: a rank failed or ended. All have answered, or never will.
        """
        self.tell_each(requests)
        return self.hear_each(expected)

    def tell_each(self, requests: Sequence[m.Request]) -> None:
        """One request to each rank, whose answers `hear_each` collects. Raises ChildFailedError if a rank is gone."""
        for child, request in zip(self._children, requests, strict=True):
            child.send(request)

    def hear_each(self, expected: type[AnswerType]) -> list[AnswerType]:
        """The answers to `tell_each`; raises as `ask_each`."""
        outcomes = [_outcome(child, expected) for child in self._children]
        for outcome in outcomes:
            if isinstance(outcome, ChildFailedError):
                raise outcome
        return [each for each in outcomes if isinstance(each, expected)]

    def pause(self) -> None:
        """Keep all ranks from running, until `resume`."""
        for child in self._children:
            child.pause()

    def resume(self) -> None:
        """Let all ranks run."""
        for child in self._children:
            child.resume()
