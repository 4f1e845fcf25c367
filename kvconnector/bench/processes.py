"""An engine's ranks as processes: starting them, calling their methods, and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgspec

from kvconnector.bench.rank_process import Failed, RankOptions, RankProcess
from kvconnector.errors import KVConnectorError

LOG_TAIL_BYTES = 3000
ANSWER_TIMEOUT_S = 300.0
"""The first start of all compiles kernels."""
STOP_TIMEOUT_S = 10.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Argument = TypeVar("Argument")


class ChildFailedError(KVConnectorError):
    """A benchmark's process failed or ended; the text is its own or the end of its log."""


class _Child:
    """One process. Its stdout and stderr go to a file, whose end explains a failure."""

    def __init__(self, name: str, options: RankOptions, environment: Mapping[str, str]) -> None:
        self._name = name
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvconnector.bench.rank_process"),
                    *(str(theirs.fileno()), msgspec.json.encode(options).decode()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **dict.fromkeys(THREAD_VARIABLES, "1"),
                    **environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )

    def send(self, method: str, arguments: Sequence[Any]) -> None:
        with suppress(OSError):  # what became of it is told where the answer is missing
            self._connection.send_bytes(msgspec.msgpack.encode((method, arguments)))

    def receive(self, result: Any) -> Any:
        """Raises ChildFailedError if the process failed, ended, or did not answer in time."""
        try:
            if not self._connection.poll(ANSWER_TIMEOUT_S):
                raise ChildFailedError(f"{self._name} did not answer in {ANSWER_TIMEOUT_S:.0f} s")
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            log = self._log.read().decode(errors="replace").strip()
            raise ChildFailedError(f"{self._name} ended; its output: {log or 'none'}") from error
        decoded = msgspec.msgpack.decode(answer, type=Failed | tuple[result])
        if isinstance(decoded, Failed):
            raise ChildFailedError(f"{self._name} failed: {decoded.text.strip()}")
        return decoded[0]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Close its connection, which ends it; killed after `STOP_TIMEOUT_S`."""
        self.signal(signal.SIGCONT)
        self._connection.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._log.close()


class EngineProcesses(ExitStack):
    """All ranks of one engine, in rank order. Leaving it, or `close`, ends the processes.

    Raises:
        ChildFailedError: a rank did not start.
    """

    def __init__(
        self,
        engine_id: str,
        ranks: Sequence[RankOptions],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.engine_id = engine_id
        self.ranks = tuple(ranks)
        self._children: list[_Child] = []
        try:
            for each in ranks:
                child = _Child(f"{engine_id} {each.rank}", each, environment)
                self.callback(child.stop)
                self._children.append(child)
            self.call(RankProcess.ready)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        method: Callable[Concatenate[RankProcess, Parameters], Result],
        *arguments: Parameters.args,
        **_none: Parameters.kwargs,
    ) -> Callable[[], list[Result]]:
        """Call a method of every rank at once. The function that comes back waits for the results.

        Raises (that function):
            ChildFailedError: a rank failed or ended. All have answered, or never will.
        """
        return self._begin(method, [arguments] * len(self._children))

    def call(
        self,
        method: Callable[Concatenate[RankProcess, Parameters], Result],
        *arguments: Parameters.args,
        **_none: Parameters.kwargs,
    ) -> list[Result]:
        """`begin`, and wait: each rank's result."""
        return self._begin(method, [arguments] * len(self._children))()

    def call_each(
        self, method: Callable[[RankProcess, Argument], Result], arguments: Sequence[Argument]
    ) -> list[Result]:
        """`call` with an argument for each rank."""
        return self._begin(method, [(each,) for each in arguments])()

    def kill(self) -> None:
        """End all ranks at once, without a word to anybody."""
        for child in self._children:
            child.signal(signal.SIGKILL)
        self.close()

    def pause(self) -> None:
        """Keep all ranks from running, until `resume`: idle threads may use the processor, too."""
        for child in self._children:
            child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all ranks run; returns when they do."""
        for child in self._children:
            child.signal(signal.SIGCONT)
        self.call(RankProcess.ready)

    def _begin(
        self, method: Callable[..., Result], arguments: Sequence[Sequence[Any]]
    ) -> Callable[[], list[Result]]:
        result = get_type_hints(method)["return"]
        for child, each in zip(self._children, arguments, strict=True):
            child.send(method.__name__, each)

        def collect() -> list[Result]:
            outcomes = [_outcome(child, result) for child in self._children]
            for outcome in outcomes:
                if isinstance(outcome, ChildFailedError):
                    raise outcome
            return outcomes

        return collect


def _outcome(child: _Child, result: Any) -> Any:
    try:
        return child.receive(result)
    except ChildFailedError as error:
        return error
