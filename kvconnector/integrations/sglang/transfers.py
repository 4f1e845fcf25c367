"""The requests of one SGLang rank, each with the calls that SGLang's queues make.

SGLang runs scheduler and model of a rank in one process, and every rank runs the same scheduler: each creates the same
senders and receivers in the same order, and reduces what `poll` says over its ranks. So each rank gives orders to its
own worker, with the blocks of its own pools, and no scheduler half is needed. All methods are for the scheduler's
thread, and none but `failure_exception` blocks. Bytes move in the worker's own, where every wait for a peer has a
deadline (`peer`, `lease`), and becomes a failure with the error's type.

A *producer's* request is a prompt that is streamed: it is named before it is computed, `send` moves the watermark after
each chunk, and gives all blocks to the lease with the last one. Until then SGLang may take the blocks back at any time:
consumers believe nothing of a prompt that was withdrawn. After that the blocks are the lease's until the worker reports
the request, done or not, and `poll` says `TRANSFERRING` until then. SGLang's own backends let it wait in `poll` for a
decode engine before it computes a prompt. This one does not: a decode engine reads whenever it is ready. It does not
ask how long a prefix the decode engine has, either: what is not needed is not read. A *consumer's* request is wanted
when SGLang has looked up its producer, and loaded when it has blocks; these are the load's until the worker reports it.

If one rank fails, SGLang frees the request's blocks in all of them, although a lease or a load of ours may still use
them. It asks each for its `failure_exception` first, which ends what is left and waits until nothing reads or writes
the blocks, `SETTLE_S` at most. Only a worker whose driver hangs takes longer, and that is logged as an error.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from kvconnector import errors
from kvconnector.errors import (
    KVConnectorError,
    RemoteError,
    RemoteProtocolError,
    TransferAbortedError,
)
from kvconnector.integrations.sglang.requests import NO_BLOCKS
from kvconnector.integrations.sglang.settings import prefill_address
from kvconnector.layout import Watermark
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
    WithdrawRequest,
)

if TYPE_CHECKING:
    from kvconnector.integrations.sglang.rank import RankTransfers

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
WAIT_S = 0.01


class Stage(IntEnum):
    """Where a request is. The values are those of SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    DONE = 4


