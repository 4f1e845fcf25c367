"""One SGLang rank: its caches, its worker, and what that reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kvconnector.config import ConnectorConfig
from kvconnector.ids import Rank
from kvconnector.integrations.sglang.caches import Shape, registered_groups
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.requests import Layout
from kvconnector.runtime import Worker
from kvconnector.runtime.channels import open_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import WorkerMetadata, directory_of, joined_geometry
from kvconnector.session.orders import Order, StepMetadata
from kvconnector.topology import ModelDescription

if TYPE_CHECKING:
    from kvconnector.integrations.sglang.transfers import RoomTransfer

logger = logging.getLogger(__name__)

QUIESCE_S = 30.0
GIVEN_UP = "TransferAbortedError: the decode engine gave it up, or its room was used before"


class RankTransfers:
    """One rank's caches, its `worker`, and its open transfers.

    Args:
        config: The engine's settings.
        args: SGLang's `KVArgs`, filled.
        shape: What they do not say.
        model: The model's name, on which both engines must agree.
        gather: Called once, in every rank: hands each rank's bytes to all of them, in any order.

    Raises:
        KVConnectorError: what `Worker.register` and the directory service raise, caches that are not moved, or ranks
            that make up no engine.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        args: Any,
        shape: Shape,
        model: str,
        gather: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        self.config = config
        self.kv_args = args
        self.rows = MetadataRows(args, shape.device)
        groups, kinds = registered_groups(args, shape, self.rows)
        self.layout = Layout(kinds, args.page_size)
        rank = Rank(shape.pp_rank, shape.tp_rank)
        described = ModelDescription(model=model, dtype=shape.dtype, num_layers=shape.num_layers)
        self.worker = Worker(config, rank=rank, model=described)
        self._service: DirectoryService | None = None
        try:
            self.worker.register(groups)
            own = msgspec.msgpack.encode(self.worker.handshake())
            workers = [msgspec.msgpack.decode(each, type=WorkerMetadata) for each in gather(own)]
            geometry = joined_geometry(config, workers)
            self.worker.start_step(StepMetadata(engine=geometry))
            if config.role == "producer" and rank == Rank(0, 0):
                directory = directory_of(geometry, workers, stream=config.stream)
                control = open_control(config, config.control.port)
                self._service = DirectoryService(control, directory).start()
        except BaseException:
            self.worker.close()
            raise
        self.rooms: set[int] = set()
        """Of prompts that are computed or held: a name stands for one transfer at a time."""
        self.turn = 0
        """How often reports were taken: once each time that SGLang goes through its queue."""
        self.numbers = count()
        """Of requests: one that has failed may come again with its room, which is refused."""
        self._transferring: dict[str, RoomTransfer] = {}
        self._stream = torch.cuda.Stream() if shape.device != "cpu" else None
        logger.info("kvconnector moves %s of %s as engine %s", kinds, rank, config.engine_id)

    @contextmanager
    def after(self, *events: Any) -> Iterator[None]:
        """On a GPU, order what is inside after the current stream and these events or streams, and nothing after it."""
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

    def order(self, order: Order, transfer: RoomTransfer | None = None) -> None:
        """Have the worker do this; never blocks. On a GPU it is done after what the current stream holds.

        Args:
            order: What to do.
            transfer: The request whose blocks the worker uses from then on: `ended` is called once it does not.
        """
        if transfer is not None:
            self._transferring[order.request_id] = transfer
        self.worker.start_step(StepMetadata(orders=(order,)))

    def take(self) -> None:
        """Take what the worker has reported."""
        self.turn += 1
        output = self.worker.poll()
        failed = {**output.failed_sending, **output.failed_recving}
        for trace in output.stats.traces:
            if trace.kind == "hold" and trace.outcome == "aborted":
                failed.setdefault(trace.request_id, GIVEN_UP)
        for request_id in output.finished_sending | output.finished_recving:
            transfer = self._transferring.pop(request_id, None)
            if transfer is not None:
                transfer.ended(failed.get(request_id))

    def deregister_buffer_to_engine(self) -> None:
        """The pools' memory goes away. Raises MemoryInUseError: a transfer did not end in time."""
        self.worker.quiesce(QUIESCE_S)

    def register_buffer_to_engine(self) -> None:
        """It is back, at the same addresses."""
        self.worker.resume()

    def teardown(self) -> None:
        """Stop; see `Worker.close`. Idempotent."""
        if self._service is not None:
            self._service.close()
        self.worker.close()
