"""A consumer's request whose blocks are on a producer, as the scheduler half sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvconnector.errors import BlockIdError, LocalError, require_counts
from kvconnector.layout import GroupBlocks
from kvconnector.planning import KeepsAll, KeepsEncoder, KeepsState, Retention, from_whole_block
from kvconnector.runtime.params import TransferParams
from kvconnector.session.orders import LoadRequest
from kvconnector.topology import GroupGeometry


def block_lists(
    request_id: str,
    blocks: Sequence[Sequence[int]],
    first_blocks: Sequence[int] | None,
    num_groups: int,
) -> tuple[list[list[int]], list[int]]:
    """Return the ids and the first block of each cache group; by default each begins at block 0.

    Raises:
        BlockIdError: not one list and one first block per cache group.
    """
    if not isinstance(request_id, str):
        raise LocalError("a request's id must be a string", request=request_id)
    try:
        ids = [list(group) for group in blocks]
        firsts = [0] * len(ids) if first_blocks is None else list(first_blocks)
    except TypeError as error:
        raise BlockIdError(
            "blocks must have a list of block ids for each cache group",
            request=request_id,
            blocks=blocks,
            first_blocks=first_blocks,
        ) from error
    for first in firsts:
        require_counts(BlockIdError, first_block=first)
    if {len(ids), len(firsts)} != {num_groups}:
        raise BlockIdError(
            "a request must name the blocks and the first block of each cache group",
            request=request_id,
            groups=num_groups,
            blocks=len(ids),
            first_blocks=len(firsts),
        )
    return ids, firsts


def tokens_to_load(
    kept: Retention, num_computed_tokens: int, stop: int, num_encoder_tokens: int
) -> range:
    """Return the tokens that a group lacks before `stop`, or all of the encoder's input, which is never cached."""
    if isinstance(kept, KeepsEncoder):
        return kept.missing(0, num_encoder_tokens)
    return kept.missing(num_computed_tokens, stop)


class RemoteRequest(msgspec.Struct, eq=False, gc=False):
    """A request and its load. `is_finished`: the engine has finished it, and only the load has not ended. A followed
    one waits until the producer `producer_started`.
    """

    params: TransferParams
    retentions: tuple[Retention, ...]
    stage: Literal["wanted", "loading", "over"] = "wanted"
    is_finished: bool = False
    producer_started: bool = False
    num_computed_tokens: int = 0

    def resume_at(self, limit: int) -> int:
        """Return the last position, up to `limit`, before which the producer has all needed tokens; 0 for none."""
        available = min(self.params.remote_num_tokens, limit)
        states = {
            self.params.first_block(group) + self.params.num_blocks(group)
            # either engine may lack the other's optional groups
            for group, kept in zip(range(self.params.num_groups), self.retentions, strict=False)
            if isinstance(kept, KeepsState)
        }
        if not states or self.params.is_followed:
            return available  # its states will be those before the last token
        position = states.pop()
        return position if not states and position <= available else 0

    def load_order(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        first_blocks: Sequence[int] | None,
        num_tokens: int,
        num_encoder_tokens: int,
        computed_tokens: Sequence[int] | None,
    ) -> LoadRequest:
        """Return the order to load the request. Arguments and errors are those of `Scheduler.load`."""
        num_groups = len(self.retentions)
        ids, firsts = block_lists(request_id, blocks, first_blocks, num_groups)
        default = [self.num_computed_tokens] * num_groups
        require_counts(BlockIdError, num_tokens=num_tokens, num_encoder_tokens=num_encoder_tokens)
        computed = default if computed_tokens is None else computed_tokens
        if not isinstance(computed, Sequence) or len(computed) != num_groups:
            raise BlockIdError(
                "a load must name the computed tokens of each cache group",
                request=request_id,
                groups=num_groups,
                computed_tokens=computed,
            )
        for count in computed:
            require_counts(BlockIdError, computed_tokens=count)
        stop = self.num_computed_tokens + num_tokens
        ranges = [
            tokens_to_load(kept, count, stop, num_encoder_tokens)
            for kept, count in zip(self.retentions, computed, strict=True)
        ]
        # a state is the token before those that are loaded
        starts = [
            stop - 1 if isinstance(retention, KeepsState) else first
            for retention, first in zip(self.retentions, firsts, strict=True)
        ]
        return LoadRequest(
            request_id=request_id,
            token_ranges=tuple((tokens.start, tokens.stop) for tokens in ranges),
            local_blocks=tuple(map(GroupBlocks.of, ids, starts)),
            remote_blocks=self.params.blocks(),
            token_stop=stop,
            keeps_all=all(isinstance(kept, KeepsAll) for kept in self.retentions),
        )

    def in_whole_blocks(
        self, order: LoadRequest, cache_block_tokens: Sequence[int], groups: Sequence[GroupGeometry]
    ) -> LoadRequest:
        """Return the load, beginning in each group with a whole block of the prefix cache where the producer has it: if
        it has named its blocks, and their number is that of blocks of our size (in `groups`).

        Raises:
            BlockIdError: not one positive number of tokens per cache group, or one that ends inside a row.
        """
        if not cache_block_tokens:
            return order
        for count in cache_block_tokens:
            require_counts(BlockIdError, cache_block_tokens=count)
        if len(cache_block_tokens) != len(groups) or min(cache_block_tokens) < 1:
            raise BlockIdError(
                "the blocks of a prefix cache need at least one token in each cache group",
                cache_block_tokens=cache_block_tokens,
                groups=len(groups),
            )
        sizes = [group.row_tokens for group in groups]
        if any(whole % m for whole, m in zip(cache_block_tokens, sizes, strict=True)):
            raise BlockIdError(
                "the block size of a prefix cache must be a multiple of row_tokens",
                cache_block_tokens=cache_block_tokens,
                row_tokens=sizes,
            )
        ranges = list(order.token_ranges)
        # a followed producer has named no blocks
        begins = zip(order.remote_blocks, cache_block_tokens, groups, strict=False)
        for index, (remote, whole, group) in enumerate(begins):
            held = range(remote.first_block, remote.first_block + remote.num_blocks)
            tokens = from_whole_block(
                range(*ranges[index]),
                whole // group.row_tokens,
                held,
                group.virtual_block_tokens,
            )
            ranges[index] = tokens.start, tokens.stop
        return replace(order, token_ranges=tuple(ranges))
