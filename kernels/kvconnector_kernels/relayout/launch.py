"""A launch of the re-layout kernel as plain numbers, for callers that launch it themselves, without Python.

The launch copies between two paged sides, or between one and a chunk. It stands for a family of launches: the parts,
the chunk's address and the addresses of block ids may be replaced by the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvconnector_kernels.relayout.block_ids import ALIGN_BYTES, BlockIdsAt
from kvconnector_kernels.relayout.checks import RelayoutError
from kvconnector_kernels.relayout.convert import Conversion
from kvconnector_kernels.relayout.sides import CopyGeometry, PackedSide, PagedSide, Side, check_copy
from kvconnector_kernels.relayout.tiles import Tiling, plan_tiles
from kvconnector_kernels.relayout.triton import (
    kernel_constants,
    on_device,
    relayout_kernel,
    side_arguments,
    side_numbers,
)

_WARP_THREADS = 32
_PARAM_BYTES = {"i32": 4, "i64": 8}


_SCRATCH_BYTES = (8, 8)
"""Sizes of the null pointers after the parameters with which a kernel was written."""


class Kernel(NamedTuple):
    """A kernel, loaded for as long as `compiled` lives: its CUfunction, the names of its parameters except scratch
    memory, and the sizes of all.
    """

    compiled: Any
    function: int
    num_threads: int
    shared_bytes: int
    names: tuple[str, ...]
    param_bytes: tuple[int, ...]


_kernels: dict[tuple[object, ...], Kernel] = {}


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A kernel and the `values` of its parameters, except scratch memory, whose pointers are null.

    The caller may replace, for `src` and `dst` alike, a chunk's `src_address`, a pool's first part `src_part_start`,
    and its block ids' address `src_ids`, by one of the same alignment to 16 bytes; and `num_tiles`, the number of parts
    times `tiles_per_part`, which is also the number of programs if nothing caps it. A launch without runs also stands
    for all whose tokens begin at the same place in a tile, which has `tile_tokens`, and are as even in number: they
    have other `src_origin`, `num_tokens` and `num_token_tiles`, and other strides of a chunk.
    """

    kernel: Kernel
    tiles_per_part: int
    tile_tokens: int
    values: tuple[int, ...]

    def index(self, name: str) -> int:
        """Return the index of the value with this name."""
        return self.kernel.names.index(name)


def prepare_launch(
    src: PagedSide | PackedSide,
    dst: PagedSide | PackedSide,
    *,
    num_heads: int,
    num_tokens: int,
    num_parts: int = 1,
    conversion: Conversion | None = None,
) -> PreparedLaunch:
    """Prepare the launch that `relayout` would make for these sides: compiled and loaded, but not launched.

    The chunk's address stands for all that are aligned as it is. The block ids must stay alive until the last launch
    has run.

    Raises:
        RelayoutError: Both sides are chunks, or on the CPU; the sides do not hold the copy; the kernel needs scratch
            memory, or has unexpected parameters.
    """
    is_packed = isinstance(src, PackedSide), isinstance(dst, PackedSide)
    if src.device == "cpu":
        raise RelayoutError("a prepared launch is one on a GPU")
    counts = {"num_parts": num_parts, "num_heads": num_heads, "num_tokens": num_tokens}
    geometry = check_copy(src, dst, conversion, **counts)
    tiling = plan_tiles(src, dst, geometry, conversion)
    pointers, tail = (_pointers(src), _pointers(dst)), tiling.numbers(geometry)
    # the first tile's start is a run-time argument of the kernel; the rest of the tiling is fixed at compile time
    aligned = tuple([address % ALIGN_BYTES for side in pointers for address in side])
    compiled_for = (tiling.tile, tiling.is_one_tile, tiling.is_even, tiling.src[2:], tiling.dst[2:])
    converted = None if conversion is None else (conversion.number, conversion.division)
    key = (src.device, *is_packed, *aligned, *compiled_for, converted)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = _compile(src, dst, tiling, geometry, tail, conversion)
    first = (*pointers[0], *side_numbers(src, tiling.src, geometry))
    second = (*pointers[1], *side_numbers(dst, tiling.dst, geometry))
    per_part = math.prod(tiling.counts(geometry))
    scales = () if conversion is None else (conversion.scales_address,)
    values = (*first, *second, *tail, *scales)
    return PreparedLaunch(kernel, per_part, tiling.tile.tokens, values)


def _pointers(side: Side) -> tuple[int, ...]:
    """Return the addresses of a paged side's table rows and block ids. A chunk has no such parameters."""
    if isinstance(side, PackedSide):
        return ()
    ids: Any = side.block_ids
    return side.table.rows_address, ids.address if isinstance(ids, BlockIdsAt) else ids.data_ptr()


def _compile(
    src: Side,
    dst: Side,
    tiling: Tiling,
    geometry: CopyGeometry,
    tail: tuple[int, ...],
    conversion: Conversion | None,
) -> Kernel:
    """Load the kernel for these sides, and for the alignment of their tables and block ids."""
    arguments = (
        *side_arguments(_with_tensor(src), tiling.src, geometry),
        *side_arguments(_with_tensor(dst), tiling.dst, geometry),
        *tail,
        None if conversion is None else conversion.kernel_scales(),
    )
    with on_device(src.device):
        compiled = relayout_kernel.warmup(
            *arguments,
            grid=(1,),
            **kernel_constants(tiling, conversion),
            num_warps=tiling.num_warps,
        )
        compiled._init_handles()
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        raise RelayoutError("the compiled kernel needs scratch memory")
    signature = compiled.src.signature
    all_names = compiled.src.fn.arg_names
    names = tuple(name for name in all_names if signature[name] != "constexpr")
    given = (name for name, value in zip(all_names, arguments, strict=False) if value is not None)
    if names != tuple(given):
        raise RelayoutError(f"the compiled kernel takes other parameters: {names}")
    return Kernel(
        compiled=compiled,
        function=compiled.function,
        num_threads=compiled.metadata.num_warps * _WARP_THREADS,
        shared_bytes=compiled.metadata.shared,
        names=names,
        param_bytes=(
            *(_PARAM_BYTES.get(signature[name], 8) for name in names),
            *_SCRATCH_BYTES,
        ),
    )


def _with_tensor(side: Side) -> Side:
    """Return the side with a tensor, aligned alike, in place of block ids at an address."""
    if isinstance(side, PackedSide) or not isinstance(side.block_ids, BlockIdsAt):
        return side
    import torch

    return replace(side, block_ids=torch.empty(1, dtype=torch.int32, device=side.device))
