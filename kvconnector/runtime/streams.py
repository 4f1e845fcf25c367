"""Requests of a producer engine that their consumers read while they are computed."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from kvconnector.errors import RemoteProtocolError
from kvconnector.ids import new_secret
from kvconnector.layout import NO_TOKENS, GroupBlocks, Watermark
from kvconnector.planning import KeepsAll, Retention
from kvconnector.runtime.params import StreamRequest
from kvconnector.session.orders import GrowRequest, Order, WithdrawRequest
from kvconnector.topology import EngineGeometry


class Stream(msgspec.Struct, eq=False, gc=False):
    """`has_begun`: the engine gave the request blocks. `is_void`: it took them back.

    `known` are the blocks of each cache group, as ids and as they travel; there are none before the engine gave some.
    """

    transfer_id: str
    secret: str
    watermark: Watermark = NO_TOKENS
    has_begun: bool = False
    is_void: bool = False
    known: tuple[tuple[list[int], GroupBlocks], ...] = ()

    def blocks(
        self, ids_by_group: Sequence[Sequence[int]], first_blocks: Sequence[int]
    ) -> tuple[GroupBlocks, ...]:
        """The request's blocks by now. Only ids are converted that it had not before: long prompts have thousands, and
        grow in every step.

        Raises:
            BlockIdError: block ids that no pool has.
        """
        before = self.known or (_NOTHING,) * len(ids_by_group)
        groups = zip(before, map(list, ids_by_group), first_blocks, strict=True)
        self.known = tuple([_continued(*group) for group in groups])
        return tuple([blocks for _, blocks in self.known])


def _continued(
    before: tuple[list[int], GroupBlocks], ids: list[int], first_block: int
) -> tuple[list[int], GroupBlocks]:
    """Return a group's blocks, converted as far as they are others than `before`."""
    known, blocks = before
    if ids[: len(known)] == known and blocks.first_block == first_block:
        return ids, blocks.extended(ids[len(known) :])
    return ids, GroupBlocks.of(ids, first_block)


_NO_BLOCKS = GroupBlocks.of(())
_NOTHING = list[int](), _NO_BLOCKS


class Streams:
    """How far each of them is. Methods return orders for the workers."""

    def __init__(self, engine: EngineGeometry, retentions: Sequence[Retention]) -> None:
        # only blocks of groups that keep every token stay the same while more tokens are computed
        self._block_tokens = [
            group.virtual_block_tokens if isinstance(retention, KeepsAll) else None
            for group, retention in zip(engine.ranks[0].groups, retentions, strict=True)
        ]
        self._no_blocks = (_NO_BLOCKS,) * engine.num_groups
        self._streams: dict[str, Stream] = {}
        self._names: set[str] = set()

    def __repr__(self) -> str:
        return f"<Streams {sorted(self._streams)}>"

    def open(self, request_id: str, asked: StreamRequest, held: Container[str]) -> GrowRequest:
        """A request was queued.

        Args:
            request_id: the engine's name for it.
            asked: the router's name for its transfer, and the secret.
            held: names of transfers that have been offered and are not over.

        Raises:
            RemoteProtocolError: another request has the transfer's name.
        """
        if asked.transfer_id in self._names or asked.transfer_id in held:
            raise RemoteProtocolError(
                "the name of a transfer is in use", request=request_id, transfer=asked.transfer_id
            )
        self.close(request_id)
        stream = self._streams[request_id] = Stream(asked.transfer_id, asked.transfer_secret)
        self._names.add(asked.transfer_id)
        return _order(request_id, stream, self._no_blocks)

    def grow(
        self, request_id: str, blocks: Sequence[Sequence[int]], num_tokens: int, ahead_tokens: int
    ) -> list[Order]:
        """See `Scheduler.grow`."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_void:
            return []
        if num_tokens < stream.watermark.num_tokens:
            return self.withdraw(request_id)
        watermark = Watermark(num_tokens, ahead_tokens)
        if stream.has_begun and watermark == stream.watermark:
            return []
        stream.watermark, stream.has_begun = watermark, True
        # consumers take a block without tokens for the beginning
        stop = max(1, watermark.step_stop)
        known = [
            () if block_tokens is None else ids[: -(-stop // block_tokens)]
            for block_tokens, ids in zip(self._block_tokens, blocks, strict=True)
        ]
        return [_order(request_id, stream, stream.blocks(known, [0] * len(known)))]

    def withdraw(self, request_id: str) -> list[Order]:
        """See `Scheduler.withdraw`."""
        stream = self._streams.get(request_id)
        if stream is None or stream.is_void:
            return []
        stream.is_void = True
        return [WithdrawRequest(request_id)]

    def of(self, request_id: str) -> Stream:
        """Return what is known of a request, or a name and a secret for its transfer."""
        return self._streams.get(request_id) or Stream(request_id, new_secret())

    def close(self, request_id: str) -> None:
        """Forget a request that is computed, or over."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._names.discard(stream.transfer_id)


def _order(request_id: str, stream: Stream, blocks: tuple[GroupBlocks, ...]) -> GrowRequest:
    return GrowRequest(request_id, stream.transfer_id, stream.secret, blocks, stream.watermark)
