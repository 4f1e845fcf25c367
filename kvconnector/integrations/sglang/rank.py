"""One SGLang rank: its caches, its worker, and the transfers that the worker reports on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from typing import Any, Protocol

import msgspec
import torch

from kvconnector.config import ConnectorConfig
from kvconnector.control.address import HostPort
from kvconnector.control.zmq import ControlChannel
from kvconnector.errors import ConfigError, KVConnectorError
from kvconnector.ids import Rank
from kvconnector.integrations.sglang.caches import Shape, registered_groups
from kvconnector.integrations.sglang.digests import PromptIdentities
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.recompute import Recomputer
from kvconnector.integrations.sglang.registry import Finder, Poster
from kvconnector.integrations.sglang.requests import Layout
from kvconnector.integrations.sglang.settings import PrefillEngines
from kvconnector.integrations.sglang.split import joined_groups
from kvconnector.integrations.sglang.stats import RankStats
from kvconnector.runtime import Worker
from kvconnector.runtime.channels import open_directory_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import WorkerMetadata, directory_of, joined_geometry
from kvconnector.session import RequestTrace
from kvconnector.session.orders import (
    DropRequest,
    Order,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.topology import ModelDescription

logger = logging.getLogger(__name__)

QUIESCE_S = 30.0
"""Seconds that SGLang waits for transfers to end before it releases the pools' memory."""


class RunningTransfer(Protocol):
    """What a rank writes to a request whose blocks its worker uses, see `transfers.RoomTransfer`."""

    held_s: float
    prompt_end: bytes

    def ended(self, reason: str | None) -> None: ...


class FollowedPrompt(Protocol):
    """What a rank calls of a prompt that it follows, see `transfers.LoadedPrompt`."""

    def producer_started(self) -> None: ...


