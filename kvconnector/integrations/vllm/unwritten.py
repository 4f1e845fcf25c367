"""Zeroes what a load leaves unwritten in its blocks.

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
from kvconnector.session.orders import LoadRequest


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
