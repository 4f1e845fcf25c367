"""What the scheduler half tells the worker halves with each engine step, and what workers tell it at the start.

All are `msgspec` structs without references to this process, so an engine can send them between its processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from kvconnector.errors import BlockIdError
from kvconnector.planning import GroupBlocks
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry

_WIRE_IDS = np.dtype("<i4")


class BlockList(msgspec.Struct, frozen=True, array_like=True):
    """Block ids of one group (little-endian int32) as `GroupBlocks` has them."""

    block_ids: bytes
    first_block: int = 0

    @classmethod
    def of(cls, block_ids: Sequence[int], first_block: int = 0) -> BlockList:
        """From any sequence of integers. Raises BlockIdError for ids that no pool has."""
        blocks = GroupBlocks.of(block_ids, first_block)
        return cls(blocks.wire_ids, blocks.first_block)

    def group_blocks(self) -> GroupBlocks:
        """As the planner takes them.

        Raises:
            BlockIdError: the length is not a multiple of 4 bytes.
        """
        if len(self.block_ids) % _WIRE_IDS.itemsize:
            raise BlockIdError(
                "the bytes of block ids are not a multiple of 4", nbytes=len(self.block_ids)
            )
        ids = np.array(np.frombuffer(self.block_ids, _WIRE_IDS), np.int32)
        return GroupBlocks(ids, self.first_block)


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What every worker is to do about one request."""

    request_id: str


class HoldRequest(_Order, frozen=True):
    """The producer finished a request: hold these blocks for a consumer. Or it is not complete yet: these blocks will
    have its first `num_tokens` tokens once the kernels before this step are through, and this step computes those up to
    `ahead_tokens`.
    """

    transfer_id: str
    secret: str
    blocks: tuple[BlockList, ...]
    num_tokens: int
    lease_duration_s: float = 0.0
    is_complete: bool = True
    ahead_tokens: int = 0


class WithdrawRequest(_Order, frozen=True):
    """The producer takes a held request back, or the blocks of one that it computes."""


class WantRequest(_Order, frozen=True):
    """A request whose blocks are on a producer is queued at this consumer."""

    transfer_id: str
    secret: str
    engine_id: str
    address: str
    public_key: str
    is_followed: bool = False


class LoadRequest(_Order, frozen=True):
    """Fetch tokens `[start, stop)` of each group from the producer's blocks into ours. There are no `remote_blocks` of
    a request that is followed: the producer's workers tell them.
    """

    token_ranges: tuple[tuple[int, int], ...]
    local_blocks: tuple[BlockList, ...]
    remote_blocks: tuple[BlockList, ...]


class DropRequest(_Order, frozen=True):
    """The consumer gives a wanted or loading request up, or needs nothing of it."""


Order: TypeAlias = HoldRequest | WithdrawRequest | WantRequest | LoadRequest | DropRequest


class StepMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """One step's orders for every worker of the engine, in the order in which they were given: an id may be used again
    within a step. `engine` is there until the scheduler knows that all workers have it.
    """

    engine: EngineGeometry | None = None
    orders: tuple[Order, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing new."""
        return not (self.engine or self.orders)


class WorkerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells its scheduler after registration: what it holds, and where its peers find it."""

    engine_id: str
    pp_rank: int
    tp_rank: int
    geometry: RankGeometry
    model: ModelDescription
    control_address: str
    public_key: str
    incarnation: str
