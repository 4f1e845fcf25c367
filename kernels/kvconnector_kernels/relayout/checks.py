"""The errors of a re-layout, `ValueError`s whose text names the values that disagree, and checks of both sides."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_SIZES_BYTES = (1, 2, 4, 8)
_DEVICE = re.compile(r"cpu|cuda:\d+")


class RelayoutError(ValueError):
    """The arguments of a re-layout do not describe memory: a bad count, range, buffer or device."""


class BlockIdsError(RelayoutError):
    """Block ids lie outside the pool, are too few for the tokens, or have the wrong type."""


class GeometryMismatchError(RelayoutError):
    """The two sides disagree in item size, head dim or device."""


def check_ids_in_pool(what: str, ids: npt.NDArray[np.integer[Any]], num_blocks: int) -> None:
    """Raise `BlockIdsError` unless every id lies in `[0, num_blocks)`."""
    if not ids.size:
        return
    if ids.dtype == np.int32 and num_blocks <= 1 << 31:
        # as unsigned numbers, negative ones are the largest
        is_inside = np.maximum.reduce(ids.view(np.uint32)) < num_blocks
    else:
        is_inside = int(ids.min()) >= 0 and int(ids.max()) < num_blocks
    if not is_inside:
        raise BlockIdsError(
            f"{what} block ids run from {int(ids.min())} to {int(ids.max())}, the pool has {num_blocks} blocks"
        )


def check_device(device: str) -> None:
    """Raise `RelayoutError` unless it is `cpu` or `cuda:N`."""
    if not _DEVICE.fullmatch(device):
        raise RelayoutError(f"device must be 'cpu' or 'cuda:N', not {device!r}")