class RoomTransfer:
    """One request of one rank, as SGLang's queues use it: while its stage is `TRANSFERRING` the worker uses its blocks,
    and reports the end.

    Args:
        mgr: The rank.
        bootstrap_addr: Where the router says that the prefill engine is.
        bootstrap_room: The router's number for the request.
    """

    gives_up: ClassVar[type[WithdrawRequest | DropRequest]]

    def __init__(
        self, mgr: RankTransfers, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        self.kv_mgr = mgr
        self.room = bootstrap_room or 0
        self.request_id = f"room-{self.room}.{next(mgr.numbers)}"
        self.stage = Stage.WAITING
        self.error: KVConnectorError | None = None
        self._address = bootstrap_addr
        self._names = self.request_id, *transfer_names(self.room)
        self._row = 0
        self._turn = 0

    def poll(self) -> int:
        """Return where the request is, after what the worker has reported by now."""
        if self._turn == self.kv_mgr.turn:  # SGLang goes through its queue again
            self.kv_mgr.take()
        self._turn = self.kv_mgr.turn
        return self.stage

    def _transfer(self, order: HoldRequest | LoadRequest) -> None:
        self.stage = Stage.TRANSFERRING
        self.kv_mgr.order(order, self)

    def ended(self, reason: str | None) -> None:
        """The worker is done with the blocks; with a `reason` it failed."""
        if reason is not None and self.error is None:
            self.error = error_from(reason, self.room)
        self.stage = Stage.DONE if self.error is None else Stage.FAILED

    def abort(self) -> None:
        """Give the request up: it has failed once nothing uses its blocks. Idempotent."""
        self._fail(TransferAbortedError("the request was aborted here", room=self.room))

    clear = abort

    def _fail(self, error: KVConnectorError) -> None:
        if self.stage in {Stage.DONE, Stage.FAILED}:
            return
        if self.error is None:
            self.error = error
            self.kv_mgr.order(self.gives_up(self.request_id))
        if self.stage is not Stage.TRANSFERRING:
            self.ended(None)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside is the request's failure, and no other's."""
        try:
            yield
        except KVConnectorError as error:
            self._fail(error)

    def failure_exception(self) -> NoReturn:
        """Make sure that nothing uses the blocks, wherever the request failed.

        Raises:
            KVConnectorError: this rank's error, or one that says that it is another rank's.
        """
        error = self.error
        self.abort()
        until_s = time.monotonic() + SETTLE_S
        while self.stage is Stage.TRANSFERRING and time.monotonic() < until_s:
            self.kv_mgr.worker.wait(WAIT_S)
            self.kv_mgr.take()
        if self.stage is Stage.TRANSFERRING:
            logger.error("the blocks of room %s are freed, and may still be in use", self.room)
        if error is None or self.stage is Stage.DONE:
            error = RemoteError("the request failed in another rank of this engine", room=self.room)
            error.is_from_another_rank = True  # type: ignore[attr-defined] # SGLang's name: it logs once
        raise error


class SentPrompt(RoomTransfer):
    """A prompt that this rank computes and holds."""

    gives_up = WithdrawRequest
    _early_send_wait_event: Any = None
    """SGLang's: what is sent next is there after this event."""

    def __init__(
        self,
        mgr: RankTransfers,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.num_tokens = 0
        """Tokens that were published."""
        self._pages = NO_BLOCKS
        if self.room in mgr.rooms:
            self.error = RemoteProtocolError(
                "another request has this bootstrap room", room=self.room
            )
            self.stage = Stage.FAILED
            return
        mgr.rooms.add(self.room)
        self._grow()

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Take the request's row of metadata."""
        self._row = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Returns True if `send` has something to do."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Sequence[int],
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Let consumers read the prompt's next chunk, as far as the current stream has written it.

        Args:
            kv_indices: Its pages.
            state_indices: With the last chunk, what `Layout.blocks` takes: all blocks are the lease's from then on.
            num_kv_tokens: Tokens in the pages, if they are not full.
        """
        if self.stage is not Stage.WAITING:
            return
        early, self._early_send_wait_event = self._early_send_wait_event, None
        layout, pages = self.kv_mgr.layout, [int(page) for page in kv_indices]
        with self.failing(), self.kv_mgr.after(early):
            self._pages = self._pages.extended(pages)
            self.num_tokens += (
                len(pages) * layout.page_size if num_kv_tokens is None else num_kv_tokens
            )
            if state_indices is None:
                self._grow()
                return
            self.kv_mgr.rows.fill(self._row)
            blocks = layout.blocks(self._pages, state_indices, self._row, self.num_tokens)
            self._transfer(HoldRequest(*self._names, blocks, self.num_tokens))

    def _grow(self) -> None:
        blocks = self.kv_mgr.layout.growing(self._pages)
        self.kv_mgr.order(GrowRequest(*self._names, blocks, Watermark(self.num_tokens)))

    def ended(self, reason: str | None) -> None:
        super().ended(reason)
        self.kv_mgr.rooms.discard(self.room)

    def mark_prefill_complete(self) -> None:
        """Nothing: decode engines are not kept from allocating before."""

    poll_pp_consensus = RoomTransfer.poll


class LoadedPrompt(RoomTransfer):
    """A prompt that this rank reads. Whoever calls `send_metadata` first sets what that has no argument for."""

    gives_up = DropRequest
    num_tokens = 0
    window_tokens: int | None = None
    stream: Any = None

    def __init__(
        self, mgr: RankTransfers, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.stage = Stage.BOOTSTRAPPING

    def init(self, prefill_dp_rank: int) -> None:
        """Meet the producer, and keep its lease alive."""
        if self.stage is not Stage.BOOTSTRAPPING:
            return
        with self.failing():
            engine = prefill_address(self._address, self.kv_mgr.config)
            self.kv_mgr.order(WantRequest(*self._names, engine, is_followed=True))
            self.stage = Stage.WAITING

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: object,
    ) -> None:
        """Read the prompt into these blocks, as far and as soon as it is computed.

        Args:
            kv_indices: Pages of the tokens past the prefix.
            aux_index: Row of metadata.
            state_indices: What `Layout.blocks` takes.
            decode_prefix_len: Tokens that this engine has cached, in whole pages.
        """
        if self.stage is not Stage.WAITING:
            return
        self._row = aux_index or 0
        with self.failing(), self.kv_mgr.after(self.stream):
            ranges, blocks = self.kv_mgr.layout.to_load(
                [int(page) for page in kv_indices],
                state_indices or (),
                self._row,
                prefix_tokens=decode_prefix_len or 0,
                num_tokens=self.num_tokens,
                window_tokens=self.window_tokens,
            )
            self._transfer(LoadRequest(self.request_id, ranges, blocks, remote_blocks=()))

    def ended(self, reason: str | None) -> None:
        super().ended(reason)
        if self.stage is Stage.DONE:
            with self.kv_mgr.after():
                self.kv_mgr.rows.spread(self._row)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing: `failure_exception` has ended the load, and waited for that."""


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
