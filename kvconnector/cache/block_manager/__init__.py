"""Paged block allocation for two devices: who owns which block, what is shared, cached, swapped.

Theory. A *block* is an id of a device; its memory is the engine's, which moves the data as the calls return it. A block
is in one of three places, so that free and owned ones always add up to the device:

- *owned*: `ref_counts[id]` tables hold it. Several do after a fork, or where a prefix was found. Whoever is to write a
  block that others hold gets another one, and the content to keep is copied (`append_slots`).
- *evictable*: nobody holds it, but its content can be found by its hash. It counts as free. The least recently used one
  is given up first; of a chain used at one time the last, since a block is found only after those before it.
- *free*: neither. Free blocks are handed out first in, first out, so that blocks freed together stay together.

Content is *published* under a hash of its parent's hash, its tokens and the request's extra keys, once the engine says
that it is computed. So whatever is found can be read. Two blocks may have the same content; the first can be found.

A table changes in the order *plan, check, apply*: a call that raises has changed nothing. Within `apply`, blocks that
were found get an owner before others are taken, which might evict them.

Sequences of one group have the same tokens up to where they were forked. Layers that forget (a window, chunks, a state)
take slots step by step and give up what their next token does not see; `Paging` says what that is. One thread at a
time; time is an argument; nothing blocks.
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
