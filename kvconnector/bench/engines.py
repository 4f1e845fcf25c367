"""Two engines in processes of their own, whose schedulers and router are this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

from kvconnector.bench import messages as m
from kvconnector.bench.children import EngineProcesses
from kvconnector.bench.contract import ResultMismatchError
from kvconnector.bench.deployments import Deployment, Transfer
from kvconnector.bench.owner import Owner
from kvconnector.config import ConnectorConfig
from kvconnector.ids import Rank
from kvconnector.runtime import Scheduler, StepMetadata, WorkerMetadata, WorkerOutput


class EnginePair(Owner):
    """Both engines with the connector running. `staging` settings go before those of the options.

    `paths` are those that the requests of `run` took.
    """

    def __init__(
        self, deployment: Deployment, staging: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self._options = options = deployment.options
        configs = [
            options.config(engine_id, role, staging)
            for engine_id, role in (("prefill", "producer"), ("decode", "consumer"))
        ]
        self._num_requests = 0
        self.paths: set[str] = set()
        with ExitStack() as exits:
            for_prefill, for_decode = deployment.opens()
            self._prefill = exits.enter_context(EngineProcesses("prefill", for_prefill))
            self._decode = exits.enter_context(EngineProcesses("decode", for_decode))
            self._producer = Scheduler(configs[0], _registered(self._prefill, configs[0]))
            exits.callback(self._producer.close)
            self._consumer = Scheduler(configs[1], _registered(self._decode, configs[1]))
            super().__init__(exits)

    def prepare(self, transfer: Transfer) -> None:
        """Write the sequence on the producer's side, and poison on the consumer's."""
        write_both(self._prefill, self._decode, transfer)

    def check(self, transfer: Transfer) -> None:
        """Raises:
        ResultMismatchError: the consumer's pools do not hold what they should.
        """
        check_arrived(self._decode, transfer, "transfer")

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Move one request; seconds from asking the first rank to load until the last one has reported the end."""
        request = self._request(transfer)
        self._prefill.ask_all(m.Step(request.hold), m.Stepped)
        step = m.Step(request.load, received=request.request_id)
        steps = self._decode.ask_all(step, m.Stepped)
        self._prefill.ask_all(m.Step(StepMetadata(), released=request.request_id), m.Stepped)
        self._settle([request])
        self.paths.update(each.path for each in steps if each.path)
        return (max(each.ended_s for each in steps) - min(each.started_s for each in steps),)

    def drive(
        self, transfer: Transfer, loads: tuple[m.LoadName, m.LoadName], count: int, min_s: float = 0
    ) -> tuple[list[m.Driven], list[m.Driven]]:
        """Move `count` requests back to back beside both engines' loads, for `min_s` at least: what each rank saw."""
        requests = [self._request(transfer) for _ in range(count)]
        ids = tuple(each.request_id for each in requests)
        sides = (
            (self._prefill, loads[0], tuple(each.hold for each in requests)),
            (self._decode, loads[1], tuple(each.load for each in requests)),
        )
        for engine, load, steps in sides:
            order = m.Drive(
                load=load,
                request_ids=ids,
                steps=steps,
                one_by_one=engine is self._decode,
                min_s=min_s,
            )
            engine.tell_each([order] * len(engine.opens))
        decode = self._decode.hear_each(m.Driven)
        prefill = self._prefill.hear_each(m.Driven)
        self._settle(requests)
        return prefill, decode

    def pause(self) -> None:
        """Idle workers sleep, and must be able to answer heartbeats: they are left running."""

    def resume(self) -> None:
        """Undo `pause`."""

    def _request(self, transfer: Transfer) -> _Request:
        """A new request as both schedulers tell it their workers."""
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        params = self._producer.offer(
            request_id,
            blocks=[transfer.prefill_blocks],
            num_tokens=transfer.num_tokens,
            lease_duration_s=self._options.timeout_s,
        )
        hold = self._producer.build_step()
        self._consumer.on_new_request(request_id, params)
        external, _ = self._consumer.matched_tokens(request_id, transfer.num_tokens + 1, 0)
        self._consumer.load(request_id, blocks=[transfer.decode_blocks], num_tokens=external)
        return _Request(request_id, hold, self._consumer.build_step())

    def _settle(self, requests: Sequence[_Request]) -> None:
        """Both schedulers hear that these are over."""
        request_ids = frozenset(each.request_id for each in requests)
        self._consumer.update(WorkerOutput(finished_recving=request_ids))
        for request_id in request_ids:
            self._consumer.finish(request_id)
        self._producer.update(WorkerOutput(finished_sending=request_ids))


@dataclass(frozen=True, slots=True)
class _Request:
    """The producer's step that holds a request, and the consumer's that loads it."""

    request_id: str
    hold: StepMetadata
    load: StepMetadata


def _registered(engine: EngineProcesses, config: ConnectorConfig) -> list[WorkerMetadata]:
    return [each.metadata for each in engine.ask_all(m.StartWorker(config), m.Registered)]


def write_both(prefill: EngineProcesses, decode: EngineProcesses, transfer: Transfer) -> None:
    """The sequence into the producer's blocks, poison into the consumer's pools."""
    prefill.ask_all(m.Write(transfer.prefill_blocks, transfer.num_tokens), m.Ok)
    decode.ask_all(m.Poison(), m.Ok)


def check_arrived(decode: EngineProcesses, transfer: Transfer, what: str) -> None:
    """Raises:
    ResultMismatchError: some rank's pools do not hold what they should.
    """
    checked = decode.ask_all(m.Check(transfer.decode_blocks, transfer.num_tokens), m.Checked)
    for open_, each in zip(decode.opens, checked, strict=True):
        if each.mismatch:
            rank = Rank(open_.pp_rank, open_.tp_rank)
            raise ResultMismatchError(f"{what}: {each.mismatch}", rank=str(rank))