class RankTransfers:
    """One rank's caches, its `worker`, and its open transfers.

    Args:
        config: The engine's settings.
        args: SGLang's `KVArgs`, filled: the rank's pools.
        shape: The rank's place and the model's heads and layers, which `args` lacks.
        model: The model, on which both engines must agree.
        gather: Takes this rank's JSON text and returns those of all ranks, in any order. All ranks must call it equally
            often.
        directory_port: The port at which a prefill engine's directory service listens, unless it is taken or a setting
            names another. With a fixed port an engine that is started again is found where it was.
        dp_rank: The engine's data-parallel rank in its server.
        has_metrics: True if the rank's transfers are counted in SGLang's metrics.
        has_spans: True if they are exported as spans to where SGLang exports its own.
        api_key: The key of the prefill servers' APIs, for prompts that are computed again; "" if they need none.
        must_query: True if a decode engine asks the prefill engine's registry for every request's rank.

    Raises:
        KVConnectorError: a cache cannot be transferred, the ranks do not form one engine, or as `Worker.register` and
            `DirectoryService`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        args: Any,
        shape: Shape,
        model: ModelDescription,
        gather: Callable[[bytes], Sequence[bytes]],
        directory_port: int = 0,
        must_query: bool = False,
        dp_rank: int = 0,
        has_metrics: bool = False,
        has_spans: bool = False,
        api_key: str = "",
    ) -> None:
        self.config = config
        self.prefill_engines = PrefillEngines(config)
        self.directory = ""
        """Address of the directory service, in the rank of a prefill engine that has it."""
        self.dp_rank, self.dp_size, self.follows_rooms = dp_rank, 1, True
        """True if a server's data-parallel ranks share requests by their rooms, which decode engines can compute."""
        self.leads = shape.pp_rank == shape.tp_rank == shape.replica == 0
        """True in the one rank of an engine that asks a prefill server, for all ranks, to compute a prompt again."""
        self.poster: Poster | None = None
        self.kv_args = args
        self.rows = MetadataRows(args, shape.device)
        groups, kinds = joined_groups(*registered_groups(args, shape, self.rows), shape, gather)
        self.layout = Layout(kinds, args.page_size, len(args.state_types))
        self.rank = rank = Rank(shape.pp_rank, shape.replica * shape.tp_size + shape.tp_rank)
        self.worker = Worker(config, rank=rank, model=model)
        with ExitStack() as started:
            started.callback(self.worker.close)
            self.identities = started.enter_context(closing(PromptIdentities()))
            # engines of other kinds have no rows of metadata
            num_optional = sum(kind.is_draft or kind.kind == "row" for kind in kinds)
            self.worker.register(groups, num_optional=num_optional)
            own = msgspec.json.encode(self.worker.handshake())
            workers = [msgspec.json.decode(each, type=WorkerMetadata) for each in gather(own)]
            geometry = joined_geometry(config, workers)
            self.worker.start_step(StepMetadata(engine=geometry))
            if config.role == "producer" and rank == Rank(0, 0):
                directory = directory_of(geometry, workers, stream=config.stream)
                control = _open_directory(config, directory_port, dp_rank)
                self.directory = control.address
                started.callback(DirectoryService(control, directory).start().close)
            if config.role == "consumer":
                self._ask_servers(started, must_query=must_query, api_key=api_key)
            self._started = started.pop_all()
        self.rooms: dict[int, str] = {}
        """The request that is under way in each room: a room names one transfer at a time."""
        self.stats = RankStats(
            config.engine_id, rank, dp_rank, self, has_metrics=has_metrics, has_spans=has_spans
        )
        self.turn = 0
        """How many times reports were taken: once for each of SGLang's passes over its queue."""
        self.numbers = count()
        """Numbers that make request ids unique. A room does not: a failed request may come again with the same one."""
        self._transferring: dict[str, RunningTransfer] = {}
        self._followed: dict[str, FollowedPrompt] = {}
        """Prompts for which the prefill engine has no blocks yet."""
        self._stream = torch.cuda.Stream() if shape.device != "cpu" else None
        moved = [group.kind for group in kinds]
        logger.info("kvconnector moves %s of %s as engine %s", moved, rank, config.engine_id)

    def _ask_servers(self, started: ExitStack, *, must_query: bool, api_key: str) -> None:
        self.finder = Finder(must_query=must_query)
        started.callback(self.finder.close)
        self.recomputer = Recomputer(api_key)
        started.callback(self.recomputer.close)

    def register(self, registry: HostPort, row: Mapping[str, object]) -> None:
        """Register this rank of a prefill engine with its server's registry, in a thread of its own."""
        self.poster = Poster(registry, row)
        self._started.callback(self.poster.close)

    @contextmanager
    def after(self, *events: Any) -> Iterator[None]:
        """On a GPU, run the body on our own stream, after the current stream and `events` (events, streams or None)."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for event in events:
            if isinstance(event, torch.cuda.Stream):
                self._stream.wait_stream(event)
            elif event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def order(self, order: Order, transfer: RunningTransfer | None = None) -> None:
        """Give the worker an order; never blocks. On a GPU the worker waits for the work queued on the current stream.

        Args:
            order: The order to carry out.
            transfer: The request whose blocks the order uses. Its `ended` is called when they are no longer in use.
        """
        if transfer is not None:
            self._transferring[order.request_id] = transfer
        self.worker.start_step(StepMetadata(orders=(order,)))

    @property
    def num_loading(self) -> int:
        """Return the number of requests whose pages are being loaded."""
        return 0 if self.config.role == "producer" else len(self._transferring)

    @property
    def held(self) -> Sized:
        """Return the finished prompts whose pages are kept for a decode engine."""
        return self._transferring if self.config.role == "producer" else ()

    def follow(self, order: WantRequest, prompt: FollowedPrompt) -> None:
        """Let the worker follow a prompt. `producer_started` is called when the prefill engine has blocks for it."""
        self._followed[order.request_id] = prompt
        self.order(order)

    def give_up(self, order: WithdrawRequest | DropRequest) -> None:
        """Let the worker end a request early."""
        self._followed.pop(order.request_id, None)
        self.order(order)

    def take(self) -> None:
        """Take the worker's reports: let started prompts go on, and end the transfers that the reports name."""
        self.turn += 1
        output = self.worker.poll()
        for trace in output.stats.traces:
            if trace.kind == "hold" and trace.request_id in self._transferring:
                self._transferring[trace.request_id].held_s = seconds_of(trace)
        for request_id in output.producer_started & self._followed.keys():
            self._followed.pop(request_id).producer_started()
        failed = {**output.failed_sending, **output.failed_recving}
        for request_id in output.finished_sending | output.finished_recving:
            transfer = self._transferring.pop(request_id, None)
            if transfer is not None:
                transfer.prompt_end = output.extras.get(request_id, b"")
                transfer.ended(failed.get(request_id))
        self.stats.set_gauges()
        if not output.stats.is_empty and (
            line := self.stats.observe(output.stats, time.monotonic())
        ):
            logger.info("%s", line)

    def weight_version(self) -> str:
        """Return the name of the weights that the server has now; "" if it has none."""
        return ""

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int = 0) -> bool:
        """Returns True if nothing reads or writes the pages of a room's failed request any more."""
        self.take()
        return self.rooms.get(bootstrap_room) not in self._transferring

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Do nothing: what `is_abort_release_safe` looks at ends by itself."""

    def why_in_use(self) -> str:
        """End all transfers, before SGLang releases the pools' memory. Returns "", or why it must not release it; the
        caller then lets transfers go on by `register_buffer_to_engine`.
        """
        try:
            self.worker.quiesce(QUIESCE_S)
        except KVConnectorError as error:
            return f"rank {self.rank} of {self.config.engine_id}: {error}"
        return ""

    def deregister_buffer_to_engine(self) -> None:
        """End all transfers before SGLang releases the pools' memory. Our hook calls `why_in_use` first, after which
        none is left to end.

        Raises:
            MemoryInUseError: a transfer goes on for too long.
        """
        self.worker.quiesce(QUIESCE_S)

    def register_buffer_to_engine(self) -> None:
        """Resume transfers: the pools have memory again, at the same addresses."""
        self.worker.resume()

    def teardown(self) -> None:
        """Stop the directory service and the worker; see `Worker.close`. Idempotent."""
        self._started.close()


def _open_directory(config: ConnectorConfig, preferred_port: int, dp_rank: int) -> ControlChannel:
    """Open the directory service's channel, at any port if the preferred one is taken. If the settings have a port, the
    server's data-parallel ranks use it and the ones after it.
    """
    if port := config.control.port:
        return open_directory_control(config, port + dp_rank)
    if not preferred_port:
        return open_directory_control(config, 0)
    try:
        return open_directory_control(config, preferred_port)
    except ConfigError as error:
        logger.warning("the directory service listens on another port than planned: %s", error)
        return open_directory_control(config, 0)


def seconds_of(trace: RequestTrace) -> float:
    """Return how long a prompt's transfer took: from its first packed read, or its end, to the last confirmation."""
    moving = [phase for phase in trace.phases if phase.name != "fill"]
    return max((each.end_s for each in moving), default=0.0) - min(
        (each.start_s for each in moving), default=0.0
    )
