"""Pairs of engines, with the connector or with another library; this process is their router."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from types import MappingProxyType

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import ROUTER_HOP_S, Engine, EngineProcess
from kvconnector.bench.options import Settings
from kvconnector.bench.peers import PEERS, peer_variables
from kvconnector.bench.processes import CallFailedError
from kvconnector.bench.rank_process import Driven, RankProcess
from kvconnector.bench.results import ContenderKind
from kvconnector.bench.server import ServedEngine

ROLES = {"prefill": "producer", "decode": "consumer"}


class Runner:
    """A contender that takes turns with others. A limit has nothing to check or to pause."""

    name: str
    kind: ContenderKind

    @abstractmethod
    def run(self, *transfers: Transfer) -> float:
        """Move requests of one length at once. Returns the seconds until the last has arrived."""

    def verify(self, transfer: Transfer) -> float:
        """`run` onto poisoned memory. Raises ResultMismatchError: other bytes arrived than were sent."""
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
        """Start both engines' ranks at once."""

    def _open(self, side: str) -> EngineProcess:
        if side == "prefill" and self.deployment.options.connect:
            return self.enter_context(ServedEngine(self.deployment, self._peer))
        variables = peer_variables(self._peer, self.deployment.options.tls)
        return self.enter_context(EngineProcess(self.deployment, side, variables))

    def verify(self, transfer: Transfer) -> float:
        self.prepare(transfer)
        seconds = self.run(transfer)
        self.check(transfer)
        return seconds

    def prepare(self, transfer: Transfer) -> None:
        """Write the sequence into the producer's blocks, and poison into the consumer's pools."""
        blocks, num_tokens = transfer.prefill_blocks, transfer.num_tokens
        self.prefill.call_ranks(RankProcess.write, blocks, num_tokens)
        self.decode.call_ranks(RankProcess.poison)

    def check(self, transfer: Transfer) -> None:
        """Compare the consumer's pools with the request. Raises ResultMismatchError: they differ."""
        blocks, num_tokens = transfer.decode_blocks, transfer.num_tokens
        found = self.decode.call_ranks(RankProcess.mismatch, blocks, num_tokens)
        for rank, mismatch in zip(self.deployment.options.decode.ranks, found, strict=True):
            if mismatch:
                raise ResultMismatchError(f"{type(self).__name__}: {mismatch}", rank=str(rank))

    def pause(self) -> None:
        self.prefill.pause()
        self.decode.pause()

    def resume(self) -> None:
        self.prefill.resume()
        self.decode.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` override those of the environment.

    `paths` are those that requests took, `lanes` the log lines about UCX's lanes, `warnings` those of the workers.
    """

    name, kind = "kvconnector", "ours"

    def __init__(self, deployment: Deployment, settings: Settings = MappingProxyType({})) -> None:
        self._settings = dict(settings)
        self.paths: set[str] = set()
        self.lanes: list[str] = []
        self._num_requests = 0
        super().__init__(deployment)

    def _start(self) -> None:
        sides = {"prefill": self.prefill, "decode": self.decode}
        starting = [
            engine.begin(Engine.start, side, ROLES[side], self._settings)
            for side, engine in sides.items()
        ]
        self.warnings = list(dict.fromkeys(text for end in starting for text in end()))

    def run(self, *transfers: Transfer) -> float:
        requests = self.offer_and_want(*transfers)
        self.prefill.call(Engine.turn, ROUTER_HOP_S)
        try:
            seconds, paths = self.decode.call(Engine.load, requests)
        except CallFailedError as error:
            if not self.deployment.options.connect:
                raise
            raise CallFailedError(
                f"{error}; workers listen on free ports of their hosts: are these open between the two?"
            ) from error
        self.prefill.call(Engine.await_sent, requests)
        self.paths |= paths
        return seconds

    def check(self, transfer: Transfer) -> None:
        super().check(transfer)
        found = self.prefill.call_ranks(RankProcess.lanes)
        self.lanes = sorted({text for texts in found for text in texts})

    def new_request_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def offer_and_want(self, *transfers: Transfer) -> list[str]:
        """Give requests to both schedulers, whose next steps hold and load them. Returns their names."""
        named = {self.new_request_id(): each for each in transfers}
        offers = [(name, each.prefill_blocks, each.num_tokens) for name, each in named.items()]
        params = self.prefill.call(Engine.offer, offers)
        pairs = zip(named.items(), params, strict=True)
        self.decode.call(
            Engine.want,
            [(name, offer, each.decode_blocks, each.num_tokens) for (name, each), offer in pairs],
        )
        return list(named)


class PeerPair(ProcessPair):
    """The same two engines, with an agent of `PEERS[peer]` on each rank, which reads from its counterpart."""

    kind = "peer"

    def __init__(self, deployment: Deployment, peer: int) -> None:
        super().__init__(deployment, peer)
        self.name = PEERS[peer].name

    def _start(self) -> None:
        engines = self.decode, self.prefill
        ours, theirs = [each.begin_ranks(RankProcess.open_agent, self._peer) for each in engines]
        agents = theirs()
        ours()
        self.decode.call_ranks(RankProcess.join_agent, agents)

    def run(self, *transfers: Transfer) -> float:
        remote = [each.prefill_blocks for each in transfers]
        local = [each.decode_blocks for each in transfers]
        return max(self.decode.call_ranks(RankProcess.read_blocks, remote, local))


def request_seconds(driven: list[Driven]) -> tuple[float, ...]:
    """Return the seconds of each request, from asking the first rank until the last rank saw its end."""
    by_request = zip(*(each.spans_s for each in driven), strict=True)
    return tuple(
        max(end for _, end in spans) - min(start for start, _ in spans) for spans in by_request
    )
