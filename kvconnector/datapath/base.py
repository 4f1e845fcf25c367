"""The data path's contract: programs in, completions out; nothing here ever blocks.

A program streams the chunks of one read. `submit_*` and `stop_*` may be called between `step`s by the thread that owns
the data path; `step` moves what can move and returns what happened, as session events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.datapath.rectangles import Rectangle, rectangles_of
from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import GroupBlocks
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.topology import ALL_TOKENS, Stripe
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.relayout import RelayoutError, TokenRuns
from kvconnector_kernels.relayout.runs import ADJACENT

DataEvent: TypeAlias = (
    ev.SendFinished
    | ev.SendStopped
    | ev.ReceivePosted
    | ev.ReceiveAdvanced
    | ev.ReceiveFinished
    | ev.ReceiveFailed
    | ev.ReceiveStopped
    | ev.ReceiveDrained
    | ev.WarmedUp
    | ev.EndpointOpened
    | ev.EndpointFailed
    | ev.LinkLost
)


T = TypeVar("T")


class Untold(list[T]):
    """What happened and was not told yet, in order."""

    def take(self) -> list[T]:
        """All of it, which is told by that."""
        taken = self[:]
        self.clear()
        return taken


def as_ours(error: RelayoutError | KVConnectorError) -> KVConnectorError:
    """Why a program cannot be copied, as an error of ours."""
    return error if isinstance(error, KVConnectorError) else TransportError(str(error))


Chunks: TypeAlias = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class SegmentWindow:
    """A segment as this side addresses it: rows of the part table `[group, family]` from `first_row`, local heads from
    `head_start`, and those of `stripe` among the tokens that this rank stores. `order` is the element order in a chunk.
    """

    group: int
    family: int
    first_row: int
    head_start: int
    num_heads: int
    part_token_bytes: int
    order: str
    stripe: Stripe = ALL_TOKENS

    def paged_tokens(
        self, member: int, blocks: GroupBlocks, block_size: int
    ) -> tuple[int, TokenRuns]:
        """Where a copy from a member of the stripe on finds its tokens, as `PagedSide` takes it: `token_start`, `runs`.

        `blocks` are the request's, of `block_size` tokens on this rank; `PagedSide` refuses tokens in front of them.
        """
        stripe, first_token = self.stripe, blocks.first_block * block_size
        if stripe.is_dense:
            return member - first_token, ADJACENT
        turn, skip = divmod(member, stripe.run)
        runs = TokenRuns(stripe.run, stripe.period, skip)
        return stripe.first + turn * stripe.period - first_token, runs


class Program:
    """A read as one side executes it. `chunks` has dtype `planning.CHUNK_DTYPE`; chunk `i` has tag `first_tag + i`.

    `chunks` may be what cuts them, for a read that may not need them. `rectangles` is then what they are put together.
    """

    def __init__(
        self,
        segments: tuple[SegmentWindow, ...],
        chunks: Chunks | Callable[[], Chunks],
        blocks: tuple[GroupBlocks, ...],
        rectangles: tuple[Rectangle, ...] | None = None,
    ) -> None:
        self.segments = segments
        self.blocks = blocks
        self._chunks = chunks
        self._rectangles = rectangles

    @property
    def chunks(self) -> Chunks:
        """What is sent, in order."""
        if callable(self._chunks):
            self._chunks = self._chunks()
        return self._chunks

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """What the chunks of each segment are, put together.

        Raises:
            RelayoutError: a segment whose chunks are no rectangle.
        """
        if self._rectangles is None:
            self._rectangles = rectangles_of(self.chunks, len(self.segments))
        return self._rectangles

    def chunk_nbytes(self, index: int) -> int:
        """Bytes of one chunk."""
        chunk = self.chunks[index]
        per_token = self.segments[int(chunk["segment"])].part_token_bytes
        return int(chunk["num_parts"]) * int(chunk["num_tokens"]) * per_token

    @property
    def chunks_nbytes(self) -> npt.NDArray[np.int64]:
        """Bytes of every chunk."""
        per_token = np.array([s.part_token_bytes for s in self.segments], dtype=np.int64)
        nbytes: npt.NDArray[np.int64] = self.chunks["num_parts"].astype(np.int64)
        nbytes *= self.chunks["num_tokens"]
        nbytes *= per_token[self.chunks["segment"]]
        return nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.chunks_nbytes.sum())


class ReadOrigin(msgspec.Struct, frozen=True, eq=False):
    """Where a read's bytes are in the pools of the producer worker at `link`, for a data path that can go and get them.

    `segments[i]` is the program's segment `i` in *its* tables, `blocks` are its blocks; both are what a peer said and
    what a router passed on, so they are checked before use. `lease_key` is what its lease board knows them by, and
    `token_stop` the end of the last token that is read.
    """

    link: LinkId
    segments: tuple[SegmentWindow, ...]
    blocks: tuple[GroupBlocks, ...]
    lease_key: bytes
    token_stop: int


DIRECT_PATHS = ("peer", "rma")
"""Reads of the producer's pools: through CUDA IPC and through cross-memory attach."""


