"""Two engines in processes of their own; their schedulers and the router are this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.nixl import NixlSetting
from kvconnector.bench.options import Settings
from kvconnector.bench.processes import EngineProcesses
from kvconnector.bench.rank_process import EngineSpec, RankProcess, Started
from kvconnector.config import ConnectorConfig
from kvconnector.runtime import Scheduler, StepMetadata, WorkerOutput


class Engine(ExitStack):
    """An engine's processes, and its scheduler where it has a configuration. Leaving it, or `close`, ends them.

    `started` is what each rank said when its worker started.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: ConnectorConfig | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.spec = spec
        self.started: list[Started] = []
        try:
            self.ranks = self.enter_context(EngineProcesses(spec, environment))
            if config is not None:
                self.started = self.ranks.call(RankProcess.start_worker, config)
                self.scheduler = Scheduler(config, [each.metadata for each in self.started])
                self.callback(self.scheduler.close)
        except BaseException:
            self.close()
            raise

    def write(self, blocks: list[int], num_tokens: int) -> None:
        """Write the sequence into these blocks."""
        self.ranks.call(RankProcess.write, blocks, num_tokens)

    def offer(self, request_id: str, blocks: list[int], num_tokens: int) -> dict[str, Any]:
        """Hold a request for a consumer: its `kv_transfer_params`."""
        params = self.scheduler.offer(request_id, blocks=[blocks], num_tokens=num_tokens)
        self.ranks.call(RankProcess.step, self.scheduler.build_step(), "", "")
        return params

    def await_sent(self, request_id: str) -> None:
        """Until the consumer has confirmed."""
        self.ranks.call(RankProcess.step, StepMetadata(), "", request_id)
        self.scheduler.update(WorkerOutput(finished_sending=frozenset([request_id])))

    def want(
        self, request_id: str, params: dict[str, Any], blocks: list[int], num_tokens: int
    ) -> None:
        """Queue a request, and load it with the next step."""
        self.scheduler.on_new_request(request_id, params)
        external, _ = self.scheduler.matched_tokens(request_id, num_tokens + 1, 0)
        self.scheduler.load(request_id, blocks=[blocks], num_tokens=external)

    def load(self, request_id: str) -> tuple[float, set[str]]:
        """Seconds from asking the first rank until the last has reported the end, and the paths that it came by."""
        steps = self.ranks.call(RankProcess.step, self.scheduler.build_step(), request_id, "")
        self.loaded(request_id)
        seconds = max(each.ended_s for each in steps) - min(each.started_s for each in steps)
        return seconds, {each.path for each in steps if each.path}

    def loaded(self, request_id: str) -> None:
        """The scheduler hears that a load is over."""
        self.scheduler.update(WorkerOutput(finished_recving=frozenset([request_id])))
        self.scheduler.finish(request_id)


class Runner(ExitStack):
    """What takes its turn among contenders. A limit has nothing to check or to pause."""

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Move one request; seconds, one for each of the contender's names."""
        raise NotImplementedError

    def verify(self, transfer: Transfer) -> tuple[float, ...]:
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
        configs: tuple[ConnectorConfig | None, ConnectorConfig | None] = (None, None),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.deployment = deployment
        self._configs = dict(zip(("prefill", "decode"), configs, strict=True))
        try:
            self.prefill, self.decode = (
                self.enter_context(Engine(deployment.spec(engine_id), config, environment))
                for engine_id, config in self._configs.items()
            )
        except BaseException:
            self.close()
            raise

    def verify(self, transfer: Transfer) -> tuple[float, ...]:
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
        self.prefill.ranks.pause()
        self.decode.ranks.pause()

    def resume(self) -> None:
        """See `Runner.resume`."""
        self.prefill.ranks.resume()
        self.decode.ranks.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` have the last word.

    `paths` are those that requests took.
    """

    def __init__(self, deployment: Deployment, settings: Settings = MappingProxyType({})) -> None:
        config = deployment.options.config
        super().__init__(
            deployment,
            (config("prefill", "producer", settings), config("decode", "consumer", settings)),
        )
        self.paths: set[str] = set()
        self._num_requests = 0

    def restart(self, engine_id: str) -> None:
        """Kill an engine and start it again under the same id."""
        engine = self.prefill if engine_id == "prefill" else self.decode
        engine.ranks.kill()
        engine.close()
        started = self.enter_context(Engine(engine.spec, self._configs[engine_id]))
        setattr(self, engine_id, started)

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds from asking the first rank to load until the last one has reported the end."""
        request_id, num_tokens = self.new_request_id(), transfer.num_tokens
        params = self.prefill.offer(request_id, transfer.prefill_blocks, num_tokens)
        self.decode.want(request_id, params, transfer.decode_blocks, num_tokens)
        seconds, paths = self.decode.load(request_id)
        self.prefill.await_sent(request_id)
        self.paths |= paths
        return (seconds,)

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

    def __init__(self, deployment: Deployment, setting: NixlSetting) -> None:
        tls = deployment.options.tls
        environment = {**setting.environment, **({"UCX_TLS": tls} if tls else {})}
        super().__init__(deployment, environment=environment)
        try:
            opened, _ = (
                engine.ranks.call(RankProcess.open_agent, setting.num_threads)
                for engine in (self.prefill, self.decode)
            )
            self.decode.ranks.call_each(RankProcess.join_agent, opened)
        except BaseException:
            self.close()
            raise

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds with and without making the request, of the slowest rank."""
        reads = self.decode.ranks.call(
            RankProcess.read_blocks, transfer.prefill_blocks, transfer.decode_blocks
        )
        with_request, alone = zip(*reads, strict=True)
        return max(with_request), max(alone)
