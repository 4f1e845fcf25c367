"""Pairs of engines, with the connector or with another library; this process is their router."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine_process import ROUTER_HOP_S, Engine, EngineProcess
from kvconnector.bench.options import SettingsByPart
from kvconnector.bench.peers import PEERS
from kvconnector.bench.processes import CallFailedError
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.results import ContenderKind

ROLES = {"prefill": "producer", "decode": "consumer"}


class Runner:
    """A contender that takes turns with others. A limit has nothing to check or to pause."""

    name: str
    kind: ContenderKind

    @abstractmethod
    def run(self, *transfers: Transfer) -> float:
        """Move requests of one length at once. Returns the seconds until the last has arrived."""

    @abstractmethod
    def request_bytes(self, num_tokens: int) -> int:
        """Return the bytes that this contender writes for a request of `num_tokens`."""

    def verify(self, transfer: Transfer) -> float:
        """`run` onto poisoned memory. Raises ResultMismatchError: other bytes arrived than were sent."""
        return self.run(transfer)

    def pause(self) -> None:
        """Use no processor while others are timed."""

    def resume(self) -> None:
        """Undo `pause`."""


class ProcessPair(ExitStack, Runner):
    """Two engines' processes, with agents of `PEERS[peer]` or the connector. `close` ends them.

    `engines` has them by side, "prefill" and "decode".
    """

    def __init__(self, deployment: Deployment, peer: int | None = None) -> None:
        super().__init__()
        self.deployment = deployment
        self.engines: dict[str, EngineProcess] = {}
        self._peer = peer
        deployment.check_memory(["decode"] if deployment.options.connect else deployment.shapes)
        try:
            for side in deployment.shapes:
                self.engines[side] = self.enter_context(EngineProcess(deployment, side, peer=peer))
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def prefill(self) -> EngineProcess:
        return self.engines["prefill"]

    @property
    def decode(self) -> EngineProcess:
        return self.engines["decode"]

    @abstractmethod
    def _start(self) -> None:
        """Start both engines' ranks at once."""

    def verify(self, transfer: Transfer) -> float:
        self.prepare(transfer)
        seconds = self.run(transfer)
        self.check(transfer)
        return seconds

    def request_bytes(self, num_tokens: int) -> int:
        _, written = self.deployment.request_bytes(num_tokens)
        return written

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
        for engine in self.engines.values():
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines.values():
            engine.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` override those of the environment.

    `paths` are those that requests took, `lanes` the log lines about UCX's lanes, `warnings` those of the workers.
    """

    name: str = "kvconnector"
    kind: ContenderKind = "ours"

    def __init__(
        self, deployment: Deployment, settings: SettingsByPart = MappingProxyType({})
    ) -> None:
        self._settings = dict(settings)
        self.paths: set[str] = set()
        self.lanes: list[str] = []
        self._num_requests = 0
        super().__init__(deployment)

    def _start(self) -> None:
        starting = [self._begin(side) for side in self.engines]
        self.warnings = list(dict.fromkeys(text for end in starting for text in end()))

    def _begin(self, side: str) -> Callable[[], list[str]]:
        return self.engines[side].begin(Engine.start, side, ROLES[side], self._settings)

    @classmethod
    def without_conversion(cls, deployment: Deployment) -> EnginePair:
        """Return a pair to compare one with whose engines have two types: both have the prefill engine's."""
        pair = cls(deployment)
        pair.name, pair.kind = "kvconnector, without conversion", "variant"
        return pair

    def restart(self, side: str, environment: Mapping[str, str]) -> None:
        """End an engine, and start it again under the same id, with these variables."""
        self.engines[side].close()
        engine = EngineProcess(self.deployment, side, environment=environment)
        self.engines[side] = self.enter_context(engine)
        self._begin(side)()

    def run(self, *transfers: Transfer) -> float:
        requests = self.named(*transfers)
        self.offer_and_want(requests)
        self.prefill.call(Engine.turn, ROUTER_HOP_S)
        try:
            seconds, paths = self.decode.call(Engine.load, list(requests))
        except CallFailedError as error:
            if not self.deployment.options.connect:
                raise
            raise CallFailedError(
                f"{error}; workers listen on free ports of their hosts: are these open between the two?"
            ) from error
        self.prefill.call(Engine.await_sent, list(requests))
        self.paths |= paths
        return seconds

    def check(self, transfer: Transfer) -> None:
        super().check(transfer)
        found = self.prefill.call_ranks(RankProcess.lanes)
        self.lanes = sorted({text for texts in found for text in texts})

    def named(self, *transfers: Transfer) -> dict[str, Transfer]:
        """Return new requests by their names."""
        first = self._num_requests + 1
        self._num_requests += len(transfers)
        return {f"request-{number}": each for number, each in enumerate(transfers, first)}

    def offer_and_want(self, requests: Mapping[str, Transfer]) -> None:
        """Give requests to both schedulers, whose next steps hold and load them."""
        params = self.prefill.call(
            Engine.offer,
            [(name, each.prefill_blocks, each.num_tokens) for name, each in requests.items()],
        )
        pairs = zip(requests.items(), params, strict=True)
        self.decode.call(
            Engine.want,
            [(name, offer, each.decode_blocks, each.num_tokens) for (name, each), offer in pairs],
        )


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
