"""The transfers of one SGLang rank: its worker, and what SGLang polls of each request.

SGLang runs scheduler and model of a rank in one process, and every rank runs the same scheduler: each creates the same
senders and receivers in the same order, and reduces what `poll` says over its ranks. So each rank gives orders to its
own worker, with the blocks of its own pools, and no scheduler half is needed: ranks agree once, on the engine's
geometry, when they start. All methods are for the scheduler's thread, and none but `settle` blocks. Bytes move in the
worker's own, where every wait for a peer has a deadline (`peer`, `lease`), and becomes a failure with the error's type.

A *producer's* request is a prompt that is streamed: `open` names it before it is computed, `grow` moves the watermark
after each chunk, `complete` gives all its blocks to the lease. Until then SGLang may take the blocks back at any time:
consumers believe nothing of a prompt that was withdrawn. After that the blocks are the lease's until the worker reports
the request, done or not, and `poll` says `TRANSFERRING` until then. A *consumer's* request is wanted when SGLang has
looked up its producer, and loaded when it has blocks; these are the load's until the worker reports it.

If one rank fails, SGLang frees the request's blocks in all of them, although a lease or a load of ours may still use
them. It asks each for its `failure_exception` first: there `settle` ends what is left and waits until nothing reads or
writes the blocks, `SETTLE_S` at most. Only a worker whose driver hangs takes longer, and that is logged as an error.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from typing import ClassVar

import msgspec

from kvconnector import errors
from kvconnector.config import ConnectorConfig
from kvconnector.errors import (
    KVConnectorError,
    RemoteError,
    RemoteProtocolError,
    TransferAbortedError,
)
from kvconnector.ids import EngineAddress, Rank
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.runtime import CacheGroup, Worker
from kvconnector.runtime.channels import open_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import WorkerMetadata, directory_of, joined_geometry
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    Order,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)
from kvconnector.topology import ModelDescription

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
WAIT_S = 0.01
GIVEN_UP = "TransferAbortedError: the decode engine gave the request up"


class Stage(IntEnum):
    """Where a request is. The values are those of SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    DONE = 4


