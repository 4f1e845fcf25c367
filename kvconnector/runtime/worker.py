"""The worker half: one per rank. The engine's thread calls it once a step, and waits only if a prompt is withdrawn."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from kvconnector.config import ConnectorConfig, checked_config
from kvconnector.datapath.pools import CacheGroup, Pools
from kvconnector.datapath.pump import pacing
from kvconnector.errors import (
    ConfigError,
    GeometryError,
    KVConnectorError,
    LocalError,
    MemoryInUseError,
    require_counts,
    require_seconds,
)
from kvconnector.ids import Rank, new_incarnation
from kvconnector.runtime.engine import WorkerMetadata
from kvconnector.runtime.intake import checked_orders, orders_with_blocks
from kvconnector.runtime.outbox import Outbox
from kvconnector.runtime.own_process import OwnProcess
from kvconnector.runtime.step_layers import StepLayers
from kvconnector.runtime.tensors import cache_groups
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import (
    DropRequest,
    LoadRequest,
    Order,
    StepMetadata,
    WithdrawRequest,
)
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry

if TYPE_CHECKING:
    import torch

    from kvconnector.runtime.driver_thread import DriverThread


QUIESCE_POLL_S = 0.005
WITHDRAW_S = 0.005
"""How long `start_step` waits until consumers can no longer read blocks that the engine takes back."""
LOOK_S = 0.5
"""Seconds between two reports of loads' progress by `poll`, which then also checks whether the driver is stuck."""


