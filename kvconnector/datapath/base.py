"""The data path's contract: programs in, completions out; nothing here ever blocks.

A program streams the chunks of one read. `submit_*` and `stop_*` may be called between `step`s by the thread that owns
the data path; `step` moves what can move and returns what happened, as session events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector.planning import GroupBlocks
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId

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
)


@dataclass(frozen=True, slots=True)
class SegmentWindow:
    """A segment as this side addresses it: rows of the part table `[group, family]` from `first_row`, local heads from
    `head_start`. `order` is the element order inside a chunk.
    """

    group: int
    family: int
    first_row: int
    head_start: int
    num_heads: int
    part_token_bytes: int
    order: str


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A read as one side executes it. `chunks` has dtype `planning.CHUNK_DTYPE`; chunk `i` has tag `first_tag + i`."""

    segments: tuple[SegmentWindow, ...]
    chunks: npt.NDArray[np.void]
    blocks: tuple[GroupBlocks, ...]

    def chunk_nbytes(self, index: int) -> int:
        """Bytes of one chunk."""
        chunk = self.chunks[index]
        per_token = self.segments[int(chunk["segment"])].part_token_bytes
        return int(chunk["num_parts"]) * int(chunk["num_tokens"]) * per_token

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        per_token = np.array([s.part_token_bytes for s in self.segments], dtype=np.int64)
        size = self.chunks["num_parts"].astype(np.int64) * self.chunks["num_tokens"]
        return int((size * per_token[self.chunks["segment"]]).sum())


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One completed read: payload bytes, and seconds from its posting to the last chunk's unpacking."""

    read_id: int
    nbytes: int
    seconds: float
    chunks: int
    path: str


class DataPath(Protocol):
    """What the runtime drives. Every submitted program ends in exactly one event that says so."""

    def open_endpoint(
        self, link: LinkId, transport_address: bytes, warm_up_tag: int, warm_up_bytes: int
    ) -> None:
        """Reach a consumer worker and send it the warm-up message: `EndpointOpened` or `EndpointFailed`."""

    def close_endpoint(self, link: LinkId) -> None:
        """Forget a consumer worker; its sends stop."""

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

    def submit_receive(self, read_id: int, program: Program) -> None:
        """Receive a read: `ReceivePosted`, then `ReceiveFinished`; or `ReceiveFailed` or `ReceiveStopped` when nothing
        writes its blocks any more, and `ReceiveDrained` when its slots are free.
        """

    def stop_receive(self, read_id: int) -> None:
        """Write no further chunk into the blocks: `ReceiveStopped` follows, unless the read has ended."""

    def drain_receive(self, read_id: int, sent_chunks: int | None) -> None:
        """The peer sends exactly the first `sent_chunks` chunks of a stopped or failed read (None: it is gone).

        Frees the slots accordingly.
        """

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
        """Move chunks, without the GIL, until `step` has something to tell, one of `fds` is readable, or time is over.

        Returns at once if nothing is under way. A data path moves chunks here or in `step`.
        """

    def is_waiting_for_device(self) -> bool:
        """Whether something only `step` can notice is under way, so that the caller must not sleep long."""

    @property
    def num_busy_slots(self) -> int:
        """Slots of both directions that a read holds."""

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has work, or -1."""

    def close(self) -> None:
        """Release everything. Idempotent."""
