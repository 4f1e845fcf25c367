"""The engine: requests in, tokens out, one loop that schedules, steps the ranks and records the results."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from kvconnector.errors import KVConnectorError
from minillm.cache_groups import cache_limits, layer_groups, pool_sizes
from minillm.config import EngineConfig
from minillm.processes import ChildFailedError
from minillm.rank_client import RankGroup
from minillm.request import Request, RequestUpdate
from minillm.request_blocks import RequestBlocks
from minillm.scheduler import Scheduler
from minillm.transfer import SchedulerTransfer, create_scheduler_transfer

logger = logging.getLogger(__name__)

WATERMARK = 0.01
IDLE_WAIT_S = 0.005
"""Longest pause of a step that only waits for the connector, and so the longest delay of a new request."""
HOUSEKEEPING_S = 0.25
"""Period of steps while there is no request at all: the connector still takes care of peers and leases."""


def create_scheduler(config: EngineConfig) -> Scheduler:
    """Return the scheduler of an engine, with the blocks that fit into its memory, and no connector yet."""
    return Scheduler(
        RequestBlocks(
            layer_groups(config.model, config.cache, config.parallel.dcp_size),
            pool_sizes(config),
            watermark=WATERMARK,
            step_tokens=config.max_batched_tokens,
            prefix_caching=config.caches_prefixes,
            scatter_seed=config.cache.scatter_seed,
            lookahead=config.cache.lookahead,
        ),
        SchedulerTransfer(),
        max_model_len=config.model.max_model_len,
        max_encoder_len=cache_limits(config).max_num_encoder_tokens,
        max_batched_tokens=config.max_batched_tokens,
        max_running=config.max_running,
        failure_policy=config.failure_policy,
    )


class EngineDeadError(Exception):
    """The engine can serve no more; the text says why."""


class Engine:
    """One engine with its rank processes. Use as an async context manager; all calls from one event loop."""

    def __init__(self, config: EngineConfig, log_dir: Path) -> None:
        self.config = config
        self.failure: Exception | None = None
        self.steps_total = 0
        self.tokens_total = 0
        self._ranks = RankGroup(config, log_dir)
        self.scheduler = create_scheduler(config)
        self._queues: dict[str, asyncio.Queue[RequestUpdate | Exception]] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Engine:
        try:
            ready = await self._ranks.start()
            metadata = [message.connector for message in ready]
            self.scheduler.transfer = create_scheduler_transfer(self.config, metadata)
        except BaseException:
            await self.close()
            raise
        self._loop_task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail what is unfinished, end the ranks, close the connector. Bounded and idempotent."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        self._fail(EngineDeadError("the engine is shutting down"))
        try:
            await self._ranks.close()
        finally:
            self.scheduler.transfer.close()

    async def generate(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """Run one request. Yields an update per token; the last of each answer has a finish reason. Closing the
        generator early aborts the request.

        Raises:
            LocalError: the request can never be served; it was not queued.
            RemoteError: its transfer parameters cannot be used; it was not queued.
            EngineDeadError: a rank or the connector failed.
        """
        if self.failure is not None:
            raise EngineDeadError(self.failure_summary) from self.failure
        unfinished = request.num_answers
        self.scheduler.add(request)
        queue: asyncio.Queue[RequestUpdate | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._wake.set()
        try:
            while unfinished:
                update = await queue.get()
                if isinstance(update, Exception):
                    raise EngineDeadError(self.failure_summary) from update
                if update.finish_reason is not None:
                    # a request that fails before it forks has one answer
                    unfinished = 0 if update.finish_reason == "error" else unfinished - 1
                yield update
        finally:
            del self._queues[request.request_id]
            self.scheduler.transfer.stats.pop(request.request_id, None)
            if unfinished:
                self.scheduler.abort(request.request_id)
                self._wake.set()

    @property
    def failure_summary(self) -> str:
        """The failure in one line, for clients; the rest, such as the end of a rank's log, is in our own log."""
        return str(self.failure).partition("\n")[0] if self.failure is not None else ""

    async def _run(self) -> None:
        try:
            for step_id in itertools.count():
                if not self.scheduler.has_requests:
                    self._wake.clear()
                    await self._wait_for_work()
                await self._step(step_id)
        except (ChildFailedError, KVConnectorError) as error:
            logger.error("engine stopped: %s", error)
            self._fail(error)
        except Exception as error:
            logger.exception("engine stopped by an unexpected error")
            self._fail(error)

    async def _wait_for_work(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), HOUSEKEEPING_S)
        except TimeoutError:
            return

    async def _step(self, step_id: int) -> None:
        step = self.scheduler.schedule()
        step.step_id, step.connector = step_id, self.scheduler.transfer.build_step()
        step.idle_wait_s = IDLE_WAIT_S if not step.inputs and self.scheduler.has_requests else 0.0
        results = await self._ranks.step(step)
        events = self.scheduler.transfer.update([result.connector for result in results])
        tokens = {name: token for result in results for name, token in result.tokens.items()}
        self.steps_total += 1
        self.tokens_total += step.num_tokens
        for update in self.scheduler.update(step.inputs, tokens, events):
            if queue := self._queues.get(update.request_id):
                queue.put_nowait(update)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        for queue in self._queues.values():
            queue.put_nowait(error)
