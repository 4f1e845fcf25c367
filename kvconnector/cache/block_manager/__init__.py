"""Paged block allocation for two devices: who owns which block, what is shared, cached, swapped."""

from __future__ import annotations

from kvconnector.cache.block_manager.admission import AllocStatus
from kvconnector.cache.block_manager.allocator import Device
from kvconnector.cache.block_manager.copy_on_write import BlockCopy, split_dependent_copies
from kvconnector.cache.block_manager.errors import (
    DoubleAllocationError,
    OutOfBlocksError,
    SequenceError,
)
from kvconnector.cache.block_manager.hashing import ExtraKey
from kvconnector.cache.block_manager.manager import BlockSpaceManager
from kvconnector.cache.block_manager.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = [
    "AllocStatus",
    "BlockCopy",
    "BlockSpaceManager",
    "Device",
    "DoubleAllocationError",
    "ExtraKey",
    "OutOfBlocksError",
    "Sequence",
    "SequenceError",
    "SequenceGroup",
    "SequenceStatus",
    "split_dependent_copies",
]
