"""Two engines in processes of their own, whose schedulers and router are this process; and the requests they move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from kvconnector.bench import ResultMismatchError
from kvconnector.bench.contract import SEED, BenchOptions, Gpus, Settings
from kvconnector.bench.engine_loop import Drive, Driven, LoadName
from kvconnector.bench.nixl import NixlSetting
from kvconnector.bench.pools import choose_blocks
from kvconnector.bench.processes import EngineProcesses
from kvconnector.bench.rank_process import RankOptions, RankProcess, Started
from kvconnector.bench.shapes import EngineShape
from kvconnector.bench.units import format_bytes
from kvconnector.errors import ConfigError
from kvconnector.runtime import Scheduler, StepMetadata, WorkerOutput

SPARE_FACTOR = 2
"""Blocks of a pool for each block of the longest request."""
LENGTH_SPREAD = 16
"""Requests of one case are longer or shorter than its name says by up to this part: no two of a service are alike."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request's blocks on both sides."""

    num_tokens: int
    prefill_blocks: list[int]
    decode_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The two engines, and the sizes of the requests that their pools have room for."""

    options: BenchOptions
    prefill: EngineShape
    decode: EngineShape
    tokens: tuple[int, ...]
    in_flight: int = 1

    @classmethod
    def of(cls, options: BenchOptions, tokens: Sequence[int], *, in_flight: int = 1) -> Deployment:
        """As the options cut the engines; `in_flight` longest requests fit their pools at once, and as many more."""
        prefill, decode = options.prefill or EngineShape(), options.decode or EngineShape()
        return cls(options, prefill, decode, tuple(tokens), in_flight)

    def __str__(self) -> str:
        return f"{self.prefill} to {self.decode}"

    def case_name(self, num_tokens: int) -> str:
        """What moves, from where to where."""
        options = self.options
        size = format_bytes(options.model.token_bytes * num_tokens)
        order = "scattered" if options.scattered else "contiguous"
        return f"{options.model.name}, {num_tokens} tokens, {size} {order}, {self}"

    def lengths(self, num_tokens: int, count: int) -> list[int]:
        """Tokens of `count` requests around `num_tokens`, which is their median; with a peer in whole blocks."""
        unit = self._unit
        spread = num_tokens // LENGTH_SPREAD // unit
        steps = np.linspace(-spread, spread, count) if count > 1 else np.zeros(count)
        shuffled = np.random.default_rng(SEED).permutation(np.rint(steps))
        return [num_tokens + unit * int(step) for step in shuffled]

    def transfer(self, num_tokens: int) -> Transfer:
        """A request; those of other lengths have the first of the same blocks."""

        def choose(shape: EngineShape) -> list[int]:
            longest = max(self.tokens) + max(self.tokens) // LENGTH_SPREAD
            chosen = choose_blocks(
                shape.num_blocks(longest),
                self.num_blocks(shape),
                scattered=self.options.scattered,
                rng=np.random.default_rng(SEED),
            )
            return chosen[: shape.num_blocks(num_tokens)]

        return Transfer(num_tokens, choose(self.prefill), choose(self.decode))

    def devices(self) -> tuple[list[str], list[str]]:
        """A device for every rank of both engines. On GPUs an engine's ranks take turns on the GPUs that the options
        name for it; without these, consumers get the GPUs behind the producers', in a circle.

        Raises:
            ConfigError: a GPU is named that is not there.
        """
        sizes = len(self.prefill.ranks), len(self.decode.ranks)
        if self.options.device == "cpu":
            return ["cpu"] * sizes[0], ["cpu"] * sizes[1]
        import torch

        count = max(1, torch.cuda.device_count())
        producers = self.options.gpus.prefill or tuple(range(count))
        consumers = self.options.gpus.decode or tuple(
            (sizes[0] + index) % count for index in range(count)
        )
        if max(*producers, *consumers) >= count:
            raise ConfigError("no such GPU", prefill=producers, decode=consumers, num_gpus=count)
        prefill, decode = (
            [f"cuda:{chosen[index % len(chosen)]}" for index in range(size)]
            for chosen, size in zip((producers, consumers), sizes, strict=True)
        )
        return prefill, decode

    def ranks(self) -> tuple[list[RankOptions], list[RankOptions]]:
        """The processes of both engines."""
        prefill, decode = (
            [
                RankOptions(
                    model=self.options.model,
                    shape=shape,
                    rank=rank,
                    num_blocks=self.num_blocks(shape),
                    device=device,
                )
                for rank, device in zip(shape.ranks, devices, strict=True)
            ]
            for shape, devices in zip((self.prefill, self.decode), self.devices(), strict=True)
        )
        return prefill, decode

    @property
    def _unit(self) -> int:
        """What lengths differ by: a peer reads whole blocks."""
        shapes = (self.prefill, self.decode)
        return math.lcm(*(each.virtual_block_tokens for each in shapes)) if self.options.peer else 1

    def num_blocks(self, shape: EngineShape) -> int:
        """Blocks of the pools of an engine of this shape."""
        longest = max(self.tokens) + max(self.tokens) // LENGTH_SPREAD
        return SPARE_FACTOR * self.in_flight * shape.num_blocks(longest)


class ProcessPair(ExitStack):
    """Both engines' processes, without what moves the bytes. Leaving it, or `close`, ends them."""

    def __init__(
        self, deployment: Deployment, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.deployment = deployment
        prefill, decode = deployment.ranks()
        try:
            self.prefill = self.enter_context(EngineProcesses("prefill", prefill, environment))
            self.decode = self.enter_context(EngineProcesses("decode", decode, environment))
        except BaseException:
            self.close()
            raise

    def prepare(self, transfer: Transfer) -> None:
        """Write the sequence into the producer's blocks, and poison into the consumer's pools."""
        self.prefill.call(RankProcess.write, transfer.prefill_blocks, transfer.num_tokens)
        self.decode.call(RankProcess.poison)

    def check(self, transfer: Transfer) -> None:
        """Raises:
        ResultMismatchError: the consumer's pools do not hold what they should.
        """
        blocks, num_tokens = transfer.decode_blocks, transfer.num_tokens
        found = self.decode.call(RankProcess.mismatch, blocks, num_tokens)
        for each, mismatch in zip(self.decode.ranks, found, strict=True):
            if mismatch:
                raise ResultMismatchError(f"{type(self).__name__}: {mismatch}", rank=str(each.rank))

    def pause(self) -> None:
        """Use no processor while others are timed."""
        self.prefill.pause()
        self.decode.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self.prefill.resume()
        self.decode.resume()


class EnginePair(ProcessPair):
    """Both engines with the connector running. `settings` have the last word.

    `paths` are those that requests took; `started` is what each rank said when its worker started.
    """

    def __init__(self, deployment: Deployment, settings: Settings = MappingProxyType({})) -> None:
        self._configs = {
            engine_id: deployment.options.config(engine_id, role, settings)
            for engine_id, role in (("prefill", "producer"), ("decode", "consumer"))
        }
        super().__init__(deployment)
        self.paths: set[str] = set()
        self.started: list[Started] = []
        self._num_requests = 0
        try:
            self.producer = self._scheduler(self.prefill)
            self.consumer = self._scheduler(self.decode)
        except BaseException:
            self.close()
            raise

    def restart(self, engine_id: str) -> None:
        """Kill an engine and start it again under the same id."""
        prefill, decode = self.deployment.ranks()
        if engine_id == "prefill":
            self.prefill.kill()
            self.producer.close()
            self.prefill = self.enter_context(EngineProcesses(engine_id, prefill))
            self.producer = self._scheduler(self.prefill)
        else:
            self.decode.kill()
            self.consumer.close()
            self.decode = self.enter_context(EngineProcesses(engine_id, decode))
            self.consumer = self._scheduler(self.decode)

    def _scheduler(self, engine: EngineProcesses) -> Scheduler:
        """Once the engine's workers have started."""
        config = self._configs[engine.engine_id]
        started = engine.call(RankProcess.start_worker, config)
        self.started += started
        scheduler = Scheduler(config, [each.metadata for each in started])
        self.callback(scheduler.close)
        return scheduler

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Move one request; seconds from asking the first rank to load until the last one has reported the end."""
        request = self._request(transfer)
        name = request.request_id
        self.prefill.call(RankProcess.step, request.hold, "", "")
        steps = self.decode.call(RankProcess.step, request.load, name, "")
        self.prefill.call(RankProcess.step, StepMetadata(), "", name)
        self._settle([request])
        self.paths.update(each.path for each in steps if each.path)
        return (max(each.ended_s for each in steps) - min(each.started_s for each in steps),)

    def drive(
        self, transfers: Sequence[Transfer], loads: tuple[LoadName, LoadName], min_s: float = 0
    ) -> tuple[list[Driven], list[Driven]]:
        """Move requests back to back beside both engines' loads, for `min_s` at least: what each rank saw."""
        requests = [self._request(each) for each in transfers]
        order = Drive(
            load=loads[0],
            request_ids=[each.request_id for each in requests],
            steps=[each.hold for each in requests],
            one_by_one=False,
            min_s=min_s,
        )
        load = Drive(
            load=loads[1],
            request_ids=order.request_ids,
            steps=[each.load for each in requests],
            one_by_one=True,
            min_s=min_s,
        )
        prefill = self.prefill.begin(RankProcess.drive, order)
        decode = self.decode.call(RankProcess.drive, load)
        driven = prefill(), decode
        self._settle(requests)
        return driven

    def _request(self, transfer: Transfer) -> _Request:
        """A new request as both schedulers tell it their workers."""
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        self.offer_and_load(request_id, transfer)
        return _Request(request_id, self.producer.build_step(), self.consumer.build_step())

    def offer_and_load(self, request_id: str, transfer: Transfer) -> None:
        """Both schedulers hear of a request, as engines and a router would tell them."""
        params = self.producer.offer(
            request_id, blocks=[transfer.prefill_blocks], num_tokens=transfer.num_tokens
        )
        self.consumer.on_new_request(request_id, params)
        external, _ = self.consumer.matched_tokens(request_id, transfer.num_tokens + 1, 0)
        self.consumer.load(request_id, blocks=[transfer.decode_blocks], num_tokens=external)

    def _settle(self, requests: Sequence[_Request]) -> None:
        """Both schedulers hear that these are over."""
        request_ids = frozenset(each.request_id for each in requests)
        self.consumer.update(WorkerOutput(finished_recving=request_ids))
        for request_id in request_ids:
            self.consumer.finish(request_id)
        self.producer.update(WorkerOutput(finished_sending=request_ids))


@dataclass(frozen=True, slots=True)
class _Request:
    """The producer's step that holds a request, and the consumer's that loads it."""

    request_id: str
    hold: StepMetadata
    load: StepMetadata


class NixlPair(ProcessPair):
    """The same two engines, with an agent of NIXL's on each rank; ranks of equal number read from one another."""

    def __init__(self, deployment: Deployment, setting: NixlSetting) -> None:
        tls = deployment.options.transport.tls
        super().__init__(deployment, {**setting.environment, **({"UCX_TLS": tls} if tls else {})})
        try:
            opened, _ = (
                engine.call(RankProcess.open_agent, setting.num_threads)
                for engine in (self.prefill, self.decode)
            )
            self.decode.call_each(RankProcess.join_agent, opened)
        except BaseException:
            self.close()
            raise

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds with and without making the request, of the slowest rank."""
        reads = self.decode.call(
            RankProcess.read_blocks, transfer.prefill_blocks, transfer.decode_blocks
        )
        with_request, alone = zip(*reads, strict=True)
        return max(with_request), max(alone)


def refuse_what_nixl_cannot(deployment: Deployment) -> None:
    """Raises:
    ConfigError: the engines are cut differently, or a request does not fill its blocks.
    """
    unit = deployment.prefill.virtual_block_tokens
    if deployment.prefill != deployment.decode:
        raise ConfigError(
            "the peer reads whole blocks: both engines need the same tp, pp, block and layout",
            prefill=str(deployment.prefill),
            decode=str(deployment.decode),
        )
    if any(tokens % unit for tokens in deployment.tokens):
        raise ConfigError(
            "the peer reads whole blocks: requests must fill them",
            tokens=list(deployment.tokens),
            block_tokens=unit,
        )


def one_pair(deployment: Deployment) -> Deployment | None:
    """The same requests from one rank's GPU to one other's; None on the CPU, and where there is only one pair."""
    prefill, decode = deployment.prefill.on_one_rank, deployment.decode.on_one_rank
    is_one = (prefill, decode) == (deployment.prefill, deployment.decode)
    if is_one or deployment.options.device == "cpu":
        return None
    first, second = (int(devices[0].partition(":")[2]) for devices in deployment.devices())
    options = msgspec.structs.replace(deployment.options, gpus=Gpus((first,), (second,)))
    return Deployment(options, prefill, decode, deployment.tokens)
