"""The worker half: one per rank of an engine. The engine's thread calls it once a step; it never blocks that thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import msgspec

from kvconnector.config import ConnectorConfig, Role
from kvconnector.datapath.base import DataPath
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.errors import ConfigError, KVConnectorError, LocalError
from kvconnector.ids import Rank, new_incarnation
from kvconnector.runtime.assembly import build_datapath, build_driver
from kvconnector.runtime.channels import open_control, open_transport
from kvconnector.runtime.driver import Driver
from kvconnector.runtime.intake import CheckedStep, check_step
from kvconnector.runtime.outbox import Outbox
from kvconnector.runtime.steps import StepMetadata, WorkerMetadata
from kvconnector.session import WorkerOutput
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry

logger = logging.getLogger(__name__)

_News: TypeAlias = tuple[CheckedStep, object]
"""A step, what of it is refused, and the CUDA event after which its blocks may be copied; None on the CPU."""

IDLE_TURN_S = 0.5
CLOSE_TIMEOUT_S = 5.0


class KVWorker:
    """One rank's connector: register the caches once, then `start_step` and `poll` once an engine step.

    `device` is where the caches are: "cpu" or "cuda:N". The role is `config.role`. All methods are for one thread of
    the engine, except `wait`.
    """

    roles: ClassVar[tuple[Role, ...]] = ("both", "producer", "consumer")

    def __init__(
        self, config: ConnectorConfig, *, rank: Rank, model: ModelDescription, device: str
    ) -> None:
        if config.role not in self.roles:
            raise ConfigError(
                f"{type(self).__name__} does not run in this role",
                role=config.role,
                roles=self.roles,
            )
        self._config = config
        self._rank = rank
        self._model = model
        self._device = device
        self._incarnation = new_incarnation()
        self._outbox = Outbox(config.spin_s(device))
        self._inbox: deque[_News] = deque()
        self._pools: Pools | None = None
        self._engine: EngineGeometry | None = None
        self._thread: _DriverThread | None = None

    def register_kv_caches(self, groups: Sequence[CacheGroup]) -> None:
        """Take the caches, allocate staging, and open the transport and the control channel.

        The memory behind the views must outlive `close`.

        Raises:
            LocalError: caches were registered before.
            GeometryError: views do not fit their geometry.
            ConfigError: staging cannot hold one token, or the address or keys cannot be used.
            TransportError: UCX cannot start.
        """
        if self._pools is not None:
            raise LocalError("caches are registered once", rank=str(self._rank))
        pools = Pools(groups, self._device)
        self._thread = _DriverThread(self._config, pools, self._inbox, self._outbox)
        self._pools = pools

    def handshake_metadata(self) -> WorkerMetadata:
        """What the scheduler half needs of this rank.

        Raises:
            LocalError: no caches are registered.
        """
        pools, thread = self._registered()
        return WorkerMetadata(
            engine_id=self._config.engine_id,
            pp_rank=self._rank.pp_rank,
            tp_rank=self._rank.tp_rank,
            geometry=RankGeometry(
                pp_rank=self._rank.pp_rank,
                tp_rank=self._rank.tp_rank,
                groups=tuple(group.geometry for group in pools.groups),
            ),
            model=self._model,
            control_address=thread.control.address,
            public_key=thread.control.server_key,
            incarnation=self._incarnation,
        )

    @property
    def data_path(self) -> str:
        """The data path that moves this worker's chunks: "pump", or "packed" where the driver's thread moves each.

        What a single load took is in its `TransferStats.path`.

        Raises:
            LocalError: no caches are registered.
        """
        return self._registered()[1].data_path

    def start_step(self, step: StepMetadata) -> None:
        """Take one step's news from the scheduler half. Never blocks.

        A request whose blocks are outside the pool, or too few for its tokens, is refused alone, and the others go on:
        a load is reported as failed, and its producer is told; a lease is not granted, its readers are refused, and the
        request is reported as sent, with the reason in `failed_sending`.

        On a GPU, call it with the stream current that the model runs on: blocks that the news speaks of are copied
        after what that stream holds so far.

        Raises:
            LocalError: no caches are registered, the engine's geometry is not known yet, or the news is not for this
                worker's role; nothing of the step is taken.
            BlockIdError: a request that names another number of cache groups, or block ids that are no whole int32;
                nothing of the step is taken.
        """
        pools, thread = self._registered()
        if step.is_empty:
            return
        engine = step.engine or self._engine
        if engine is None:
            raise LocalError(
                "the first step with requests must carry the engine's geometry",
                rank=str(self._rank),
            )
        checked = check_step(msgspec.structs.replace(step, engine=None), pools, self._config.role)
        if self._engine is None:
            self._check_engine(engine, pools)
            self._engine = engine
            thread.begin(engine, self._rank, self._incarnation)
        news = checked.step
        if not news.is_empty:
            self._outbox.expect(
                loads=[load.request_id for load in news.loads],
                holds=[hold.request_id for hold in news.holds],
                refused_holds=checked.refused_holds,
            )
            self._inbox.append((checked, self._mark_stream(news)))
            thread.control.wake()

    def _mark_stream(self, news: StepMetadata) -> object | None:
        """An event behind all that the current stream holds, where copies must wait for it."""
        if self._device == "cpu" or not (news.holds or news.loads):
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def poll(self) -> WorkerOutput:
        """What finished since the last call. Never blocks."""
        return self._outbox.take()

    def wait(self, timeout_s: float) -> bool:
        """Whether `poll` has something to return, after waiting at most `timeout_s` for it. Any thread may call it."""
        return self._outbox.wait(timeout_s)

    def close(self) -> None:
        """Say goodbye, stop the driver and release everything within `CLOSE_TIMEOUT_S`. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def _registered(self) -> tuple[Pools, _DriverThread]:
        if self._pools is None or self._thread is None:
            raise LocalError("register_kv_caches comes first, close last", rank=str(self._rank))
        return self._pools, self._thread

    def _check_engine(self, engine: EngineGeometry, pools: Pools) -> None:
        mine = engine.rank_geometry(self._rank)
        registered = tuple(group.geometry for group in pools.groups)
        if mine.groups != registered or engine.engine_id != self._config.engine_id:
            raise LocalError(
                "the engine's geometry is not this worker's",
                engine=engine.engine_id,
                rank=str(self._rank),
                engine_says=mine.groups,
                registered=registered,
            )


