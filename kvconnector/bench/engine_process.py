"""A whole engine in processes of its own: `python -m kvconnector.bench.engine_process FD OPTIONS`.

Its scheduler runs in that process, and its ranks below it. What its parent sends and receives is this module's and what
a router carries, so that the engine may be of another release than its parent (see `releases`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from kvconnector.bench.deployment import Blocks, Deployment
from kvconnector.bench.engines import ROLES, Engine
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.processes import Child, EngineProcesses
from kvconnector.bench.rank_process import (
    RankProcess,
    Usage,
    decode_answer,
    encode_call,
    process_usage,
    serve_calls,
)

Result = TypeVar("Result")


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, "prefill" or "decode", of a deployment; `settings` have the last word."""

    engine_id: str
    bench: BenchOptions
    in_flight: int
    settings: dict[str, dict[str, Any]]


class Turned(msgspec.Struct, frozen=True):
    """What ended in a turn of an engine's loop: requests sent, and loads, each with its error or an empty text."""

    sent: set[str]
    loads: dict[str, str]


class EngineProcess:
    """What the process of an engine answers. One call at a time, as an engine's loop makes them."""

    def __init__(self, options: EngineOptions) -> None:
        bench, engine_id = options.bench, options.engine_id
        spec = Deployment(bench, bench.tokens, options.in_flight).spec(engine_id)
        config = bench.config(engine_id, ROLES[engine_id], options.settings)
        ranks = EngineProcesses(spec, peer_variables(None, bench.tls))
        self._engine = Engine(ranks, bench.model)
        self._wanted: set[str] = set()
        try:
            self._engine.start(config)()
        except BaseException:
            self._engine.close()
            raise

    def close(self) -> None:
        self._engine.close()

    def offer(self, requests: list[tuple[str, Blocks, int]]) -> list[dict[str, Any]]:
        """Hold requests (id, blocks, tokens) with the next step. Returns the `kv_transfer_params` of each."""
        return [self._engine.offer(*each) for each in requests]

    def want(self, requests: list[tuple[str, dict[str, Any], Blocks, int]]) -> None:
        """Load requests with the next step."""
        for each in requests:
            self._engine.want(*each)
            self._wanted.add(each[0])

    def abort(self, request_id: str) -> bool:
        """Give up a wanted request. Returns True if its blocks may still be written, until a turn reports its end."""
        self._wanted.discard(request_id)
        self._engine.scheduler.finish(request_id)
        return self._engine.scheduler.is_loading(request_id)

    def turn(self, wait_s: float) -> Turned:
        """A turn of an idle engine's loop, which waits for at most `wait_s`."""
        output = self._engine.turn(wait_s)
        for request_id in output.finished_recving & self._wanted:
            self._wanted.discard(request_id)
            self._engine.scheduler.finish(request_id)
        loads = dict.fromkeys(output.finished_recving, "") | output.failed_recving
        return Turned(output.finished_sending, loads)

    def usage(self) -> list[Usage]:
        """What the scheduler's process uses, and that of each rank."""
        return [process_usage(), *self._engine.ranks.call(RankProcess.usage)]

    def exchange(self, call: bytes) -> list[bytes]:
        """Call a method in every rank: their answers."""
        return self._engine.ranks.exchange(call)

    def pause(self) -> None:
        """Stop the ranks; the parent stops this process afterwards."""
        self._engine.ranks.pause()

    def resume(self) -> None:
        """Let the ranks run; returns when they do."""
        self._engine.ranks.resume()


class WholeEngine(ExitStack):
    """The parent's end of an engine, which starts when it is made. `close` ends it in order.

    Each method raises CallFailedError: the engine did not start, a rank failed, or a process is gone.
    """

    def __init__(
        self, options: EngineOptions, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._name = options.engine_id
        self._child = Child("engine_process", options, environment)
        self.callback(self._child.stop)

    def begin(self, method: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Call a method of `EngineProcess`. The function that comes back waits for the result."""
        self._child.send(encode_call(method, arguments))
        return lambda: decode_answer(self._name, method, self._child.receive())

    def call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """`begin`, and wait."""
        return self.begin(method, *arguments)()

    def call_ranks(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call a method of `RankProcess` in every rank: the results, in rank order."""
        answers = self.call(EngineProcess.exchange, encode_call(method, arguments))
        return [decode_answer(f"a rank of {self._name}", method, each) for each in answers]

    def pause(self) -> None:
        """Keep all of the engine's processes from running, until `resume`."""
        self.call(EngineProcess.pause)
        self._child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of them run; returns when they do."""
        self._child.signal(signal.SIGCONT)
        self.call(EngineProcess.resume)

    def kill(self) -> None:
        """End all processes at once, without a word to anybody: ranks die with their parent."""
        self._child.signal(signal.SIGKILL)
        self.close()


def _main(descriptor: str, options: str) -> None:
    decoded = msgspec.json.decode(options, type=EngineOptions)
    serve_calls(int(descriptor), lambda: EngineProcess(decoded))


if __name__ == "__main__":
    _main(*sys.argv[1:])
