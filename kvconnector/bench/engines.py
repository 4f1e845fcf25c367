"""Engines, with the connector or with NIXL, and pairs of them, between which this process is the router."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import msgspec

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Blocks, Deployment, Transfer
from kvconnector.bench.options import TIMEOUT_S, Settings, control_settings
from kvconnector.bench.peers import PEERS, peer_variables
from kvconnector.bench.processes import EngineProcesses, RemoteProcesses
from kvconnector.bench.rank_process import CallFailedError, Driven, RankProcess
from kvconnector.bench.results import ContenderKind
from kvconnector.bench.shapes import ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import TransferTimeoutError
from kvconnector.runtime import Scheduler, WorkerOutput
from kvconnector.session import KVOutputAggregator

TURN_S = 5e-3
"""Longest pause of an idle engine's loop."""
ROUTER_HOP_S = 2e-3
"""From a producer's answer to a consumer's request for its blocks; only `handover` counts it."""
ROLES = {"prefill": "producer", "decode": "consumer"}


class Engine(ExitStack):
    """An engine's ranks, and once it is started their workers and in this process its scheduler. `close` ends all.

    The ranks start when it is made, and those of other engines may meanwhile.
    """

    def __init__(self, ranks: EngineProcesses, model: ModelShape) -> None:
        super().__init__()
        self.ranks = self.enter_context(ranks)
        self._model = model
        self._aggregator = KVOutputAggregator(len(ranks.spec.shape.ranks))

    def start(self, config: ConnectorConfig) -> Callable[[], None]:
        """Begin to start a worker in every rank. The function that comes back waits for them, and raises
        CallFailedError: a rank did not start.
        """
        workers = self.ranks.begin(RankProcess.start_worker, config)

        def end() -> None:
            self.started = workers()
            metadata = [each.metadata for each in self.started]
            retentions = [group.retention for group in self._model.groups] or None
            scheduler = Scheduler(config, metadata, retentions=retentions)
            self.scheduler = self.enter_context(scheduler)

        return end

    def offer(self, request_id: str, blocks: Blocks, num_tokens: int) -> dict[str, Any]:
        """Hold a request for a consumer with the next step: its `kv_transfer_params`."""
        firsts = self._first_blocks(num_tokens)
        return self.scheduler.offer(
            request_id, blocks=blocks, num_tokens=num_tokens, first_blocks=firsts
        )

    def _first_blocks(self, num_tokens: int) -> list[int]:
        shape = self.ranks.spec.shape
        return [first for first, _ in shape.first_blocks(self._model, num_tokens)]

    def turn(self, wait_s: float = TURN_S) -> WorkerOutput:
        """A turn of an idle engine's loop, which waits for at most `wait_s`: what has ended."""
        return self.begin_turn(wait_s)()

    def begin_turn(self, wait_s: float) -> Callable[[], WorkerOutput]:
        """Begin the scheduler's next step; the function that comes back ends it: what the ranks report."""
        collect = self.ranks.begin(RankProcess.turn, self.scheduler.build_step(), wait_s)

        def end() -> WorkerOutput:
            output = self._aggregator.aggregate(collect()) or WorkerOutput()
            self.scheduler.update(output)
            return output

        return end

    def compute(self, blocks: dict[str, Blocks], num_tokens: int, share: int, rate: float) -> float:
        """Compute these requests, `share` tokens of each in a step and `rate` of all in a second: the seconds."""
        steps = []
        for start in range(0, num_tokens, share):
            for request_id, ids in blocks.items():
                stop = min(num_tokens, start + share)
                self.scheduler.grow(request_id, blocks=ids, num_tokens=start, ahead_tokens=stop)
            seconds = min(share, num_tokens - start) * len(blocks) / rate
            steps.append((self.scheduler.build_step(), seconds))
        return max(self.ranks.call(RankProcess.compute, steps))

    def await_sent(self, request_ids: list[str]) -> None:
        """Until the consumer has confirmed. Raises TransferTimeoutError: it did not in time."""
        deadline = time.monotonic() + TIMEOUT_S
        while held := self.scheduler.held.intersection(request_ids):
            if time.monotonic() > deadline:
                raise TransferTimeoutError("blocks are still held", requests=sorted(held))
            self.turn()

    def want(
        self, request_id: str, params: dict[str, Any], blocks: Blocks, num_tokens: int
    ) -> None:
        """Queue a request, and load it with the next step."""
        self.scheduler.on_new_request(request_id, params)
        self.ask(request_id, blocks, num_tokens)

    def ask(self, request_id: str, blocks: Blocks, num_tokens: int) -> None:
        """Load a queued request with the next step."""
        external, _ = self.scheduler.matched_tokens(request_id, num_tokens + 1, 0)
        firsts = self._first_blocks(num_tokens)
        self.scheduler.load(request_id, blocks=blocks, num_tokens=external, first_blocks=firsts)

    def load(self, *request_ids: str) -> tuple[float, set[str]]:
        """Load requests with one step. Returns the seconds from asking the first rank until the last has reported the
        last end, and the paths that they came by.
        """
        steps = [([*request_ids], self.scheduler.build_step())]
        driven = self.ranks.call(RankProcess.drive, "idle", steps, True, 0.0)
        self.loaded(*request_ids)
        spans = [span for each in driven for span in each.spans_s]
        seconds = max(end for _, end in spans) - min(start for start, _ in spans)
        return seconds, set[str]().union(*(each.paths for each in driven))

    def loaded(self, *request_ids: str) -> None:
        """Report to the scheduler that loads are over."""
        self.scheduler.update(WorkerOutput(finished_recving=set(request_ids)))
        for request_id in request_ids:
            self.scheduler.finish(request_id)


