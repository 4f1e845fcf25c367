"""Re-layout in host memory: the loop's copy in the caller's thread, without the GIL."""

from __future__ import annotations

from array import array
from typing import Unpack

import numpy as np

from kvconnector_kernels.pump.copy_cpu import copy, job_of
from kvconnector_kernels.relayout.checks import RelayoutError
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.sides import (
    CopyCounts,
    PackedSide,
    Side,
    check_copy,
)

# A larger copy leaves no second-level cache anything worth keeping, so it bypasses the caches.
MIN_STREAMED_COPY_BYTES = 2 << 20


def relayout_cpu(
    src: Side, dst: Side, *, conversion: Conversion | None = None, **counts: Unpack[CopyCounts]
) -> None:
    """Copy between two sides in host memory, see `relayout`. Returns when the destination holds all of it.

    Raises:
        RelayoutError: the sides do not hold the copy, see `check_copy`.
    """
    geometry = check_copy(src, dst, conversion, **counts)
    if src.device != "cpu":
        raise RelayoutError(f"this copy runs on the CPU, the sides are on {src.device}")
    if geometry.nbytes == 0:
        return
    slot = 0
    for side in (src, dst):
        if isinstance(side, PackedSide):
            slot = side.address
        elif not isinstance(side.block_ids, np.ndarray):
            raise RelayoutError("block ids of a copy on the CPU must be a numpy array")
    is_streamed = geometry.nbytes >= MIN_STREAMED_COPY_BYTES
    # the last word is the flag that the copy sets; numpy takes longer to make arrays and to say where they are
    words = job_of(src, dst, geometry, is_streamed=is_streamed, conversion=conversion)
    job = array("q", (*words, 0))
    address, num_words = job.buffer_info()
    copy(0, address, slot, address + 8 * num_words - 8, 1)
