"""A producer engine's requests that consumers read: while they are computed, and afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.errors import BlockIdError, LocalError, RemoteProtocolError, require_counts
from kvconnector.ids import Id, new_secret
from kvconnector.layout import NO_TOKENS, GroupBlocks, Watermark
from kvconnector.planning import KeepsAll, KeepsState, Retention
from kvconnector.runtime.engine import WorkerMetadata
from kvconnector.runtime.params import StreamRequest
from kvconnector.runtime.remote_request import block_lists, tokens_to_load
from kvconnector.session.orders import (
    GrowRequest,
    HoldRequest,
    Order,
    ReclaimRequest,
    WithdrawRequest,
)
from kvconnector.topology import EngineGeometry
from kvconnector.wire.messages import MAX_EXTRA_BYTES


class Stream(msgspec.Struct, eq=False, gc=False):
    """A request that consumers read while it is computed. `producer_started`: the engine has given it blocks.
    `is_void`: the engine has taken them back.

    `known` are the blocks of each cache group, as ids and as they travel; empty before the engine gave some.
    """

    transfer_id: str
    secret: str
    watermark: Watermark = NO_TOKENS
    producer_started: bool = False
    is_void: bool = False
    known: tuple[tuple[list[int], GroupBlocks], ...] = ()

    def blocks(
        self, ids_by_group: Sequence[Sequence[int]], first_blocks: Sequence[int]
    ) -> tuple[GroupBlocks, ...]:
        """Return the request's blocks, of which only new ids are converted: long prompts have thousands, and grow in
        every step.

        Raises:
            BlockIdError: block ids that no pool has.
        """
        before = self.known or (_NOTHING,) * len(ids_by_group)
        groups = zip(before, map(list, ids_by_group), first_blocks, strict=True)
        self.known = tuple([_continued(*group) for group in groups])
        return tuple([blocks for _, blocks in self.known])

    def order(self, request_id: str, blocks: tuple[GroupBlocks, ...]) -> GrowRequest:
        """Return the order that lets consumers read these blocks up to the watermark."""
        return GrowRequest(request_id, self.transfer_id, self.secret, blocks, self.watermark)


def _continued(
    before: tuple[list[int], GroupBlocks], ids: list[int], first_block: int
) -> tuple[list[int], GroupBlocks]:
    """Return a group's blocks, of which only those after `before` are converted if these are still its first."""
    known, blocks = before
    if ids[: len(known)] == known and blocks.first_block == first_block:
        return ids, blocks.extended(ids[len(known) :])
    return ids, GroupBlocks.of(ids, first_block)


class FullPools:
    """Which offers to take back: the oldest, while all of them hold more than a share `above` of a group's blocks.

    The newest is never taken back, and none is named twice: what a consumer has asked for meanwhile stays, and ends as
    its consumer says. A block that several offers share counts once. Work per offer is in proportion to its blocks.
    """

    def __init__(self, num_blocks: Sequence[int], above: float) -> None:
        self._room = [int(count * above) for count in num_blocks]
        self._holders = [np.zeros(count, np.int32) for count in num_blocks]
        self._used = [0] * len(num_blocks)
        self._offers: dict[str, tuple[GroupBlocks, ...]] = {}

    def add(self, request_id: str, blocks: tuple[GroupBlocks, ...]) -> None:
        """Count a new offer. Ids outside the pools, which the workers refuse, stand for no blocks."""
        self._offers[request_id] = blocks
        for group in range(len(blocks)):
            holders, ids = self._holders[group], self._ids(blocks, group)
            self._used[group] += int(np.count_nonzero(holders[ids] == 0))
            holders[ids] += 1

    def remove(self, request_id: str) -> None:
        """Forget an offer, if it still counts."""
        blocks = self._offers.pop(request_id, ())
        for group in range(len(blocks)):
            holders, ids = self._holders[group], self._ids(blocks, group)
            holders[ids] -= 1
            self._used[group] -= int(np.count_nonzero(holders[ids] == 0))

    def _ids(self, blocks: tuple[GroupBlocks, ...], group: int) -> npt.NDArray[np.int32]:
        """Return an offer's blocks of one group, each once."""
        ids: npt.NDArray[np.int32] = np.unique(blocks[group].block_ids)
        return ids[ids < len(self._holders[group])]

    def excess(self) -> list[str]:
        """Return the offers to take back, oldest first. They count no more."""
        found = []
        while len(self._offers) > 1 and any(
            used > room for used, room in zip(self._used, self._room, strict=True)
        ):
            found.append(next(iter(self._offers)))
            self.remove(found[-1])
        return found


