"""Paged block allocation on two devices: who owns which block, and which blocks are shared, cached and swapped.

Theory. A *block* is an id on a device. The engine has the memory, and copies the data that calls tell it to copy. A
block is in one of three states, so free and owned blocks always add up to all blocks of the device:

- *owned*: `ref_counts[id]` tables hold it; several after a fork, or if a prefix was found. Before a sequence writes a
  block that others hold, it gets a new one, and the content that it needs is copied there (`append_slots`).
- *evictable*: no table holds it, but its content can be found by its hash. It counts as free. Least recently used
  blocks are evicted first; in a chain of equal age the last one, since a block is found only after those before it.
- *free*: neither. Blocks are taken first in, first out, so that blocks freed together stay together.

Content is *published* under a hash of its parent's hash, its tokens and the request's extra keys, once the engine has
declared it computed. So everything that is found can be read. Of two blocks with equal content the first can be found.

A table changes in the order *plan, check, apply*: a call that raises has changed nothing. `apply` first adds an owner
to the blocks that were found, because taking other blocks might evict them.

The sequences of a group have the same tokens up to the point where they were forked. Layers that forget (a window,
chunks, a state) get slots step by step, and drop the blocks that their next token does not need (see `Paging`). Not
thread safe; time is an argument; nothing blocks.
"""

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
