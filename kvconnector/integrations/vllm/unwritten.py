"""Handles the slots that a load leaves unwritten: zeroes those around its tokens, and reports those of failed loads.

If recurrent states share memory with attention caches, or element types differ, a reused block can hold bytes that read
as NaN, and attention kernels also multiply the slots that they mask. vLLM zeroes such blocks when it allocates them,
except for blocks that a connector loads. A load writes tokens, not whole blocks, so the other slots are zeroed here. So
are a draft model's layers, because the prefill engine may have no such layers.
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
    """Zero the slots around a load's tokens and the blocks of layers that the producer may lack, on the current stream.
    The load writes to these blocks later, if at all, since it waits for what is queued there. Nothing else writes them
    until the request runs.
    """
    _clear_optional(groups, load)
    for group, blocks, tokens in zip(groups, load.local_blocks, load.token_ranges, strict=True):
        for index, first, last in unwritten_slots(group.info, group.cache.geometry, tokens):
            position = index - blocks.first_block
            if not 0 <= position < blocks.num_blocks:
                continue
            block = int(blocks.block_ids[position])
            for name, tensor in group.tensors.items():
                for view in group.cache.views[layer_number(name)]:
                    slots_of(tensor, view)[block, :, first:last].zero_()


def _clear_optional(groups: Sequence[RegisteredGroup], load: LoadRequest) -> None:
    for group, blocks, tokens in zip(groups, load.local_blocks, load.token_ranges, strict=True):
        geometry = group.cache.geometry
        if not geometry.optional_layers or tokens[0] >= tokens[1]:
            continue
        size = geometry.virtual_block_tokens
        held = blocks.covering(range(*tokens), size, what="a load's blocks").block_ids
        ids = group.tensor_block_ids(held.tolist())
        for name, tensor in group.tensors.items():
            if layer_number(name) in geometry.optional_layers:
                # from pageable memory the copy would wait for the step's kernels
                index = torch.tensor(ids, pin_memory=tensor.is_cuda)
                index = index.to(tensor.device, non_blocking=True)
                tensor.view(torch.uint8).index_fill_(0, index, 0)


class FailedParts:
    """The blocks that failed loads did not fill. With the policy "recompute", vLLM computes only these.

    Args:
        group: The model's only cache group, which keeps every token: only then do blocks show where to start.
    """

    def __init__(self, group: RegisteredGroup) -> None:
        self._group = group
        self._loads: dict[str, LoadRequest] = {}
        self._unfilled = set[int]()

    @classmethod
    def of(cls, groups: Sequence[RegisteredGroup], num_vllm_groups: int) -> FailedParts | None:
        """Make one for a model with these cache groups. Returns None if vLLM can keep no part of a failed load: with
        several groups, even of which only one is transferred, it ends its engine core over a block's id.
        """
        is_only_one = num_vllm_groups == 1 and [group.info.keeps for group in groups] == ["all"]
        return cls(groups[0]) if is_only_one else None

    def expect(self, orders: Sequence[Order]) -> None:
        """Record the loads among a step's orders, and so the blocks that they fill."""
        self._loads |= {each.request_id: each for each in orders if isinstance(each, LoadRequest)}

    def ended(self, output: WorkerOutput) -> set[str]:
        """Take the loads that ended. Returns those that failed and whose unfilled blocks are known."""
        known = set()
        for request_id in output.finished_recving:
            load, filled = self._loads.pop(request_id, None), output.filled_tokens.get(request_id)
            if load is not None and filled is not None:
                known.add(request_id)
                self._unfilled |= self._blocks_beyond(load, filled)
        return known

    def take_unfilled(self) -> set[int]:
        """Return vLLM's ids of the blocks that were found unfilled since the last call."""
        unfilled, self._unfilled = self._unfilled, set()
        return unfilled

    def _blocks_beyond(self, load: LoadRequest, filled_tokens: int) -> set[int]:
        ((start, stop),), (blocks,) = load.token_ranges, load.local_blocks
        left = range(max(start, filled_tokens), stop)
        size = self._group.cache.geometry.virtual_block_tokens
        ours = blocks.covering(left, size, what="a load's blocks").block_ids
        return {int(block) // self._group.info.kernel_blocks for block in ours}


def slots_of(tensor: torch.Tensor, view: KVView) -> torch.Tensor:
    """Return one part of a layer as a tensor `[block, head, token, dim]` that shares memory with the layer's tensor."""
    item = view.item_size_bytes
    offset = (view.address - tensor.data_ptr()) // item
    return torch.as_strided(
        tensor,
        view.shape,
        tuple(stride // item for stride in view.strides_bytes),
        tensor.storage_offset() + offset,
    )
