"""Two engines, with the connector or with NIXL, between which this process is the router."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack
from types import MappingProxyType

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.calls import CallFailedError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engine import Engine
from kvconnector.bench.nixl import NIXL_SETTINGS
from kvconnector.bench.options import Settings, control_settings
from kvconnector.bench.rank_process import RankProcess
from kvconnector.bench.remote import RemoteEngine
from kvconnector.config import ConnectorConfig


class Runner(ExitStack):
    """What takes its turn among contenders. A limit has nothing to check or to pause."""

    @abstractmethod
    def run(self, transfer: Transfer) -> float:
        """Move one request; seconds."""

    def verify(self, transfer: Transfer) -> float:
        """`run` onto poisoned memory. Raises ResultMismatchError if what arrives is not what was sent."""
        return self.run(transfer)

    def pause(self) -> None:
        """Use no processor while others are timed."""

    def resume(self) -> None:
        """Undo `pause`."""


class ProcessPair(Runner):
    """Two engines. Leaving it, or `close`, ends them."""

    def __init__(
        self,
        deployment: Deployment,
        configs: tuple[ConnectorConfig | None, ConnectorConfig | None],
        nixl: int = 0,
    ) -> None:
        super().__init__()
        self.deployment = deployment
        self._configs = dict(zip(("prefill", "decode"), configs, strict=True))
        self._nixl = nixl
        try:
            self.prefill, self.decode = map(self._start, self._configs)
        except BaseException:
            self.close()
            raise

    def _start(self, engine_id: str) -> Engine:
        """With the connector, or else for NIXL in that one of its settings; the producer where the options say."""
        options, spec = self.deployment.options, self.deployment.spec(engine_id)
        config = self._configs[engine_id]
        if engine_id == "prefill" and options.connect:
            return self.enter_context(RemoteEngine(options, spec, config, self._nixl))
        variables = {} if config else NIXL_SETTINGS[self._nixl].variables(options.tls)
        return self.enter_context(Engine(spec, config, variables))

    def verify(self, transfer: Transfer) -> float:
        """See `Runner.verify`."""
        self.prepare(transfer)
        seconds = self.run(transfer)
        self.check(transfer)
        return seconds

    def prepare(self, transfer: Transfer) -> None:
        """Write the sequence into the producer's blocks, and poison into the consumer's pools."""
        self.prefill.write(transfer.prefill_blocks, transfer.num_tokens)
        self.decode.ranks.call(RankProcess.poison)

    def check(self, transfer: Transfer) -> None:
        """Raises:
        ResultMismatchError: the consumer's pools do not hold what they should.
        """
        blocks, num_tokens = transfer.decode_blocks, transfer.num_tokens
        found = self.decode.ranks.call(RankProcess.mismatch, blocks, num_tokens)
        for rank, mismatch in zip(self.deployment.decode.ranks, found, strict=True):
            if mismatch:
                raise ResultMismatchError(f"{type(self).__name__}: {mismatch}", rank=str(rank))

    def pause(self) -> None:
        """See `Runner.pause`."""
        self.prefill.pause()
        self.decode.pause()

    def resume(self) -> None:
        """See `Runner.resume`."""
        self.prefill.resume()
        self.decode.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` have the last word.

    `paths` are those that requests took, `lanes` what UCX sends packed ones over.
    """

    def __init__(self, deployment: Deployment, settings: Settings = MappingProxyType({})) -> None:
        config = deployment.options.config
        if deployment.options.connect:
            settings = {**settings, "control": control_settings()}
        super().__init__(
            deployment,
            (config("prefill", "producer", settings), config("decode", "consumer", settings)),
        )
        self.paths: set[str] = set()
        self.lanes: list[str] = []
        self._num_requests = 0

    def restart(self, engine_id: str) -> None:
        """Kill an engine and start it again under the same id."""
        engine = self.prefill if engine_id == "prefill" else self.decode
        engine.ranks.kill()
        engine.close()
        setattr(self, engine_id, self._start(engine_id))

    def run(self, transfer: Transfer) -> float:
        """Seconds from asking the first rank to load until the last one has reported the end."""
        request_id, num_tokens = self.new_request_id(), transfer.num_tokens
        params = self.prefill.offer({request_id: transfer.prefill_blocks}, num_tokens)
        self.decode.want(request_id, params[request_id], transfer.decode_blocks, num_tokens)
        try:
            seconds, paths = self.decode.load(request_id)
        except CallFailedError as error:
            if not self.deployment.options.connect:
                raise
            raise CallFailedError(
                f"{error}; workers listen on free ports of their hosts: are these open between the two?"
            ) from error
        self.prefill.await_sent([request_id])
        self.paths |= paths
        return seconds

    def check(self, transfer: Transfer) -> None:
        """See `ProcessPair.check`."""
        super().check(transfer)
        self.lanes = self.prefill.lanes()

    def new_request_id(self) -> str:
        """For a request that both engines know by it."""
        self._num_requests += 1
        return f"request-{self._num_requests}"

    def offer_and_load(self, request_id: str, transfer: Transfer) -> None:
        """Both schedulers hear of a request; their next steps hold and load it."""
        params = self.prefill.scheduler.offer(
            request_id, blocks=[transfer.prefill_blocks], num_tokens=transfer.num_tokens
        )
        self.decode.want(request_id, params, transfer.decode_blocks, transfer.num_tokens)


class NixlPair(ProcessPair):
    """The same two engines, with an agent of NIXL's on each rank; ranks of equal number read from one another."""

    def __init__(self, deployment: Deployment, nixl: int) -> None:
        super().__init__(deployment, (None, None), nixl)
        try:
            opened, _ = (
                engine.open_agents(NIXL_SETTINGS[nixl].num_threads)
                for engine in (self.prefill, self.decode)
            )
            self.decode.ranks.call(RankProcess.join_agent, opened)
        except BaseException:
            self.close()
            raise

    def run(self, transfer: Transfer) -> float:
        """Seconds of the slowest rank."""
        blocks = transfer.prefill_blocks, transfer.decode_blocks
        return max(self.decode.ranks.call(RankProcess.read_blocks, *blocks))
