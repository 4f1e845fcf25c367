"""Block ids for a side of a re-layout: a numpy vector, a torch tensor, or an address in a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout.checks import BlockIdsError, check_device, check_ids_in_pool

if TYPE_CHECKING:
    import torch

ALIGN_BYTES = 16
"""Alignment of the addresses of block ids, which kernels may assume."""


@dataclass(frozen=True, slots=True)
class BlockIdsAt:
    """`count` int32 block ids at an address of a device's memory, for prepared copies: the caller has checked them, and
    keeps the memory.

    Raises:
        BlockIdsError: The address is not aligned to 16 bytes, or the count is negative.
    """

    address: int
    count: int
    device: str

    def __post_init__(self) -> None:
        if self.address % ALIGN_BYTES or self.address <= 0 or self.count < 0:
            raise BlockIdsError(
                f"{self.count} block ids cannot be at {self.address}: it is aligned to {ALIGN_BYTES} bytes"
            )


BlockIds: TypeAlias = "npt.NDArray[np.int32] | torch.Tensor | BlockIdsAt"


def check_block_ids(ids: Any, device: str) -> None:
    """Raise `BlockIdsError` unless these are block ids that a copy on `device` can read."""
    if isinstance(ids, BlockIdsAt):
        if ids.device != device:
            raise BlockIdsError(f"block ids are on {ids.device}, the part table is on {device}")
        return
    if isinstance(ids, np.ndarray):
        found = "cpu"
        is_vector, is_int32 = ids.ndim == 1 and ids.flags.c_contiguous, ids.dtype == np.int32
    elif hasattr(ids, "is_contiguous"):
        found = str(ids.device)
        is_vector = len(ids.shape) == 1 and ids.is_contiguous()
        is_int32 = str(ids.dtype) == "torch.int32"
    else:
        raise BlockIdsError(f"block ids must be an array or a tensor, not {type(ids).__name__}")
    if found != device or (device == "cpu") != isinstance(ids, np.ndarray):
        raise BlockIdsError(
            f"block ids are a {type(ids).__name__} on {found}, the part table is on {device}"
        )
    if not (is_vector and is_int32):
        raise BlockIdsError(
            f"block ids must be a contiguous int32 vector, not {ids.dtype} of shape {tuple(ids.shape)}"
        )


def upload_block_ids(
    block_ids: npt.NDArray[np.integer[Any]] | list[int], *, num_blocks: int, device: str
) -> npt.NDArray[np.int32] | torch.Tensor:
    """Check block ids on the host, and send them from pinned memory to `device`, as `PagedSide` takes them.

    Does not wait: the upload is ordered on the current stream. On the CPU it returns the checked numpy vector itself.

    Raises:
        BlockIdsError: They are not a vector of integers, or an id is outside `[0, num_blocks)`.
    """
    check_device(device)
    ids = np.asarray(block_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise BlockIdsError(
            f"block ids must be a vector of integers, not {ids.dtype} of {ids.shape}"
        )
    check_ids_in_pool("the", ids, num_blocks)
    ids = np.ascontiguousarray(ids, dtype=np.int32)
    if device == "cpu":
        return ids
    import torch

    # the pinned buffer is torch's, which keeps it until the copy has run
    return torch.tensor(ids).pin_memory().to(device, non_blocking=True)