_NO_BLOCKS = GroupBlocks.of(())
_NOTHING = list[int](), _NO_BLOCKS


class Offers:
    """All requests of an engine that consumers may read, until their blocks are free. Methods return orders for the
    workers, whose pools are those of `workers`.
    """

    def __init__(
        self,
        engine: EngineGeometry,
        retentions: Sequence[Retention],
        workers: Sequence[WorkerMetadata],
        reclaim_above: float = 1.0,
    ) -> None:
        sizes = [group.virtual_block_tokens for group in engine.ranks[0].groups]  # in rows
        self._groups = list(zip(sizes, retentions, strict=True))
        self._streams: dict[str, Stream] = {}
        self.held: dict[str, str] = {}
        """The transfer of each request that is held."""
        self._names: set[str] = set()
        self._full: FullPools | None = None
        if reclaim_above < 1.0:
            # ranks may have pools of different sizes, and an id stands for a block in each
            num_blocks = [
                min(found) for found in zip(*(w.num_blocks for w in workers), strict=True)
            ]
            self._full = FullPools(num_blocks, reclaim_above)

    def __repr__(self) -> str:
        return f"<Offers {len(self.held)} held, streams {sorted(self._streams)}>"

    def open(self, request_id: str, asked: StreamRequest) -> GrowRequest:
        """Let a consumer follow a queued request. `asked` has the router's name for the transfer.

        Raises:
            LocalError: The request is not over, or its blocks are held.
            RemoteProtocolError: another request has the transfer's name.
        """
        if request_id in self._streams or request_id in self.held:
            raise LocalError("a request was queued twice", request=request_id)
        if asked.transfer_id in self._names:
            raise RemoteProtocolError(
                "the name of this transfer is already in use",
                request=request_id,
                transfer=asked.transfer_id,
            )
        stream = self._streams[request_id] = Stream(asked.transfer_id, asked.transfer_secret)
        self._names.add(asked.transfer_id)
        return stream.order(request_id, (_NO_BLOCKS,) * len(self._groups))

    def grow(
        self, request_id: str, blocks: Sequence[Sequence[int]], num_tokens: int, ahead_tokens: int
    ) -> list[Order]:
        """See `Scheduler.grow`."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_void:
            return []
        require_counts(BlockIdError, num_tokens=num_tokens, ahead_tokens=ahead_tokens)
        if num_tokens < stream.watermark.num_tokens:
            return self.withdraw(request_id)
        watermark = Watermark(num_tokens, ahead_tokens)
        if stream.producer_started and watermark == stream.watermark:
            return []
        all_ids, firsts = block_lists(request_id, blocks, None, len(self._groups))
        # a block without tokens tells consumers that the producer has started it
        stop = max(1, watermark.step_stop)
        # only blocks of groups that keep every token stay the same while more tokens are computed
        known: list[list[int]] = []
        for (size, retention), ids in zip(self._groups, all_ids, strict=True):
            if not isinstance(retention, KeepsAll):
                known.append([])
                continue
            m = retention.row_tokens
            known.append(ids[: -(-max(1, stop // m) // size)])
            if len(ids) * size < watermark.step_stop // m:
                raise BlockIdError(
                    f"the blocks of request {request_id} do not hold these tokens",
                    tokens=watermark.step_stop,
                    blocks_hold=len(ids) * size * m,
                )
        held = stream.blocks(known, firsts)
        stream.watermark, stream.producer_started = watermark, True
        return [stream.order(request_id, held)]

    def withdraw(self, request_id: str) -> list[Order]:
        """See `Scheduler.withdraw`."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_void:
            return []
        stream.is_void = True
        return [WithdrawRequest(request_id)]

    def close(self, request_id: str) -> None:
        """Forget a stream whose request is over."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._names.discard(stream.transfer_id)

    def hold(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        first_blocks: Sequence[int] | None,
        num_tokens: int,
        num_encoder_tokens: int,
        lease_duration_s: float,
        extra: bytes,
    ) -> HoldRequest:
        """See `Scheduler.offer`, whose arguments and errors these are."""
        if request_id in self.held:
            raise LocalError(
                "the request is already offered: its blocks are held until finished_sending names it",
                request=request_id,
            )
        ids, firsts = block_lists(request_id, blocks, first_blocks, len(self._groups))
        stream = self._streams.get(request_id) or Stream(self._new_name(request_id), new_secret())
        try:
            msgspec.convert(stream.transfer_id, Id).encode()
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise LocalError(
                "a message cannot carry this request's id: it must be 1 to 512 printable characters",
                request=request_id,
            ) from error
        held = stream.blocks(ids, firsts)
        self._check_tokens(
            f"the blocks of request {request_id}", held, num_tokens, num_encoder_tokens
        )
        if not isinstance(extra, bytes) or len(extra) > MAX_EXTRA_BYTES:
            raise LocalError(
                f"an offer's extra must be bytes, at most {MAX_EXTRA_BYTES}",
                request=request_id,
                got=type(extra).__name__,
                length=len(extra) if isinstance(extra, bytes | str) else None,
            )
        if type(lease_duration_s) not in (int, float) or not 0 <= lease_duration_s <= 1e6:
            raise LocalError(
                "lease_duration_s must be a number from 0 to 10^6",
                request=request_id,
                lease_duration_s=lease_duration_s,
            )
        self._streams.pop(request_id, None)
        if self._full is not None:
            self._full.add(request_id, held)
        self.held[request_id] = stream.transfer_id
        self._names.add(stream.transfer_id)
        return HoldRequest(
            request_id=request_id,
            transfer_id=stream.transfer_id,
            secret=stream.secret,
            blocks=held,
            # the tokens that a consumer may read of each group
            num_tokens=max(num_tokens, num_encoder_tokens),
            lease_duration_s=lease_duration_s,
            extra=extra,
        )

    def _new_name(self, request_id: str) -> str:
        """Return a name for an offer's transfer: the request's, unless a client has given it to another transfer."""
        name = request_id
        while name in self._names:
            name = f"{request_id}-{new_secret()[:8]}"
        return name

    def released(self, request_id: str) -> None:
        """Record that the blocks of a request are free."""
        self._names.discard(self.held.pop(request_id, ""))
        if self._full is not None:
            self._full.remove(request_id)

    def reclaim(self) -> list[ReclaimRequest]:
        """Return orders to take back the oldest requests, if those that are held fill too much of a pool."""
        return [] if self._full is None else [ReclaimRequest(each) for each in self._full.excess()]

    def _check_tokens(
        self, what: str, held: Sequence[GroupBlocks], num_tokens: int, num_encoder_tokens: int
    ) -> None:
        """Raises BlockIdError: a group's blocks do not hold its tokens, or one of them twice."""
        require_counts(BlockIdError, num_tokens=num_tokens, num_encoder_tokens=num_encoder_tokens)
        for group, (size, retention) in zip(held, self._groups, strict=True):
            tokens = tokens_to_load(retention, 0, num_tokens, num_encoder_tokens)
            if isinstance(retention, KeepsState) and 0 <= group.first_block < num_tokens:
                # a state of an earlier position, where the consumer continues
                tokens = range(group.first_block, group.first_block + 1)
            group.check_hold(tokens, size, what=what)
