"""Mirrors of a device's caches in host memory, for devices whose memory the transport cannot reach.

Blocks are copied to the mirror before consumers may read them, and loaded blocks are copied from the mirror before the
load is reported. So the rest of kvconnector sees only host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from kvconnector.errors import LocalError
from kvconnector.integrations.vllm.blocks import whole_blocks
from kvconnector.integrations.vllm.caches import RegisteredGroup
from kvconnector.planning import GroupBlocks
from kvconnector.session.orders import GrowRequest, LeaseOrder, LoadRequest, WithdrawRequest

CopyBlocks = Callable[
    [
        dict[str, torch.Tensor],
        dict[str, torch.Tensor],
        list[int],
        list[int],
        Literal["h2d", "d2h"],
    ],
    None,
]
"""vLLM's operation: (source caches, destination caches, source ids, destination ids, direction)."""


class HostBuffer:
    """A mirror of each layer, with the layer's shape. Set `copy_blocks` before the first step."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._caches = dict(kv_caches)
        self.mirrors = {
            name: torch.zeros(tuple(cache.shape), dtype=cache.dtype)
            for name, cache in kv_caches.items()
        }
        self.copy_blocks: CopyBlocks | None = None
        self._loads: dict[str, list[tuple[list[str], list[int]]]] = {}
        self._grown: dict[str, tuple[GroupBlocks, ...]] = {}
        """The blocks, by request, that were copied to the mirrors while the prompt is still being computed."""

    def before_lease(
        self, order: LeaseOrder | WithdrawRequest, groups: Sequence[RegisteredGroup]
    ) -> None:
        """Copy the blocks that consumers may read to the mirrors. Of those copied before, only the last has changed.

        Raises:
            LocalError: vLLM has set no copy operation.
        """
        copied = self._grown.pop(order.request_id, None)
        if isinstance(order, WithdrawRequest):
            return
        for index, (group, blocks) in enumerate(zip(groups, order.blocks, strict=True)):
            known = copied[index].block_ids if copied is not None else ()
            new = blocks.block_ids[max(0, len(known) - 1) :]
            self._copy(list(group.tensors), group.tensor_block_ids(new.tolist()), "d2h")
        if isinstance(order, GrowRequest):
            self._grown[order.request_id] = order.blocks

    def forget_prompts(self) -> None:
        """Forget the copied blocks, because the caches lose their content."""
        self._grown.clear()

    def before_load(self, load: LoadRequest, groups: Sequence[RegisteredGroup]) -> None:
        """Record the blocks that a load writes. Raises BlockIdError: its blocks do not hold its tokens."""
        self._loads[load.request_id] = [
            (list(group.tensors), _covering(group, blocks, tokens))
            for group, blocks, tokens in zip(
                groups, load.local_blocks, load.token_ranges, strict=True
            )
        ]

    def after_load(self, request_id: str, *, is_filled: bool) -> None:
        """Copy a load's blocks to the device if they are filled, and wait for the copy."""
        for names, block_ids in self._loads.pop(request_id, []):
            if is_filled:
                self._copy(names, block_ids, "h2d")

    def _copy(
        self, names: Sequence[str], block_ids: list[int], direction: Literal["h2d", "d2h"]
    ) -> None:
        if self.copy_blocks is None:
            raise LocalError("vLLM has set no operation to copy blocks to and from host memory")
        device = {name: self._caches[name] for name in names}
        host = {name: self.mirrors[name] for name in names}
        pair = (device, host) if direction == "d2h" else (host, device)
        if block_ids:
            self.copy_blocks(*pair, block_ids, block_ids, direction)


def _covering(group: RegisteredGroup, blocks: GroupBlocks, tokens: tuple[int, int]) -> list[int]:
    geometry = group.cache.geometry
    # whole blocks of vLLM's, because the slots around the load's tokens are zeroed
    whole = whole_blocks(group.info, geometry, tokens)
    covered = blocks.covering(whole, geometry.virtual_block_tokens, what="a load's blocks")
    return group.tensor_block_ids(covered.block_ids.tolist())
