"""A whole engine in processes of its own: `python -m kvconnector.bench.engine_process FD OPTIONS`.

Its scheduler runs in that process, and its ranks below it. Its parent exchanges only this module's messages and a
router's parameters with it, so that the engine may be of another release than its parent (see `releases`).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from kvconnector.bench.deployment import BlockLists, Deployment
from kvconnector.bench.limits import perftest_server, serve_stream
from kvconnector.bench.options import TIMEOUT_S, control_settings
from kvconnector.bench.peers import peer_variables
from kvconnector.bench.processes import (
    ANSWER_TIMEOUT_S,
    Child,
    Usage,
    decode_answer,
    encode_call,
    process_usage,
    serve_calls,
)
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.server import ServedProcess
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.runtime import Scheduler, StepMetadata, WorkerOutput
from kvconnector.session import KVOutputAggregator

TURN_S = 5e-3
"""Longest pause of an idle engine's loop."""
ROUTER_HOP_S = 2e-3
"""From a producer's answer to a consumer's request for its blocks; only `handover` counts it."""

Result = TypeVar("Result")


class Turned(msgspec.Struct, frozen=True):
    """Requests that ended in a turn of an engine's loop: those sent, and each load's error, empty if there is none."""

    sent: set[str]
    loads: dict[str, str]


class Computed(msgspec.Struct, frozen=True):
    """The `kv_transfer_params` of prompts that were computed, the seconds of all steps, when the last one ended, and
    when the prompts were offered, both in seconds of the host's monotonic clock.
    """

    params: list[dict[str, Any]]
    steps_s: float
    ended_s: float
    offered_s: float


