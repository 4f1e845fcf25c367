"""An engine's ranks as processes: starting them, calling their methods, and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from kvconnector.bench.options import THREAD_VARIABLES
from kvconnector.bench.perftest import perftest_server
from kvconnector.bench.rank_process import (
    EngineSpec,
    RankProcess,
    decode_answer,
    encode_call,
    failure,
)
from kvconnector.bench.sockets import serve_stream

LOG_TAIL_BYTES = 3000
ANSWER_TIMEOUT_S = 300.0
"""The first start of all compiles kernels."""
STOP_TIMEOUT_S = 10.0

Result = TypeVar("Result")


class _Child:
    """One process. Its stdout and stderr go to a file, whose end explains a failure."""

    def __init__(self, spec: EngineSpec, rank_index: int, environment: Mapping[str, str]) -> None:
        self._connection, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvconnector.bench.rank_process"),
                    *(str(theirs.fileno()), msgspec.json.encode((spec, rank_index)).decode()),
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

    def send(self, call: bytes) -> None:
        with suppress(OSError):  # what became of it is reported where the answer is missing
            self._connection.send_bytes(call)

    def receive(self) -> bytes:
        """Its answer, or that it ended or did not answer in time."""
        try:
            if not self._connection.poll(ANSWER_TIMEOUT_S):
                return failure(f"did not answer in {ANSWER_TIMEOUT_S:.0f} s")
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            log = self._log.read().decode(errors="replace").strip()
            return failure(f"ended; its output: {log or 'none'}")

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
    """All ranks of one engine, in rank order; the first call says whether they started. `close` ends them."""

    def __init__(
        self, spec: EngineSpec, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.spec = spec
        self.host = spec.control.host if spec.control else "127.0.0.1"
        self._children: list[_Child] = []
        self._perftest = self.enter_context(ExitStack())
        try:
            for index in range(len(spec.shape.ranks)):
                child = _Child(spec, index, environment)
                self.callback(child.stop)
                self._children.append(child)
        except BaseException:
            self.close()
            raise

    def begin(self, method: Callable[..., Result], *arguments: Any) -> Callable[[], list[Result]]:
        """Call a method of `RankProcess` in every rank at once. The function that comes back waits for the results, and
        raises CallFailedError: a rank failed or ended. All have answered before that, or never will.
        """
        answers = self._send(encode_call(method, arguments))
        names = [f"{self.spec.engine_id} {rank}" for rank in self.spec.shape.ranks]
        return lambda: [
            decode_answer(name, method, answer)
            for name, answer in zip(names, answers(), strict=True)
        ]

    def call(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """`begin`, and wait: each rank's result."""
        return self.begin(method, *arguments)()

    def _send(self, call: bytes) -> Callable[[], list[bytes]]:
        for child in self._children:
            child.send(call)
        return lambda: [child.receive() for child in self._children]

    def exchange(self, call: bytes) -> list[bytes]:
        return self._send(call)()

    def serve_stream(self, nbytes: int) -> int:
        """Answer one client of a raw socket with up to `nbytes`: the port on `host`."""
        return serve_stream(self.host, nbytes)

    def serve_perftest(self, library: str, variables: dict[str, str]) -> int:
        """Start `ucx_perftest` for one client, in the place of the one before: its port. See `perftest_server`."""
        self._perftest.close()
        return self._perftest.enter_context(perftest_server(library, variables))

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