def request_seconds(driven: list[Driven]) -> tuple[float, ...]:
    """Of each request, from when the first rank was asked for it until the last saw its end."""
    by_request = zip(*(each.spans_s for each in driven), strict=True)
    return tuple(
        max(end for _, end in spans) - min(start for start, _ in spans) for spans in by_request
    )


class Runner:
    """What takes its turn among contenders. A limit has nothing to check or to pause."""

    name: str
    kind: ContenderKind

    @abstractmethod
    def run(self, *transfers: Transfer) -> float:
        """Move requests of one length at once: seconds until the last is there."""

    def verify(self, transfer: Transfer) -> float:
        """`run` onto poisoned memory. Raises ResultMismatchError if what arrives is not what was sent."""
        return self.run(transfer)

    def pause(self) -> None:
        """Use no processor while others are timed."""

    def resume(self) -> None:
        """Undo `pause`."""


class ProcessPair(ExitStack, Runner):
    """Two engines' processes, with agents of `PEERS[peer]` or the connector. `close` ends them."""

    def __init__(self, deployment: Deployment, peer: int | None = None) -> None:
        super().__init__()
        self.deployment = deployment
        self._peer = peer
        try:
            self.decode, self.prefill = map(self._open, ("decode", "prefill"))
            self._start()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _start(self) -> None:
        """Start what runs in the ranks of both engines at once; the producer's last: a call to another host waits."""

    def _open(self, engine_id: str) -> Engine:
        options, spec = self.deployment.options, self.deployment.spec(engine_id)
        ranks: EngineProcesses
        if engine_id == "prefill" and options.connect:
            ranks = RemoteProcesses(options, spec, self._peer)
        else:
            ranks = EngineProcesses(spec, peer_variables(self._peer, options.tls))
        return self.enter_context(Engine(ranks, options.model))

    def verify(self, transfer: Transfer) -> float:
        self.prepare(transfer)
        seconds = self.run(transfer)
        self.check(transfer)
        return seconds

    def prepare(self, transfer: Transfer) -> None:
        """Write the sequence into the producer's blocks, and poison into the consumer's pools."""
        blocks, num_tokens = transfer.prefill_blocks, transfer.num_tokens
        self.prefill.ranks.call(RankProcess.write, blocks, num_tokens)
        self.decode.ranks.call(RankProcess.poison)

    def check(self, transfer: Transfer) -> None:
        """Raises ResultMismatchError: the consumer's pools do not hold what they should."""
        blocks, num_tokens = transfer.decode_blocks, transfer.num_tokens
        found = self.decode.ranks.call(RankProcess.mismatch, blocks, num_tokens)
        for rank, mismatch in zip(self.deployment.options.decode.ranks, found, strict=True):
            if mismatch:
                raise ResultMismatchError(f"{type(self).__name__}: {mismatch}", rank=str(rank))

    def pause(self) -> None:
        self.prefill.ranks.pause()
        self.decode.ranks.pause()

    def resume(self) -> None:
        self.prefill.ranks.resume()
        self.decode.ranks.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` have the last word.

    `paths` are those that requests took, `lanes` what UCX sends packed ones over.
    """

    name, kind = "kvconnector", "ours"

    def __init__(self, deployment: Deployment, settings: Settings = MappingProxyType({})) -> None:
        self._settings = settings
        self.paths: set[str] = set()
        self.lanes: list[str] = []
        self._num_requests = 0
        super().__init__(deployment)

    def _start(self) -> None:
        decode = self.decode.start(self._config("decode"))
        self.prefill.start(self._config("prefill"))()
        decode()

    def _config(self, engine_id: str) -> ConnectorConfig:
        options, settings = self.deployment.options, self._settings
        if options.connect:
            settings = {**settings, "control": msgspec.to_builtins(control_settings())}
        return options.config(engine_id, ROLES[engine_id], settings)

    def run(self, *transfers: Transfer) -> float:
        requests = [self.offer_and_want(each) for each in transfers]
        self.prefill.turn(ROUTER_HOP_S)
        try:
            seconds, paths = self.decode.load(*requests)
        except CallFailedError as error:
            if not self.deployment.options.connect:
                raise
            raise CallFailedError(
                f"{error}; workers listen on free ports of their hosts: are these open between the two?"
            ) from error
        self.prefill.await_sent(requests)
        self.paths |= paths
        return seconds

    def check(self, transfer: Transfer) -> None:
        super().check(transfer)
        found = self.prefill.ranks.call(RankProcess.lanes)
        self.lanes = sorted({text for texts in found for text in texts})

    def new_request_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def offer_and_want(self, transfer: Transfer) -> str:
        """Both schedulers hear of a request; their next steps hold and load it. Returns its name."""
        request_id, num_tokens = self.new_request_id(), transfer.num_tokens
        params = self.prefill.offer(request_id, transfer.prefill_blocks, num_tokens)
        self.decode.want(request_id, params, transfer.decode_blocks, num_tokens)
        return request_id


class PeerPair(ProcessPair):
    """The same two engines, with an agent of `PEERS[peer]` on each rank, which reads from that of equal number."""

    kind = "peer"

    def __init__(self, deployment: Deployment, peer: int) -> None:
        super().__init__(deployment, peer)
        self.name = PEERS[peer].name

    def _start(self) -> None:
        ranks = self.decode.ranks, self.prefill.ranks
        ours, theirs = [each.begin(RankProcess.open_agent, self._peer) for each in ranks]
        agents = theirs()
        ours()
        self.decode.ranks.call(RankProcess.join_agent, agents)

    def run(self, *transfers: Transfer) -> float:
        remote = [each.prefill_blocks for each in transfers]
        local = [each.decode_blocks for each in transfers]
        return max(self.decode.ranks.call(RankProcess.read_blocks, remote, local))
