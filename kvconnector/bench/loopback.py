"""Both halves of two engines of one rank each inside this process, over the real transport and control channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from kvconnector.bench.owner import Owner
from kvconnector.bench.pools import RankPools
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import KVConnectorError, TransferTimeoutError
from kvconnector.ids import Rank
from kvconnector.runtime import Scheduler, Worker, WorkerOutput

RANK = Rank(0, 0)


class LoopbackPair(Owner):
    """A producer engine and a consumer engine with pools of `num_blocks`. A context manager.

    `settings` are sections of the configuration. `pools`, `producer`, `consumer` (workers), `prefill` and `decode`
    (schedulers) are for the caller's one thread, which plays both engines.
    """

    def __init__(
        self,
        model: ModelShape,
        shapes: tuple[EngineShape, EngineShape],
        num_blocks: tuple[int, int],
        *,
        device: str,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.pools = tuple(
            RankPools(model, shape, RANK, num_blocks=count, device=device)
            for shape, count in zip(shapes, num_blocks, strict=True)
        )
        base = {"control": {"insecure": True}, **settings}
        producing, consuming = (
            ConnectorConfig.from_mapping({"engine_id": f"loopback-{role}", "role": role, **base})
            for role in ("producer", "consumer")
        )
        told = model.description()
        with ExitStack() as exits:
            self.producer = Worker(producing, rank=RANK, model=told)
            exits.callback(self.producer.close)
            self.consumer = Worker(consuming, rank=RANK, model=told)
            exits.callback(self.consumer.close)
            for side, pools in zip((self.producer, self.consumer), self.pools, strict=True):
                side.register([pools.cache_group()])
            self.prefill = Scheduler(producing, [self.producer.handshake()])
            exits.callback(self.prefill.close)
            self.decode = Scheduler(consuming, [self.consumer.handshake()])
            exits.callback(self.decode.close)
            super().__init__(exits)

    def hold(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """A request ends on the producer: its parameters for the consumer."""
        params = self.prefill.offer(request_id, blocks=[block_ids], num_tokens=num_tokens)
        self.producer.start_step(self.prefill.build_step())
        return params

    def schedule(
        self, request_id: str, params: Mapping[str, Any], block_ids: Sequence[int], num_tokens: int
    ) -> None:
        """The request is queued on the consumer, and given these blocks; the next step loads it."""
        self.decode.on_new_request(request_id, params)
        external, _ = self.decode.matched_tokens(request_id, num_tokens + 1, 0)
        self.decode.load(request_id, blocks=[block_ids], num_tokens=external)

    def start(self) -> None:
        """The consumer's step with what was scheduled."""
        self.consumer.start_step(self.decode.build_step())

    def withdraw(self, request_id: str, deadline_s: float) -> None:
        """The consumer does not want a request any more; returns when both sides' blocks are free."""
        self.decode.finish(request_id)
        self.start()
        self.until_received(request_id, deadline_s)
        self.until_released(request_id, deadline_s)

    def until_received(self, request_id: str, deadline_s: float) -> WorkerOutput:
        """The consumer's output that ends the request, well or with a reason."""
        output = _wait(self.consumer, lambda each: request_id in each.finished_recving, deadline_s)
        self.decode.update(output)
        return output

    def until_released(self, request_id: str, deadline_s: float) -> None:
        """Until the producer's blocks are free."""
        output = _wait(self.producer, lambda each: request_id in each.finished_sending, deadline_s)
        self.prefill.update(output)

    def transfer(
        self, request_id: str, blocks: Sequence[Sequence[int]], num_tokens: int, deadline_s: float
    ) -> tuple[WorkerOutput, float]:
        """Move one request: the consumer's output, and seconds from the step that asks until it is told.

        Raises:
            KVConnectorError: the load failed. TransferTimeoutError: the monotonic `deadline_s` has passed.
        """
        self.schedule(
            request_id, self.hold(request_id, blocks[0], num_tokens), blocks[1], num_tokens
        )
        started_s = time.perf_counter()
        self.start()
        output = self.until_received(request_id, deadline_s)
        seconds = time.perf_counter() - started_s
        if reason := output.failed_recving.get(request_id):
            raise KVConnectorError(f"the load failed: {reason}")
        self.until_released(request_id, deadline_s)
        return output, seconds


def _wait(
    worker: Worker,
    is_over: Callable[[WorkerOutput], bool],
    deadline_s: float,
) -> WorkerOutput:
    """The output that `is_over` is true of; there is one request at a time, so others are empty."""
    while not is_over(output := worker.poll()):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferTimeoutError("a worker did not report a request in time")
        worker.wait(left_s)
    return output
