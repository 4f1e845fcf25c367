"""The worker half: one per rank of an engine. The engine's thread calls it once a step; it never blocks that thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from kvconnector.config import ConnectorConfig, Role
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.errors import ConfigError, LocalError
from kvconnector.ids import Rank, new_incarnation
from kvconnector.runtime.driver_thread import DriverThread
from kvconnector.runtime.intake import check_step
from kvconnector.runtime.outbox import Outbox
from kvconnector.runtime.steps import StepMetadata, WorkerMetadata
from kvconnector.session import WorkerOutput
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry


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
        self._pools: Pools | None = None
        self._engine: EngineGeometry | None = None
        self._thread: DriverThread | None = None

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
        self._thread = DriverThread(self._config, pools, self._outbox)
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
        news = step if step.engine is None else msgspec.structs.replace(step, engine=None)
        checked = check_step(news, pools, self._config.role)
        if self._engine is None:
            self._check_engine(engine, pools)
            self._engine = engine
            thread.begin(engine, self._rank, self._incarnation)
        if not news.is_empty:
            self._outbox.expect(
                loads=[load.request_id for load in news.loads],
                holds=[hold.request_id for hold in news.holds],
                refused_holds=checked.refused_holds,
            )
            thread.put(checked)

    def poll(self) -> WorkerOutput:
        """What finished since the last call. Never blocks; but where nothing has, and the driver's thread has something
        to do and waits for the GIL, this thread does it.
        """
        if self._thread is not None and not self._outbox.is_filled():
            self._thread.look_in()
        return self._outbox.take()

    def wait(self, timeout_s: float) -> bool:
        """Whether `poll` has something to return, after waiting at most `timeout_s` for it. Any thread may call it: it
        drives the transfers meanwhile, where it can.
        """
        if self._thread is None:
            return self._outbox.wait(timeout_s)
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        """Say goodbye, stop the driver and release everything within `CLOSE_TIMEOUT_S`. Idempotent.

        Raises:
            MemoryInUseError: copies may still read and write the caches. Keep their memory; `close` may be tried again.
        """
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _registered(self) -> tuple[Pools, DriverThread]:
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
