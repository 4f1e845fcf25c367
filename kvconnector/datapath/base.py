"""The data path's contract: programs in, completions out; nothing here ever blocks.

A program streams the chunks of one read. `submit_*` and `stop_*` may be called between `step`s by the thread that owns
the data path; `step` moves what can move and returns what happened, as session events.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import KVConnectorError, TransportError
from kvconnector.planning import GroupBlocks, SegmentWindow
from kvconnector.session import events as ev
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


class EventQueue(list[DataEvent]):
    """Events that are not drained yet, oldest first. `stopped` and `failed`: of reads that hold no slots."""

    def drain(self) -> list[DataEvent]:
        """Take all events."""
        taken = self[:]
        self.clear()
        return taken

    def stopped(self, read_id: int) -> None:
        """A read ended because it was asked to, and writes nothing any more."""
        self += [ev.ReceiveStopped(read_id), ev.ReceiveDrained(read_id)]

    def failed(self, read_id: int, error: KVConnectorError) -> None:
        """A read ended by an error, and writes nothing any more."""
        self += [ev.ReceiveFailed(read_id, error), ev.ReceiveDrained(read_id)]


def as_connector_error(error: RelayoutError | KVConnectorError) -> KVConnectorError:
    """Why a program cannot be copied, as an error of ours."""
    return error if isinstance(error, KVConnectorError) else TransportError(str(error))


Chunks: TypeAlias = npt.NDArray[np.void]


def paged_tokens(
    window: SegmentWindow, member: int, blocks: GroupBlocks, block_size: int
) -> tuple[int, TokenRuns]:
    """Where a copy from a member of a window's stripe on finds its tokens, as `PagedSide` takes it: `token_start`,
    `runs`.

    `blocks` are the request's, of `block_size` tokens on this rank; `PagedSide` refuses tokens before them.
    """
    stripe, first_token = window.stripe, blocks.first_block * block_size
    if stripe.is_dense:
        return member - first_token, ADJACENT
    turn, skip = divmod(member, stripe.run)
    runs = TokenRuns(stripe.run, stripe.period, skip)
    return stripe.first + turn * stripe.period - first_token, runs


class Program(msgspec.Struct, frozen=True, eq=False):
    """A read as one side of it packs or unpacks it. `chunks` has dtype `planning.CHUNK_DTYPE`, in the order in which
    they are sent; chunk `i` has tag `first_tag + i`.
    """

    segments: tuple[SegmentWindow, ...]
    chunks: Chunks
    blocks: tuple[GroupBlocks, ...]

    @property
    def chunks_nbytes(self) -> npt.NDArray[np.int64]:
        """Bytes of every chunk."""
        per_token = np.array([s.part_token_bytes for s in self.segments], dtype=np.int64)
        nbytes: npt.NDArray[np.int64] = self.chunks["num_parts"].astype(np.int64)
        nbytes *= self.chunks["num_tokens"]
        nbytes *= per_token[self.chunks["segment"]]
        return nbytes