class Engine(ExitStack):
    """The engine "prefill" or "decode" of a deployment. One call at a time, as an engine's loop makes them.

    Its ranks start when it is made; the first call says whether they did. Each method raises CallFailedError: a rank
    failed, or its process is gone.
    """

    def __init__(self, deployment: Deployment, side: str) -> None:
        super().__init__()
        self._deployment = deployment
        self._model, self._shape = deployment.options.model, deployment.shapes[side]
        self._names = [f"{side} {rank}" for rank in self._shape.ranks]
        self._aggregator = KVOutputAggregator(len(self._names))
        self._children: list[Child] = []
        self._scheduler: Scheduler
        self._perftest = self.enter_context(ExitStack())
        try:
            for index in range(len(self._names)):
                child = Child("rank_process", (deployment, side, index), {})
                self.callback(child.stop)
                self._children.append(child)
        except BaseException:
            self.close()
            raise

    # -- its ranks --

    def exchange(self, call: bytes) -> list[bytes]:
        """Call a method in every rank at once. Returns their answers, in rank order."""
        for child in self._children:
            child.send(call)
        return [child.receive() for child in self._children]

    def pause(self) -> None:
        """Keep all ranks from running, until `resume`; the parent stops this process afterwards."""
        for child in self._children:
            child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all ranks run; returns when they do."""
        for child in self._children:
            child.signal(signal.SIGCONT)
        self._call(RankProcess.ready)

    def usage(self) -> list[Usage]:
        """Return what the scheduler's process uses, and each rank."""
        return [process_usage(), *self._call(RankProcess.usage)]

    def serve_stream(self, nbytes: int) -> int:
        """Answer one client of a raw socket with up to `nbytes`. Returns the port on the control channel's host."""
        return serve_stream(control_settings().host, nbytes)

    def serve_perftest(self, library: str, variables: dict[str, str]) -> int:
        """Start a `perftest_server` with the caller's UCX variables, after ending the one before. Returns the port."""
        self._perftest.close()
        of_ucx = {name: value for name, value in variables.items() if name.startswith("UCX_")}
        return self._perftest.enter_context(perftest_server(library, of_ucx))

    def _call(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """Call a method of `RankProcess` in every rank. Raises CallFailedError: one of them failed."""
        answers = self.exchange(encode_call(method, arguments))
        pairs = zip(self._names, answers, strict=True)
        return [decode_answer(name, method, each) for name, each in pairs]

    # -- its loop --

    def start(self, engine_id: str, role: str, settings: dict[str, dict[str, Any]]) -> list[str]:
        """Start a worker in every rank, and the scheduler, with the settings of this process's environment, which
        `settings` override. Returns the workers' warnings.
        """
        options = self._deployment.options
        if options.connect:
            # the port is that of a `bench serve` on this host
            control = {**msgspec.to_builtins(control_settings()), "port": 0}
            settings = {"control": control, **settings}
        config = options.config(engine_id, role, settings)
        started = self._call(RankProcess.start_worker, config)
        retentions = [group.retention for group in self._model.groups] or None
        workers = [metadata for metadata, _ in started]
        self._scheduler = self.enter_context(Scheduler(config, workers, retentions=retentions))
        return list(dict.fromkeys(text for _, warnings in started for text in warnings))

    def offer(self, requests: list[tuple[str, BlockLists, int]]) -> list[dict[str, Any]]:
        """Hold requests (id, blocks, tokens) with the next step. Returns the `kv_transfer_params` of each."""
        return [
            self._scheduler.offer(
                request_id, blocks=blocks, num_tokens=tokens, first_blocks=self._firsts(tokens)
            )
            for request_id, blocks, tokens in requests
        ]

    def announce(self, params: dict[str, dict[str, Any]]) -> None:
        """Queue requests with these `kv_transfer_params`."""
        for request_id, each in params.items():
            self._scheduler.on_new_request(request_id, each)

    def want(self, requests: list[tuple[str, dict[str, Any], BlockLists, int]]) -> None:
        """Queue requests, and load them with the next step."""
        for request_id, params, blocks, num_tokens in requests:
            self._scheduler.on_new_request(request_id, params)
            self._order_load(request_id, blocks, num_tokens)

    def _order_load(self, request_id: str, blocks: BlockLists, num_tokens: int) -> None:
        """Load a queued request with the next step."""
        external, _ = self._scheduler.matched_tokens(request_id, num_tokens + 1, 0)
        firsts = self._firsts(num_tokens)
        self._scheduler.load(request_id, blocks=blocks, num_tokens=external, first_blocks=firsts)

    def _firsts(self, num_tokens: int) -> list[int]:
        return [first for first, _ in self._shape.first_blocks(self._model, num_tokens)]

    def abort(self, request_id: str) -> bool:
        """Abort a request, and withdraw its offer. Returns True if its blocks may still be written, until a turn
        reports its end.
        """
        self._scheduler.abort(request_id)
        return self._scheduler.is_loading(request_id)

    def step(self) -> StepMetadata:
        """Return the scheduler's next step, for the ranks. `update` takes its result."""
        return self._scheduler.build_step()

    def update(self, output: WorkerOutput) -> None:
        """Report to the scheduler what the ranks did, and finish the requests that were received."""
        self._scheduler.update(output)
        for request_id in output.finished_recving:
            self._scheduler.finish(request_id)

    def turn(self, wait_s: float) -> Turned:
        """Take a turn of an idle engine's loop, and wait for at most `wait_s`."""
        output = self._turn(wait_s)
        loads = dict.fromkeys(output.finished_recving, "") | output.failed_recving
        return Turned(output.finished_sending, loads)

    def _turn(self, wait_s: float) -> WorkerOutput:
        outputs = self._call(RankProcess.turn, self.step(), wait_s)
        output = self._aggregator.aggregate(outputs) or WorkerOutput()
        self.update(output)
        return output

    def await_sent(self, request_ids: list[str]) -> None:
        """Turn the loop until the consumer has confirmed. Raises TransferTimeoutError: it did not in time."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while held := self._scheduler.held & {*request_ids}:
            if time.monotonic() > deadline_s:
                raise TransferTimeoutError("blocks are still held", requests=sorted(held))
            self._turn(TURN_S)

    def load(self, request_ids: list[str]) -> tuple[float, set[str]]:
        """Load wanted requests with one step. Returns the seconds from asking the first rank until the last has
        reported the last end, and the paths of the loads.
        """
        driven = self._call(RankProcess.drive, "idle", [(request_ids, self.step())], True, 0.0)
        self.update(WorkerOutput(finished_recving=set(request_ids)))
        spans = [span for each in driven for span in each.spans_s]
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        return seconds, set[str]().union(*(each.paths for each in driven))

    def receive(self, requests: dict[str, tuple[BlockLists, int]]) -> tuple[list[float], set[str]]:
        """Turn the loop until announced or wanted requests (blocks, tokens) are loaded, the announced ones when they
        may be asked for. Returns when each load was over, in seconds of the host's monotonic clock, and their paths.

        Raises:
            KVConnectorError: a load failed.
            TransferTimeoutError: A load did not end in time.
        """
        ended_s, paths = list[float](), set[str]()
        deadline_s = time.perf_counter() + ANSWER_TIMEOUT_S
        while len(ended_s) < len(requests):
            output, now_s = self._turn(TURN_S), time.perf_counter()
            if output.failed_recving:
                raise KVConnectorError("loads failed", reasons=output.failed_recving)
            paths |= {each.path for each in output.stats.transfers}
            for request_id in output.producer_started:
                self._order_load(request_id, *requests[request_id])
            ended_s += [now_s] * len(output.finished_recving)
            if now_s > deadline_s:
                raise TransferTimeoutError("a prompt did not arrive in time")
        return ended_s, paths

    def compute(
        self, blocks: dict[str, BlockLists], num_tokens: int, share: int, rate: float
    ) -> Computed:
        """Compute requests of `num_tokens`, `share` tokens of each in a step and `rate` of all in a second, and offer
        them.
        """
        steps = []
        for start in range(0, num_tokens, share):
            for request_id, ids in blocks.items():
                stop = min(num_tokens, start + share)
                self._scheduler.grow(request_id, blocks=ids, num_tokens=start, ahead_tokens=stop)
            seconds = min(share, num_tokens - start) * len(blocks) / rate
            steps.append((self.step(), seconds))
        steps_s, ended_s = max(self._call(RankProcess.compute, steps)), time.perf_counter()
        params = self.offer([(request_id, ids, num_tokens) for request_id, ids in blocks.items()])
        self._turn(ROUTER_HOP_S)
        return Computed(params, steps_s, ended_s, time.perf_counter())


class EngineProcess(ExitStack):
    """The parent's end of an engine, whose processes start when it is made: at the `bench serve` of the options if it
    is the producer, else here, with `environment`. `close` ends them in order. `peer` is the number of its `PEERS`.

    Each call raises CallFailedError: the engine did not start, a rank failed, or a process is gone.
    """

    def __init__(
        self,
        deployment: Deployment,
        side: str,
        *,
        peer: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._side, self._ranks = side, deployment.shapes[side].ranks
        self._process: Child | ServedProcess
        if side == "prefill" and deployment.options.connect:
            self._process = ServedProcess(deployment, peer)
        else:
            variables = {**environment, **peer_variables(peer, deployment.options.tls)}
            self._process = Child("engine_process", (deployment, side), variables)
        self.callback(self._process.stop)
        self.host = self._process.host

    def begin(self, method: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
        """Call a method of `Engine`. The function that comes back waits for the result."""
        self._process.send(encode_call(method, arguments))
        return lambda: decode_answer(self._side, method, self._process.receive())

    def call(self, method: Callable[..., Result], *arguments: Any) -> Result:
        """`begin`, and wait."""
        return self.begin(method, *arguments)()

    def begin_ranks(
        self, method: Callable[..., Result], *arguments: Any
    ) -> Callable[[], list[Result]]:
        """Call a method of `RankProcess` in every rank at once. The function that comes back waits for their results,
        in rank order.
        """
        answers = self.begin(Engine.exchange, encode_call(method, arguments))
        return lambda: [
            decode_answer(f"{self._side} {rank}", method, each)
            for rank, each in zip(self._ranks, answers(), strict=True)
        ]

    def call_ranks(self, method: Callable[..., Result], *arguments: Any) -> list[Result]:
        """`begin_ranks`, and wait."""
        return self.begin_ranks(method, *arguments)()

    def pause(self) -> None:
        """Keep all of the engine's processes from running, until `resume`: idle threads may use the processor, too."""
        self.call(Engine.pause)
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of them run; returns when they do."""
        self._process.signal(signal.SIGCONT)
        self.call(Engine.resume)

    def kill(self) -> None:
        """End all processes at once, without a word to anybody: ranks die with their parent."""
        self._process.signal(signal.SIGKILL)
        self.close()


def _main(descriptor: str, options: str) -> None:
    deployment, side = msgspec.json.decode(options, type=tuple[Deployment, str])
    serve_calls(int(descriptor), lambda: Engine(deployment, side))


if __name__ == "__main__":
    _main(*sys.argv[1:])
