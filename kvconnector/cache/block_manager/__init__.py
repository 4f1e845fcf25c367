"""Paged block allocation for two devices: who owns which block, what is shared, cached, swapped."""

from kvconnector.cache.block_manager.allocator import Device as Device
from kvconnector.cache.block_manager.allocator import OutOfBlocksError as OutOfBlocksError
from kvconnector.cache.block_manager.books import DoubleAllocationError as DoubleAllocationError
from kvconnector.cache.block_manager.copy_on_write import BlockCopy as BlockCopy
from kvconnector.cache.block_manager.copy_on_write import (
    split_dependent_copies as split_dependent_copies,
)
from kvconnector.cache.block_manager.manager import AllocStatus as AllocStatus
from kvconnector.cache.block_manager.manager import BlockSpaceManager as BlockSpaceManager
from kvconnector.cache.block_manager.sequence import Sequence as Sequence
from kvconnector.cache.block_manager.sequence import SequenceError as SequenceError
from kvconnector.cache.block_manager.sequence import SequenceGroup as SequenceGroup
from kvconnector.cache.block_manager.sequence import SequenceStatus as SequenceStatus
