"""Two engines in processes of their own, whose schedulers and router are this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

from kvconnector.bench import messages as m
from kvconnector.bench.children import EngineProcesses
from kvconnector.bench.contract import BenchOptions, ResultMismatchError
from kvconnector.bench.owner import Owner
from kvconnector.bench.shapes import EngineShape
from kvconnector.config import ConnectorConfig
from kvconnector.ids import Rank
from kvconnector.runtime import (
    KVConsumerScheduler,
    KVProducerScheduler,
    StepMetadata,
    WorkerMetadata,
    WorkerOutput,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request's blocks on both sides."""

    num_tokens: int
    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The two engines, and how many blocks their pools have."""

    options: BenchOptions
    prefill: EngineShape
    decode: EngineShape
    prefill_num_blocks: int
    decode_num_blocks: int

    def opens(self) -> tuple[list[m.Open], list[m.Open]]:
        """The first message of each rank of both engines. On GPUs the ranks take turns, producer ranks first."""
        devices = devices_for(self.options.device, len(self.prefill.ranks), len(self.decode.ranks))
        return (
            self._opens(self.prefill, self.prefill_num_blocks, devices[0]),
            self._opens(self.decode, self.decode_num_blocks, devices[1]),
        )

    def _opens(self, shape: EngineShape, num_blocks: int, devices: Sequence[str]) -> list[m.Open]:
        return [
            m.Open(
                model=self.options.model,
                shape=shape,
                pp_rank=rank.pp_rank,
                tp_rank=rank.tp_rank,
                num_blocks=num_blocks,
                device=device,
                seed=self.options.seed,
                timeout_s=self.options.timeout_s,
            )
            for rank, device in zip(shape.ranks, devices, strict=True)
        ]


def devices_for(device: str, num_producers: int, num_consumers: int) -> tuple[list[str], list[str]]:
    """A device for every rank: consumers get the GPUs behind the producers', in a circle."""
    if device == "cpu":
        return ["cpu"] * num_producers, ["cpu"] * num_consumers
    import torch

    count = max(1, torch.cuda.device_count())
    names = [f"cuda:{index % count}" for index in range(num_producers + num_consumers)]
    return names[:num_producers], names[num_producers:]


class EnginePair(Owner):
    """Both engines with the connector running. `staging` settings go before those of the options."""

    def __init__(
        self, deployment: Deployment, staging: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self._options = options = deployment.options
        configs = [
            options.config(engine_id, role, staging)
            for engine_id, role in (("prefill", "producer"), ("decode", "consumer"))
        ]
        self._num_requests = 0
        with ExitStack() as exits:
            for_prefill, for_decode = deployment.opens()
            self._prefill = exits.enter_context(EngineProcesses("prefill", for_prefill))
            self._decode = exits.enter_context(EngineProcesses("decode", for_decode))
            self._producer = KVProducerScheduler(configs[0])
            exits.callback(self._producer.close)
            self._consumer = KVConsumerScheduler(configs[1])
            self._producer.set_worker_metadata(
                _registered(self._prefill, configs[0]),
                tp_size=deployment.prefill.tp,
                pp_size=deployment.prefill.pp,
            )
            self._consumer.set_worker_metadata(
                _registered(self._decode, configs[1]),
                tp_size=deployment.decode.tp,
                pp_size=deployment.decode.pp,
            )
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
        return (max(each.ended_s for each in steps) - min(each.started_s for each in steps),)

    def pause(self) -> None:
        """Idle workers sleep, and must be able to answer heartbeats: they are left running."""

    def resume(self) -> None:
        """Undo `pause`."""

    def _request(self, transfer: Transfer) -> _Request:
        """A new request as both schedulers tell it their workers."""
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        _, params = self._producer.request_finished(
            request_id,
            block_ids=[transfer.prefill_blocks],
            num_tokens=transfer.num_tokens,
            kv_transfer_params={"do_remote_decode": True},
            lease_duration_s=self._options.timeout_s,
        )
        hold = self._producer.build_step()
        self._consumer.on_new_request(request_id, params)
        external, _ = self._consumer.get_num_new_matched_tokens(
            request_id, num_prompt_tokens=transfer.num_tokens + 1, num_computed_tokens=0
        )
        self._consumer.update_state_after_alloc(
            request_id, block_ids=[transfer.decode_blocks], num_external_tokens=external
        )
        return _Request(request_id, hold, self._consumer.build_step())

    def _settle(self, requests: Sequence[_Request]) -> None:
        """Both schedulers hear that these are over."""
        request_ids = frozenset(each.request_id for each in requests)
        self._consumer.update(WorkerOutput(finished_recving=request_ids))
        for request_id in request_ids:
            self._consumer.request_finished(request_id)
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
