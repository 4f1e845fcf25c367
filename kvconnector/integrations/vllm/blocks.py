"""Translates block tables of vLLM's cache groups to our blocks, and describes what the groups keep. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconnector.integrations.vllm.messages import GroupInfo
from kvconnector.layout import own_stripe
from kvconnector.planning import Retention, retention_named
from kvconnector.topology import GroupGeometry

NULL_BLOCK = 0
"""vLLM's id in a table for a block that was dropped or never allocated. No request owns it."""


def kernel_block_ids(info: GroupInfo, block_ids: Sequence[int]) -> list[int]:
    """Return the ids of our blocks, `kernel_blocks` for each of vLLM's. Null blocks stay null."""
    ratio = info.kernel_blocks
    if ratio == 1:
        return list(block_ids)
    return [
        NULL_BLOCK if block == NULL_BLOCK else block * ratio + part
        for block in block_ids
        for part in range(ratio)
    ]


def request_blocks(
    info: GroupInfo, block_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of our blocks that a request has in a group, and the first one's index in the sequence.

    If leading blocks are gone, as outside a sliding window, vLLM's table starts with null blocks. A state is the one
    after `num_tokens` tokens.
    """
    if info.keeps == "state":
        # the current state is in the last block before the scratch blocks, if there are any
        state = max(0, len(block_ids) - info.scratch_blocks - 1)
        return list(block_ids[state : state + 1]), max(0, num_tokens - 1)
    gone = 0
    while gone < len(block_ids) and block_ids[gone] == NULL_BLOCK:
        gone += 1
    return kernel_block_ids(info, block_ids[gone:]), gone * info.kernel_blocks


@dataclass(frozen=True, slots=True)
class InTiles:
    """The retention of a group that stores tiles of `tile_tokens` tokens: it keeps every tile with a token it needs."""

    tokens: Retention
    tile_tokens: int

    def missing(self, num_computed_tokens: int, stop: int) -> range:
        """Return the tiles that hold a missing token."""
        found = self.tokens.missing(num_computed_tokens, stop)
        last = -(-found.stop // self.tile_tokens)
        return range(found.start // self.tile_tokens if found else last, last)


def retention_of(info: GroupInfo) -> Retention:
    """Return the retention of a group: which tokens of a sequence it keeps."""
    kept = retention_named(info.keeps, info.extent_tokens, info.row_tokens)
    return kept if info.tile_tokens == 1 else InTiles(kept, info.tile_tokens)


def block_tokens(info: GroupInfo, group: GroupGeometry) -> int:
    """Return the number of tokens in a block of vLLM's, which stands for a block on each context parallel rank."""
    return group.virtual_block_tokens * info.kernel_blocks * info.row_tokens


def whole_blocks(info: GroupInfo, group: GroupGeometry, tokens: tuple[int, int]) -> range:
    """Widen a token range to whole blocks of vLLM's. Tokens are rows if the group is compressed."""
    (start, stop), size = tokens, block_tokens(info, group) // info.row_tokens
    return range(start // size * size, -(-stop // size) * size)


def unwritten_slots(
    info: GroupInfo, group: GroupGeometry, tokens: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Return the slots that a load of `tokens` leaves unwritten on this rank, in vLLM's blocks of these tokens: a list
    of (index of our block in the sequence, first slot, slot after the last).
    """
    if info.keeps == "state" or tokens[0] >= tokens[1]:
        return []
    own, block_size = own_stripe(group.context_parallel), group.block_size
    written, whole = own.members(range(*tokens)), own.members(whole_blocks(info, group, tokens))
    found = []
    for first, last in ((whole.start, written.start), (written.stop, whole.stop)):
        for index in range(first // block_size, -(-last // block_size)):
            begin = index * block_size
            slots = max(first, begin) - begin, min(last, begin + block_size) - begin
            if slots[0] < slots[1]:
                found.append((index, *slots))
    return found