class Worker:
    """One rank's connector: `register` the caches once, then call `start_step` and `poll` once per engine step.

    Call all methods from one thread of the engine, except `wait`. As a context manager it closes itself. A worker that
    is garbage-collected without `close` is stopped in its driver's thread, with a `ResourceWarning`. A worker that is
    still open when the interpreter exits is closed then, within seconds.

    Args:
        config: The engine's settings, the same in every rank. The role is `config.role`.
        rank: `(pp_rank, tp_rank)`.
        model: The values on which two engines must agree: a name, to which the caches add their element type and the
            number of layers, or a whole `ModelDescription`.

    Raises:
        ConfigError: `config` is not a `Config`, `rank` is not a pair of numbers, or `model` is not a name.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        rank: Rank | tuple[int, int],
        model: ModelDescription | str,
    ) -> None:
        self._config = checked_config(config)
        self._rank = _rank_of(rank)
        # an empty name would agree with every model's
        if not isinstance(model, str | ModelDescription) or model == "":
            raise ConfigError("model must be a name or a ModelDescription", model=model)
        self._model = model
        self._incarnation = new_incarnation()
        self._outbox = Outbox()
        self._engine: EngineGeometry | None = None
        self._beginning = threading.Lock()
        self._thread: DriverThread | None = None
        self._process: OwnProcess
        self._was_registered = False
        self._num_optional = 0
        self._finalizer: weakref.finalize[..., Worker] | None = None
        self._look_at_s = 0.0
        self._layers: StepLayers | None = None
        self._is_quiet = False

    def __repr__(self) -> str:
        state = "open" if self._thread else "closed" if self._was_registered else "not registered"
        return f"<Worker {self._config.engine_id} {self._rank} {self._config.role}, {state}>"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(
        self,
        caches: Mapping[int, Sequence[torch.Tensor]] | Sequence[CacheGroup],
        *,
        total_heads: int = 0,
        head_start: int = 0,
        num_optional: int = 0,
    ) -> None:
        """Register the caches, allocate staging memory, and open the transport and the control channel.

        The worker holds the tensors until `close` has succeeded. Nobody may write to them during this call: on the CPU
        they become memory that consumers on this host can map, if they have pages of their own (from `mmap`, or at
        least 32 MiB in one allocation).

        Args:
            caches: The tensors of each layer, `{layer: (k, v)}` or `{layer: (kv,)}`, each seen as `[num_blocks,
                num_heads, block_size, head_dim]` with any strides; or, where layers differ, cache groups. The worker
                keeps a group's `memory` alive. If a group was not made by `cache_group` and has no `memory`, the caller
                must keep its memory alive.
            total_heads: KV heads of the model; 0 if this rank holds all of them.
            head_start: The first of the heads that this rank holds.
            num_optional: How many of the cache groups, counted from the last, another engine may lack, such as a draft
                model's group that only decode engines have. They are loaded from producers that have them. From other
                producers everything else is loaded, and the blocks of these groups keep their content. Every rank
                states the same number, and both engines list the groups that both have first, in the same order.
                `offer`, `load` and `grow` name blocks of all groups of this engine, whatever the other one has.

        Raises:
            LocalError: the caches were registered before.
            GeometryError: tensors or views do not fit their geometry or overlap, there are none, or there are more
                optional groups than groups.
            ConfigError: groups are on different devices, staging memory cannot hold one token, or an address or a key
                cannot be used.
            TransportError: UCX cannot start.
        """
        # imported here: a scheduler's process imports this module too, but needs neither UCX nor the C library
        from kvconnector.runtime.driver_thread import DriverThread

        if self._was_registered:
            raise LocalError("the caches can be registered only once", rank=str(self._rank))
        groups = cache_groups(caches, total_heads=total_heads, head_start=head_start)
        require_counts(GeometryError, num_optional=num_optional)
        if num_optional > len(groups):
            raise GeometryError(
                "a worker cannot have more optional cache groups than cache groups",
                num_optional=num_optional,
                groups=len(groups),
            )
        self._num_optional = num_optional
        devices = {group.device for group in groups}
        if len(devices) != 1:
            raise ConfigError(
                "all caches of a worker must be on one device", devices=sorted(devices)
            )
        memory = [group.memory for group in groups]
        pools = Pools([dataclasses.replace(group, memory=()) for group in groups], devices.pop())
        self._outbox = Outbox(self._config.spin_s(pools.device))
        self._thread = DriverThread(self._config, pools, self._outbox, self._rank, memory)
        self._was_registered = True
        self._process = OwnProcess("worker")
        self._finalizer = weakref.finalize(self, self._thread.abandon)
        self._finalizer.atexit = (
            False  # at exit `driver_thread` closes the workers that are left, and waits for them
        )

    def handshake(self) -> WorkerMetadata:
        """Return this rank's metadata, for the scheduler half.

        Raises:
            LocalError: no caches are registered.
        """
        thread = self._registered()
        pools = thread.pools
        model = self._model
        if isinstance(model, str):
            model = ModelDescription(model=model, dtype=pools.groups[0].dtype, num_layers=0)
        return WorkerMetadata(
            engine_id=self._config.engine_id,
            geometry=RankGeometry(
                pp_rank=self._rank.pp_rank,
                tp_rank=self._rank.tp_rank,
                groups=tuple(group.geometry for group in pools.groups),
            ),
            model=model,
            control_address=thread.control.address,
            public_key=thread.control.server_key,
            incarnation=self._incarnation,
            role=self._config.role,
            num_blocks=tuple(pools.num_blocks),
            num_optional=self._num_optional,
        )

    def start_step(self, step: StepMetadata) -> None:
        """Take one step's orders from the scheduler half, and begin them if the driver's thread is asleep. This never
        blocks, with one exception: in a step that withdraws a prompt which is still being computed, it waits for at
        most 5 ms until consumers can no longer read the prompt's blocks. Greetings, and copies on CPUs, are left to the
        driver's thread.

        If a request's blocks are outside the pool, too few for its tokens, or missing for a cache group, only that
        request is refused. A load is then reported as failed, and its producer is notified. A lease is not granted, its
        readers are refused, and the request is reported as sent, with the reason in `failed_sending`.

        On a GPU, call this while the model's stream is current: the orders' blocks are copied after the work queued on
        that stream.

        Args:
            step: The result of `Scheduler.build_step`, the same for every rank.

        Raises:
            LocalError: no caches are registered, `step` is not a `StepMetadata`, the engine's geometry is not known yet
                or does not match this worker's, or an order is not for this worker's role. No order of the step is
                then carried out.
        """
        began_s = time.monotonic()
        thread = self._registered()
        if not isinstance(step, StepMetadata):
            raise LocalError(
                "start_step needs the step that Scheduler.build_step returned",
                got=type(step).__name__,
            )
        pools = thread.pools
        self._layers = None
        if step.is_empty:
            return
        if self._is_quiet:
            step = structs.replace(step, orders=self._without_blocks(step.orders))
        if self._engine is None:
            self._begin(step.engine, thread)
        orders = checked_orders(step, pools, self._config.role, self._outbox.note_contained)
        if orders:
            if self._config.role != "consumer":
                self._layers = self._layers_of(orders, pools)
            withdrawn = self._outbox.expect(orders)
            thread.put(orders, inline_s=began_s + pacing.WORK_S - time.monotonic())
            if withdrawn:
                thread.await_withdrawal(withdrawn, WITHDRAW_S)

    def _begin(self, engine: EngineGeometry | None, thread: DriverThread) -> None:
        """Start the driver with the first step. Raises LocalError: see `start_step`."""
        if engine is None:
            raise LocalError(
                "the first step with requests must carry the engine's geometry",
                rank=str(self._rank),
            )
        self._check_engine(engine, thread.pools)
        # an engine that calls from two threads must not start two drivers over one data path: neither would end
        with self._beginning:
            if self._engine is None:
                thread.begin(engine, self._incarnation)
                self._engine = engine

    def refuse(self, orders: Iterable[Order], error: KVConnectorError) -> None:
        """End the requests of orders that did not reach this worker, or that it could not carry out. `poll` reports
        a load as failed, a complete lease as sent, and a followed prompt as started.

        Args:
            orders: Some of a step's orders.
            error: The reason.
        """
        self._outbox.refuse(orders, error)

    def quiesce(self, timeout_s: float) -> None:
        """End every load and every lease on blocks, and wait until nothing reads or writes the caches. Their memory may
        then be unmapped, and mapped again at the same addresses. Connections, staging memory and prompts that are only
        queued are kept. Until `resume`, orders that name blocks are refused. `poll` reports the ended requests, and all
        loads among them as failed. Idempotent.

        Args:
            timeout_s: The longest time to wait, in seconds.

        Raises:
            LocalError: no caches are registered, `timeout_s` is not a finite number, or the worker belongs to another
                process.
            MemoryInUseError: a transfer did not end in time, or a consumer has not unmapped the caches: they must keep
                their memory.
        """
        thread = self._registered()
        require_seconds(timeout_s=timeout_s)
        self._is_quiet = True
        self._layers = None  # no lease has the layers that the step still writes
        if orders := self._outbox.give_up():
            thread.put(orders, inline_s=pacing.WORK_S)
        until_s = time.monotonic() + timeout_s
        while awaited := self._outbox.awaited():
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise MemoryInUseError("transfers did not end in time", requests=awaited)
            time.sleep(min(left_s, QUIESCE_POLL_S))
        thread.withdraw_pools(until_s - time.monotonic())

    def resume(self) -> None:
        """Accept orders again after `quiesce`, once the caches have memory again. Call this also when the caches got
        more memory at the ends of their ranges, so that consumers on this host can read it directly. Idempotent.
        """
        self._check_process()
        self._is_quiet = False
        if self._thread is not None:
            self._thread.renew_pools()

    @property
    def is_waiting(self) -> bool:
        """True while a load has not ended, or may not be asked for yet."""
        return self._outbox.is_waiting

    def layer_written(self, layer: int) -> None:
        """Report that the work queued on the current stream completes a layer of this step in the caches. Consumers
        that stream a prompt then read the layer while the next ones are being computed, if all layers before it are
        complete too. Never blocks. If an engine does not call this, consumers read whole steps.

        Args:
            layer: Its global index.

        Raises:
            LocalError: no caches are registered.
        """
        if self._layers is None:
            return
        self._check_process()
        try:
            orders = self._layers.written(layer)
        except Exception as error:
            self._layers = None
            self._outbox.note_contained("the report of this step by layers", error)
            return
        if orders:
            self._registered().put(orders)

    def poll(self) -> WorkerOutput:
        """Return what has finished since the last call. Never blocks. If nothing has, and the driver's thread has work
        but is waiting for the GIL, the calling thread does that work.

        Raises:
            LocalError: the worker belongs to another process, which has forked this one.
        """
        self._check_process()
        if self._thread is not None and not self._outbox.is_filled:
            self._thread.progress_inline()
        output = self._outbox.take()
        if self._thread is not None and (now_s := time.monotonic()) >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._thread.look_for_stuck(now_s)
            output.stats.loading = self._thread.in_flight()
        return output

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return. Any thread may call this; while it waits, it drives the transfers
        if no other thread does.

        Args:
            timeout_s: The longest time to wait, in seconds.

        Returns:
            True if there is something, False if `timeout_s` has passed.

        Raises:
            LocalError: `timeout_s` is not a finite number, or the worker belongs to another process.
        """
        require_seconds(timeout_s=timeout_s)
        self._check_process()
        if self._thread is None:
            return self._outbox.wait(timeout_s)
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        """Disconnect from peers, wait for consumers to unmap the caches, stop the driver and release everything, within
        seconds. Idempotent.

        Raises:
            MemoryInUseError: copies may still read or write the caches, or consumers still map them; the text says
                which. Keep the caches' memory. You may call `close` again.
            LocalError: the worker belongs to another process, which alone can close it.
        """
        self._check_process()
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._finalizer is not None:
            self._finalizer.detach()

    def _layers_of(self, orders: Sequence[Order], pools: Pools) -> StepLayers | None:
        """Return the layers of a step, or None if consumers have to read the step as a whole."""
        try:
            return StepLayers(orders, pools)
        except Exception as error:
            self._outbox.note_contained("the report of this step by layers", error)
            return None

    def _without_blocks(self, orders: Sequence[Order]) -> tuple[Order, ...]:
        """Refuse the orders that name blocks. Returns the others, with ends of the refused requests in their place."""
        error = LocalError("the engine is asleep, so its caches have no memory")
        taken: list[Order] = []
        for order in orders:
            (order,), blocks = orders_with_blocks((order,), self._outbox.note_contained)  # noqa: PLW2901
            if blocks and any(group.num_blocks for group in blocks[0]):
                self.refuse((order,), error)
                # otherwise heartbeats keep a producer's lease forever, or followers wait for the prompt
                ending = DropRequest if isinstance(order, LoadRequest) else WithdrawRequest
                taken.append(ending(order.request_id))
            else:
                taken.append(order)
        return tuple(taken)

    def _check_process(self) -> None:
        """Raise LocalError in a forked child, which lacks what `register` has made."""
        if self._thread is not None:
            self._process.check()

    def _registered(self) -> DriverThread:
        self._check_process()
        if self._thread is None:
            raise LocalError(
                "call register before this, and do not call it after close", rank=str(self._rank)
            )
        return self._thread

    def _check_engine(self, engine: EngineGeometry, pools: Pools) -> None:
        mine = engine.rank_geometry(self._rank)
        registered = tuple(group.geometry for group in pools.groups)
        if mine.groups != registered or engine.engine_id != self._config.engine_id:
            raise LocalError(
                "the engine's geometry does not match this worker's",
                engine=engine.engine_id,
                rank=str(self._rank),
                engine_says=mine.groups,
                registered=registered,
            )


def _rank_of(rank: object) -> Rank:
    pair = rank if isinstance(rank, tuple | list) else ()
    is_rank = len(pair) == len(Rank._fields) and all(
        isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in pair
    )
    if not is_rank:
        raise ConfigError("a worker's rank must be (pp_rank, tp_rank), such as (0, 0)", rank=rank)
    return Rank(*pair)
