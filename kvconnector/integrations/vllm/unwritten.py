"""What a load leaves unwritten: zeroed around its tokens, reported to vLLM if it failed.

Where recurrent states share memory with attention caches, or element types differ, a reused block can hold bytes that
read as NaN, and an attention kernel multiplies the slots that it masks. vLLM zeroes such blocks when it allocates them,
but not those that a connector loads. A load moves tokens, not blocks, so the rest of its blocks is zeroed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnector.integrations.vllm.blocks import unwritten_slots
from kvconnector.integrations.vllm.caches import RegisteredGroup, layer_number
from kvconnector.layout import KVView
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import LoadRequest, Order


def clear_unwritten(groups: Sequence[RegisteredGroup], load: LoadRequest) -> None:
    """Zero the slots around a load's tokens, on the current stream: nothing else writes them until the request runs."""
    for group, blocks, tokens in zip(groups, load.local_blocks, load.token_ranges, strict=True):
        for index, first, last in unwritten_slots(group.info, group.cache.geometry, tokens):
            position = index - blocks.first_block
            if not 0 <= position < blocks.num_blocks:
                continue
            block = int(blocks.block_ids[position])
            for name, tensor in group.tensors.items():
                for view in group.cache.views[layer_number(name)]:
                    slots_of(tensor, view)[block, :, first:last].zero_()


class FailedParts:
    """The blocks that failed loads have not filled: vLLM computes only these, where its policy is to recompute.

    Args:
        group: The only cache group. It keeps every token: else blocks do not say from where on to compute.
    """

    def __init__(self, group: RegisteredGroup) -> None:
        self._group = group
        self._loads: dict[str, LoadRequest] = {}
        self._unfilled = set[int]()

    @classmethod
    def of(cls, groups: Sequence[RegisteredGroup]) -> FailedParts | None:
        """Of a model with these cache groups; None if vLLM can keep no part of a load."""
        return cls(groups[0]) if [group.info.keeps for group in groups] == ["all"] else None

    def expect(self, orders: Sequence[Order]) -> None:
        """Remember which blocks the loads among a step's orders fill."""
        self._loads |= {each.request_id: each for each in orders if isinstance(each, LoadRequest)}

    def ended(self, output: WorkerOutput) -> set[str]:
        """Take the loads that ended. Returns those that failed, and whose blocks are known that were not filled."""
        known = set()
        for request_id in output.finished_recving:
            load, filled = self._loads.pop(request_id, None), output.filled_tokens.get(request_id)
            if load is not None and filled is not None:
                known.add(request_id)
                self._unfilled |= self._blocks_beyond(load, filled)
        return known

    def take_unfilled(self) -> set[int]:
        """Return the blocks, in vLLM's numbers, since the last call."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def _blocks_beyond(self, load: LoadRequest, filled_tokens: int) -> set[int]:
        ((start, stop),), (blocks,) = load.token_ranges, load.local_blocks
        left = range(max(start, min(filled_tokens, stop)), stop)
        size = self._group.cache.geometry.virtual_block_tokens
        ours = blocks.covering(left, size, what="a load's blocks").block_ids
        return {int(block) // self._group.info.kernel_blocks for block in ours}


def slots_of(tensor: torch.Tensor, view: KVView) -> torch.Tensor:
    """`[block, head, token, dim]` of one part of a layer, over the memory of the layer's tensor."""
    item = view.item_size_bytes
    offset = (view.address - tensor.data_ptr()) // item
    return torch.as_strided(
        tensor,
        view.shape,
        tuple(stride // item for stride in view.strides_bytes),
        tensor.storage_offset() + offset,
    )