class RoomTransfer:
    """One request of one rank. While its stage is `TRANSFERRING` the worker uses its blocks, and reports the end."""

    gives_up: ClassVar[type[WithdrawRequest | DropRequest]]

    def __init__(self, rank: RankTransfers, room: int) -> None:
        self.rank = rank
        self.room = room
        self.request_id = rank.new_name(room)
        self.stage = Stage.WAITING
        self.error: KVConnectorError | None = None
        self._turn = 0

    def poll(self) -> int:
        """Return where the request is, after what the worker has reported by now."""
        self._turn = self.rank.take_turn(self._turn)
        return self.stage

    def ended(self, reason: str | None) -> None:
        """The worker is done with the blocks; with a `reason` it failed."""
        if reason is not None and self.error is None:
            self.error = error_from(reason, self.room)
        self.stage = Stage.DONE if self.error is None else Stage.FAILED

    def abort(self) -> None:
        """Give the request up: it has failed once nothing uses its blocks. Idempotent."""
        self.fail(TransferAbortedError("the request was aborted here", room=self.room))

    def fail(self, error: KVConnectorError) -> None:
        """The same, for this reason."""
        if self.stage in {Stage.DONE, Stage.FAILED}:
            return
        if self.error is None:
            self.error = error
            self.rank.order(self.gives_up(self.request_id))
        if self.stage is not Stage.TRANSFERRING:
            self.ended(None)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside is the request's failure, and no other's."""
        try:
            yield
        except KVConnectorError as error:
            self.fail(error)

    def settle(self) -> KVConnectorError:
        """Make sure that nothing uses the blocks, wherever the request failed.

        Returns:
            This rank's error, or one that says that it is another rank's.
        """
        error = self.error
        self.abort()
        until_s = time.monotonic() + SETTLE_S
        while self.stage is Stage.TRANSFERRING and time.monotonic() < until_s:
            self.rank.wait()
        if self.stage is Stage.TRANSFERRING:
            logger.error("the blocks of room %s are freed, and may still be in use", self.room)
        if error is None or self.stage is Stage.DONE:
            error = RemoteError("the request failed in another rank of this engine", room=self.room)
            error.is_from_another_rank = True  # type: ignore[attr-defined] # SGLang's name: it logs once
        return error


class SentPrompt(RoomTransfer):
    """A prompt that this rank computes and holds."""

    gives_up = WithdrawRequest

    def __init__(self, rank: RankTransfers, room: int) -> None:
        super().__init__(rank, room)
        self._names = self.request_id, *transfer_names(room)
        self._grown = GrowRequest(*self._names, (NO_BLOCKS,) * rank.num_groups, Watermark())
        if room in rank.rooms:
            self.error = RemoteProtocolError("another request has this bootstrap room", room=room)
            self.stage = Stage.FAILED
            return
        rank.rooms.add(room)
        rank.order(self._grown)

    @property
    def num_tokens(self) -> int:
        """Tokens that were published."""
        return self._grown.watermark.num_tokens

    def grow(self, blocks: Sequence[int], num_tokens: int, *, page_groups: Sequence[int]) -> None:
        """Add computed tokens to the prompt.

        Args:
            blocks: The next pages, of each of `page_groups`.
            num_tokens: Tokens in them.
            page_groups: Groups that keep every token.
        """
        grown = list(self._grown.blocks)
        for group in page_groups:
            grown[group] = grown[group].extended(blocks)
        stop = Watermark(self.num_tokens + num_tokens)
        self._grown = GrowRequest(*self._names, tuple(grown), stop)

    def publish(self) -> None:
        """Let consumers read what has grown, as far as the current stream has written it."""
        if self.stage is Stage.WAITING:
            self.rank.order(self._grown)

    def complete(self, others: dict[int, GroupBlocks]) -> None:
        """Publish the whole prompt: its blocks are the lease's now.

        Args:
            others: The blocks of the groups that are read last.
        """
        if self.stage is not Stage.WAITING:
            return
        blocks = tuple(others.get(n, known) for n, known in enumerate(self._grown.blocks))
        self.rank.transferring(self)
        self.rank.order(HoldRequest(*self._names, blocks, self.num_tokens))

    def ended(self, reason: str | None) -> None:
        super().ended(reason)
        self.rank.rooms.discard(self.room)


class LoadedPrompt(RoomTransfer):
    """A prompt that this rank reads."""

    gives_up = DropRequest

    def __init__(self, rank: RankTransfers, room: int) -> None:
        super().__init__(rank, room)
        self.stage = Stage.BOOTSTRAPPING

    def want(self, engine: EngineAddress) -> None:
        """Meet the producer, and keep its lease alive."""
        if self.stage is not Stage.BOOTSTRAPPING:
            return
        self.stage = Stage.WAITING
        names = self.request_id, *transfer_names(self.room)
        self.rank.order(WantRequest(*names, engine, is_followed=True))

    def load(self, ranges: Sequence[range], blocks: Sequence[GroupBlocks]) -> None:
        """Read these tokens of each cache group into these blocks, as far and as soon as they are computed."""
        if self.stage is not Stage.WAITING:
            return
        self.rank.transferring(self)
        tokens = tuple((each.start, each.stop) for each in ranges)
        self.rank.order(LoadRequest(self.request_id, tokens, tuple(blocks), remote_blocks=()))


class RankTransfers:
    """One rank's `worker`, and its open transfers.

    Args:
        config: The engine's settings.
        rank: This rank's place.
        groups: Its caches.
        model: What both engines must agree on.
        gather: Called once, in every rank: hands each rank's bytes to all of them, in any order.

    Raises:
        KVConnectorError: what `Worker.register` and the directory service raise, or ranks that make up no engine.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        rank: Rank,
        groups: Sequence[CacheGroup],
        model: ModelDescription,
        gather: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        self.config = config
        self.num_groups = len(groups)
        self.worker = Worker(config, rank=rank, model=model)
        self._service: DirectoryService | None = None
        try:
            self.worker.register(list(groups))
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
        self._transferring: dict[str, RoomTransfer] = {}
        self._numbers = count()
        self._turn = 0

    def new_name(self, room: int) -> str:
        """A name for a request of this worker: a router may use a room again."""
        return f"room-{room}.{next(self._numbers)}"

    def order(self, order: Order) -> None:
        """Have the worker do this; never blocks. On a GPU it is done after what the current stream holds."""
        self.worker.start_step(StepMetadata(orders=(order,)))

    def transferring(self, transfer: RoomTransfer) -> None:
        """The worker uses its blocks from its next order on: `ended` is called once it does not."""
        transfer.stage = Stage.TRANSFERRING
        self._transferring[transfer.request_id] = transfer

    def take_turn(self, seen: int) -> int:
        """Take what the worker has reported, once each time that SGLang goes through its queue.

        Args:
            seen: What the caller got last time.

        Returns:
            The number of this turn. Whoever has seen it is polled again, so that a new turn begins.
        """
        if seen == self._turn:
            self._turn += 1
            self._take()
        return self._turn

    def wait(self) -> None:
        """Wait a little for the worker, and take what it reports."""
        self.worker.wait(WAIT_S)
        self._take()

    def _take(self) -> None:
        output = self.worker.poll()
        failed = {**output.failed_sending, **output.failed_recving}
        for trace in output.stats.traces:
            if trace.kind == "hold" and trace.outcome == "aborted":
                failed.setdefault(trace.request_id, GIVEN_UP)
        for request_id in output.finished_sending | output.finished_recving:
            transfer = self._transferring.pop(request_id, None)
            if transfer is not None:
                transfer.ended(failed.get(request_id))

    def close(self) -> None:
        """Stop; see `Worker.close`. Idempotent."""
        if self._service is not None:
            self._service.close()
        self.worker.close()


NO_BLOCKS = GroupBlocks.of(())


def transfer_names(room: int) -> tuple[str, str]:
    """The name and the secret of a room's transfer, which both sides derive: the room is all that a router gives them.

    The secret is as hard to guess as the room, 63 random bits of the router's.
    """
    room_bytes = str(room).encode()
    name, secret = (
        hashlib.blake2b(room_bytes, digest_size=16, person=use).hexdigest()
        for use in (b"sglang-name", b"sglang-secret")
    )
    return f"sglang-{name}", secret


def error_from(reason: str, room: int) -> KVConnectorError:
    """The typed error of a worker's reason, which is `Type: text`."""
    name, _, text = reason.partition(": ")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, KVConnectorError)):
        kind, text = RemoteError, reason
    return kind(text.removesuffix(f"; {kind.remedy}"), room=room)
