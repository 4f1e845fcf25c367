"""A launch of the re-layout kernel as plain numbers, for callers that launch it themselves, without Python.

The launch copies between two paged sides, or between one and a chunk. It stands for a family of launches: the parts,
the chunk's address and the addresses of block ids may be replaced by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconnector_kernels.relayout.errors import RelayoutError
from kvconnector_kernels.relayout.sides import PackedSide, PagedSide, check_copy
from kvconnector_kernels.relayout.tiles import plan_tiles
from kvconnector_kernels.relayout.triton import (
    NUM_WARPS,
    kernel_constants,
    on_device,
    relayout_kernel,
    side_arguments,
)

_WARP_THREADS = 32
_PARAM_BYTES = {"i32": 4, "i64": 8}
_kernels: dict[tuple[object, ...], Any] = {}


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """`function` is the CUfunction. `values` are its parameters but the trailing `num_scratch_params` null pointers,
    with their `names` and `param_bytes`, their sizes.

    To be replaced at will are, for `src` and `dst`, a chunk's `src_address`, a pool's first part `src_part_start`, and
    its block ids' address `src_ids`, by one of the same alignment to 16 bytes; and `num_tiles`, the number of parts
    times `tiles_per_part`, which is also the number of programs if nothing caps it.
    """

    function: int
    num_threads: int
    shared_bytes: int
    tiles_per_part: int
    values: tuple[int, ...]
    names: tuple[str, ...]
    param_bytes: tuple[int, ...]
    num_scratch_params: int = 2

    def index(self, name: str) -> int:
        """Which of the values has this name."""
        return self.names.index(name)


def prepare_launch(
    src: PagedSide | PackedSide,
    dst: PagedSide | PackedSide,
    *,
    num_heads: int,
    num_tokens: int,
    num_parts: int = 1,
) -> PreparedLaunch:
    """The launch that `relayout` would make for these sides, compiled and loaded but not launched.

    The chunk's address stands for all that are aligned as it is. The block ids must stay alive until the last launch
    has run.

    Raises:
        RelayoutError: two chunks, or the sides do not hold the copy; a kernel that needs scratch memory.
    """
    if isinstance(src, PackedSide) and isinstance(dst, PackedSide):
        raise RelayoutError("a prepared launch has a paged side")
    geometry = check_copy(
        src,
        dst,
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        head_dim=None,
        item_size_bytes=None,
    )
    tiling = plan_tiles(src, dst, geometry)
    counts = tiling.counts(geometry)
    tiles_per_part = counts[0] * counts[1] * counts[2]
    arguments = (
        *side_arguments(src, tiling.src, geometry),
        *side_arguments(dst, tiling.dst, geometry),
        geometry.num_heads,
        geometry.num_tokens,
        tiling.lead_tokens,
        num_parts * tiles_per_part,
        *counts,
    )
    packed = tuple(isinstance(side, PackedSide) for side in (src, dst))
    kernel = _compiled(src.device, packed, arguments, kernel_constants(tiling))
    signature = kernel.src.signature
    names = [name for name in kernel.src.fn.arg_names if signature[name] != "constexpr"]
    by_name = dict(zip(kernel.src.fn.arg_names, arguments, strict=False))
    return PreparedLaunch(
        function=kernel.function,
        num_threads=kernel.metadata.num_warps * _WARP_THREADS,
        shared_bytes=kernel.metadata.shared,
        tiles_per_part=tiles_per_part,
        values=tuple(_as_int(by_name[name]) for name in names),
        names=tuple(names),
        param_bytes=tuple(_PARAM_BYTES.get(signature[name], 8) for name in names),
    )


def _as_int(value: Any) -> int:
    return int(value.data_ptr()) if hasattr(value, "data_ptr") else int(value)


def _compiled(
    device: str,
    packed: tuple[bool, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    """The loaded kernel for sides of which some are packed, and for the alignment of their tables and block ids."""
    pointers = tuple(_as_int(a) % 16 for a in arguments if hasattr(a, "data_ptr"))
    key = (device, packed, pointers, *constants.values())
    if key not in _kernels:
        with on_device(device):
            kernel = relayout_kernel.warmup(*arguments, grid=(1,), **constants, num_warps=NUM_WARPS)
            kernel._init_handles()
        if kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size:
            raise RelayoutError("the compiled kernel needs scratch memory")
        _kernels[key] = kernel
    return _kernels[key]