class KVProducerWorker(KVWorker):
    """The worker half of a prefill engine."""

    roles: ClassVar[tuple[Role, ...]] = ("producer",)


class KVConsumerWorker(KVWorker):
    """The worker half of a decode engine."""

    roles: ClassVar[tuple[Role, ...]] = ("consumer",)


class _DriverThread:
    """A worker's resources and the thread that drives them, from registration to `close`."""

    def __init__(
        self,
        config: ConnectorConfig,
        pools: Pools,
        inbox: deque[_News],
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._pools = pools
        self._inbox = inbox
        self._outbox = outbox
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._transport = open_transport(config)
        try:
            self._datapath: DataPath = build_datapath(config, pools, self._transport)
            self.control = open_control(config, 0)
        except BaseException:
            self._transport.close()
            raise

    @property
    def data_path(self) -> str:
        """The data path's name."""
        return self._datapath.name

    def begin(self, engine: EngineGeometry, rank: Rank, incarnation: str) -> None:
        """Start driving, now that the engine's geometry is known."""
        driver = build_driver(
            self._config,
            engine=engine,
            rank=rank,
            incarnation=incarnation,  # type: ignore[arg-type]  # NewType of str
            pools=self._pools,
            control=self.control,
            transport=self._transport,
            datapath=self._datapath,
            outbox=self._outbox,
            intake=self._take_news,
        )
        name = f"kvconnector-{self._config.engine_id}-{rank}"
        self._thread = threading.Thread(target=self._run, args=(driver,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and release the resources."""
        self._stopping.set()
        if self._thread is None:
            self._release()
            return
        self.control.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the driver thread did not stop within %s s", CLOSE_TIMEOUT_S)

    def _run(self, driver: Driver) -> None:
        failure: KVConnectorError | None = None
        try:
            while not self._stopping.is_set():
                driver.turn(IDLE_TURN_S)
            driver.say_goodbye()
        except Exception as error:
            logger.exception("the driver failed; this worker transfers nothing more")
            failure = KVConnectorError(f"the connector's driver failed: {error!r}")
        try:
            self._release()
        finally:
            if failure is not None:
                # a bug, or the machine failing: the engine must live, so every request it waits for ends now, when
                # neither copies nor consumers use its blocks any more
                self._outbox.break_off(failure)

    def _take_news(self, driver: Driver) -> None:
        while self._inbox:
            checked, mark = self._inbox.popleft()
            if mark is not None:
                driver.datapath.order_after(mark)
            for event in checked.events():
                driver.submit(event)

    def _release(self) -> None:
        try:
            self._datapath.close()
        finally:
            self.control.close()
