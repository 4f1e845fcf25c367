"""Block tables of vLLM's cache groups as blocks and token ranges of ours. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnector.integrations.vllm.messages import GroupInfo

NULL_BLOCK = 0
"""vLLM's id for a block that was dropped or never allocated; no request owns it."""


def state_block(info: GroupInfo, block_ids: Sequence[int]) -> list[int]:
    """The block with the running state: the last one but the scratch blocks, where there are so many."""
    if not block_ids:
        return []
    scratch = min(info.scratch_blocks, len(block_ids) - 1)
    return [block_ids[len(block_ids) - scratch - 1]]


def kernel_block_ids(info: GroupInfo, block_ids: Sequence[int]) -> list[int]:
    """Ids of our blocks, `kernel_blocks` for each of vLLM's. Null blocks stay null."""
    ratio = info.kernel_blocks
    if ratio == 1:
        return list(block_ids)
    return [
        NULL_BLOCK if block == NULL_BLOCK else block * ratio + part
        for block in block_ids
        for part in range(ratio)
    ]


def held_blocks(info: GroupInfo, block_ids: Sequence[int]) -> tuple[list[int], int]:
    """`(our block ids, index of the first in the sequence)` of what a finished request still has in a group.

    Blocks outside a sliding window are gone: vLLM's table starts with null blocks in their places.
    """
    if info.keeps == "state":
        return state_block(info, block_ids), 0
    gone = 0
    while gone < len(block_ids) and block_ids[gone] == NULL_BLOCK:
        gone += 1
    return kernel_block_ids(info, block_ids[gone:]), gone * info.kernel_blocks


def local_blocks(info: GroupInfo, block_ids: Sequence[int]) -> list[int]:
    """Our block ids of a request that is to be loaded, from the first token of its sequence on."""
    if info.keeps == "state":
        return state_block(info, block_ids)
    return kernel_block_ids(info, block_ids)


def needed_tokens(info: GroupInfo, start: int, stop: int) -> tuple[int, int]:
    """What of the tokens `[start, stop)` the token at `stop` can still see in a group; of a state, its one token."""
    if info.keeps == "state":
        return 0, 1
    if info.keeps == "window":
        return max(start, stop - info.extent_tokens + 1), stop
    if info.keeps == "chunk":
        return max(start, stop // info.extent_tokens * info.extent_tokens), stop
    return start, stop