class TransferRecord(msgspec.Struct, frozen=True):
    """One completed read: payload bytes, and seconds from its posting or first copy to the last byte in place.

    `path` is how it came: one of `DIRECT_PATHS`, or the name of how it was sent.
    """

    read_id: int
    nbytes: int
    seconds: float
    chunks: int
    path: str

    @classmethod
    def of(cls, read_id: int, program: Program, seconds: float, path: str) -> TransferRecord:
        """Of all that a program moves."""
        return cls(read_id, program.total_bytes, seconds, len(program.chunks), path)


class DataPath(Protocol):
    """What the runtime drives. Every submitted program ends in exactly one event that says so."""

    def open_endpoint(
        self, link: LinkId, transport_address: bytes, warm_up_tag: int, warm_up_bytes: int
    ) -> None:
        """Reach a consumer worker and send it the warm-up message: `EndpointOpened` or `EndpointFailed`."""

    def close_endpoint(self, link: LinkId) -> None:
        """Forget a consumer worker; its sends stop."""

    def endpoint(self, link: LinkId) -> int | None:
        """The transport's endpoint to a consumer worker, while it is open."""

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """Post the warm-up receive for `link`; returns its tag and size for the hello. `WarmedUp` follows."""

    def forget_warm_up(self, link: LinkId) -> None:
        """Cancel the warm-up receive of `link`, if it is still posted."""

    def submit_send(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """Stream a read to `link`: ends in `SendFinished` or `SendStopped`."""

    def stop_send(self, link: LinkId, read_id: int) -> None:
        """Send no further chunk of a read; no effect if it has ended."""

    def submit_receive(
        self, read_id: int, program: Program, origin: ReadOrigin | None = None
    ) -> None:
        """Receive a read: `ReceivePosted`, then `ReceiveFinished`; or `ReceiveFailed` or `ReceiveStopped` when nothing
        writes its blocks any more, and `ReceiveDrained` when its slots are free.

        With an `origin` the data path may read there itself if the lease is published; then there is no
        `ReceivePosted`, and `LeaseExpiredError` is the failure of a read whose lease ended in the meantime.
        """

    def stop_receive(self, read_id: int) -> None:
        """Write no further chunk into the blocks: `ReceiveStopped` follows, unless the read has ended."""

    def drain_receive(self, read_id: int, sent_chunks: int | None) -> None:
        """The peer sends exactly the first `sent_chunks` chunks of a stopped or failed read (None: it is gone).

        Frees the slots accordingly.
        """

    def export(self) -> PoolExport | None:
        """What consumers need to read these pools themselves; None if they cannot. Always the same."""

    def publish_lease(self, key: bytes, num_tokens: int) -> None:
        """Let consumers read blocks that are leased, once the engine's kernels before now have filled them."""

    def retract_lease(self, key: bytes) -> None:
        """From now on, no read of these blocks succeeds; no effect if they are not published."""

    def open_export(self, link: LinkId, export: PoolExport) -> str:
        """Reach a producer worker's pools, so that origins at `link` can be read. How they will be, in words for the
        log. `endpoint` is the transport's to that worker, if there is one; it must outlive the open export.

        Raises:
            TransportError: why they cannot be reached, or why it would not be worth it.
        """

    def close_export(self, link: LinkId) -> None:
        """Forget a producer worker's pools once no read of them is under way. No effect if they are not open."""

    def order_after(self, event: object) -> None:
        """Pack and unpack from now on only after a CUDA event that the engine recorded."""

    def step(self) -> list[DataEvent]:
        """Move what can move; return what happened. Call it until nothing did."""

    def take_records(self) -> list[TransferRecord]:
        """Reads completed since the last call."""

    @property
    def name(self) -> str:
        """What kind of data path this is, for logs and reports."""

    @property
    def is_pumping(self) -> bool:
        """Whether `pump` has something to do; the caller then sleeps in it."""

    def pump(self, timeout_s: float, fds: tuple[int, ...]) -> None:
        """Move chunks, without the GIL, until `step` has something to tell, one of `fds` is readable, a control message
        waits in the transport, or time is over.

        Returns at once if nothing is under way. A data path moves chunks here or in `step`.
        """

    def tell_news(self) -> bool:
        """There is something to do for who owns this data path. Whether it is awake, or woken by this, to see it. Any
        thread may say so.
        """

    def take_news(self) -> None:
        """The owner is about to do all that there is to do."""

    def has_news(self) -> bool:
        """Whether a visit would find something to do. Any thread may ask."""

    def sit(self, limit_s: float) -> bool:
        """Make the calling thread, a visitor, the owner of this data path and of all that its owner has, if the owner
        sleeps in `pump` or waits for the GIL; decided within `limit_s`, which is microseconds. Any thread may try.
        """

    def glance(self) -> None:
        """Begin and notice what can be begun and noticed in microseconds, as a visitor that does not want to `pump`."""

    def rise(self, return_by_s: float) -> None:
        """End a visit. The owner goes on in its `pump`, which returns at that time of the clock at the latest."""

    def is_waiting_for_device(self) -> bool:
        """Whether something only `step` can notice is under way, so that the caller must not sleep long."""

    @property
    def num_busy_slots(self) -> int:
        """Slots of both directions that a read holds."""

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has work, or -1."""

    def close(self) -> None:
        """Release everything. Idempotent."""


class SendsOnly:
    """A data path's answers where it has no direct path: every read is sent."""

    def export(self) -> PoolExport | None:
        """See `DataPath`."""
        return None

    def publish_lease(self, key: bytes, num_tokens: int) -> None:
        """See `DataPath`. Nobody was told where to look."""

    def retract_lease(self, key: bytes) -> None:
        """See `DataPath`."""

    def open_export(self, link: LinkId, export: PoolExport) -> str:
        """See `DataPath`."""
        raise TransportError("this worker's data path only receives", link=link)

    def close_export(self, link: LinkId) -> None:
        """See `DataPath`."""


class Unvisited:
    """A data path's answers where its owner never lets another thread do its work."""

    def tell_news(self) -> bool:
        """See `DataPath`. Whoever waits, waits for the control channel."""
        return False

    def take_news(self) -> None:
        """See `DataPath`."""

    def has_news(self) -> bool:
        """See `DataPath`."""
        return False

    def sit(self, limit_s: float) -> bool:
        """See `DataPath`."""
        return False

    def glance(self) -> None:
        """See `DataPath`. Nobody sits."""

    def rise(self, return_by_s: float) -> None:
        """See `DataPath`. Nobody sits."""
