"""Compiles the kernel for compute capability 9.0, without a GPU, and prints how it reads, converts and writes memory.

It is a process of its own, because Triton may run in its interpreter in the tests' process, which compiles nothing.
"""

import json
import re
import sys

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvconnector_kernels.relayout import Conversion, PackedSide, PagedSide
from kvconnector_kernels.relayout import triton as _  # noqa: F401  (the module below, not Triton)
from kvconnector_kernels.relayout.convert import BY_DIVISION, BY_FACTOR, BY_PAIR
from kvconnector_kernels.relayout.sides import CopyGeometry
from kvconnector_kernels.relayout.tiles import plan_tiles
from tests.kernels.relayout.pools import inner_strides, part_table

kernels = sys.modules["kvconnector_kernels.relayout.triton"]
HEADS, DIM, ITEM, TOKENS = 8, 128, 2, 512


def side(order, block_size, item=ITEM):
    """Return a pool of bf16 with 8 heads of 128, or for block size 0 a chunk; its addresses are never read."""
    address = 1 << 30
    if block_size == 0:
        return PackedSide(address, 1 << 40, order, "cpu")
    block = HEADS * block_size * DIM
    strides = (block, *inner_strides(order, HEADS, block_size, DIM))
    rows = [[address, *(stride * item for stride in strides)]]
    table = part_table(rows, (512, block_size, HEADS, DIM, item))
    return PagedSide(table, np.arange(512, dtype=np.int32))


def compiled(src, dst, conversion=None):
    """Return the code of the kernel for these sides, by its kind."""
    geometry = CopyGeometry(1, HEADS, TOKENS, DIM, ITEM)
    tiling = plan_tiles(src, dst, geometry, conversion)
    constants = dict(kernels.kernel_constants(tiling, conversion))
    names = [param.name for param in kernels.relayout_kernel.params]
    arguments = (
        *kernels.side_arguments(src, tiling.src, geometry),
        *kernels.side_arguments(dst, tiling.dst, geometry),
    )
    constants |= {
        name: None for name, value in zip(names, arguments, strict=False) if value is None
    }
    if conversion is None:
        constants["scales"] = None
    signature = {}
    for param in kernels.relayout_kernel.params:
        pointer = {"rows": "*i64", "ids": "*i32", "scales": "*fp32"}.get(
            param.name.rpartition("_")[2]
        )
        constant = param.is_constexpr or param.name in constants
        signature[param.name] = "constexpr" if constant else pointer or param.annotation_type
    source = ASTSource(kernels.relayout_kernel, signature, constants, {})
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": tiling.num_warps}).asm


def accesses(sides, conversion=None, spaces="global"):
    """Return every distinct load and store of a tile's words in the compiled kernel, in these spaces of memory."""
    # scalar loads read the tables, vector loads the words of the tile
    ptx = compiled(*sides, conversion)["ptx"]
    found = re.findall(rf"((?:ld|st)\.(?:{spaces}))\S*?\.(v\d)\.b(\d+)", ptx)
    return sorted(
        {f"{name} {int(count[1:]) * int(width) // 8} bytes" for name, count, width in found}
    )


def conversion_of(elements, rounding="nearest", division=BY_PAIR):
    """Return a conversion as it is on a GPU that has instructions for fp8."""
    scales = np.ones((1, HEADS, 2), np.float32)
    conversion = Conversion(*elements, scales, "cpu", rounding=rounding)
    conversion.has_casts, conversion.division = True, division
    return conversion


def sides_of(conversion):
    """Return pools of both types: tokens first in blocks of 16, and heads first in blocks of 64."""
    items = conversion.src_item_bytes, conversion.dst_item_bytes
    return side("NHD", 16, items[0]), side("HND", 64, items[1])


def arithmetic(*, has_casts, division):
    """Return how the kernels that convert divide, and the registers and conversions of which Hopper alone has some."""
    found = set()
    for elements in (("bfloat16", "float8_e4m3fn"), ("float8_e5m2", "float16")):
        conversion = conversion_of(elements)
        conversion.has_casts, conversion.division = has_casts, division
        ptx = compiled(*sides_of(conversion), conversion)["ptx"]
        found |= set(
            re.findall(
                r"\b(?:div\.\w*\.?f32|ex2|cvt\.\w*\.satfinite|cvt\.rn\.f16x2\.e|\w+\.ftz)[\w.]*",
                ptx,
            )
        )
    return sorted(found)


def order_of(conversion):
    """Return the instructions of a tile in the order of the machine's code, as letters: a load of its elements L, one
    of the tables' addresses or of block ids T, one of scales S, a conversion C, a store of its elements W. Repetitions
    are left out.
    """
    sides = [
        side("NHD", 16, item) for item in (conversion.src_item_bytes, conversion.dst_item_bytes)
    ]
    sass = compiled(*sides, conversion)["sass"]
    kinds = {
        "L": r"LDG\.E\.128",
        "T": r"LDG\.E(?:\.64)? (?!.*\+0x)",
        "S": r"LDG\.E(?:\.64)? .*\+0x",
        "C": r"F2FP",
        "W": r"STG",
    }
    found = re.findall("|".join(f"(?P<{kind}>{text})" for kind, text in kinds.items()), sass)
    letters = "".join(
        kind for each in found for kind, text in zip(kinds, each, strict=True) if text
    )
    return re.sub(r"(.)\1+", r"\1", letters)


if __name__ == "__main__":
    pairs, converting = json.loads(sys.argv[1])
    conversions = [conversion_of(each) for each in converting]
    facts = {
        "accesses": [accesses((side(*src), side(*dst))) for src, dst in pairs],
        "converting_accesses": [
            accesses(sides_of(each), each, "global|shared") for each in conversions
        ],
        "orders": [
            order_of(conversion_of(("float8_e4m3fn", "float8_e4m3fn"), division=BY_FACTOR)),
            order_of(conversion_of(("bfloat16", "float8_e5m2"), "cast")),
        ],
        "casting": arithmetic(has_casts=True, division=BY_PAIR),
        "computing": arithmetic(has_casts=False, division=BY_DIVISION),
    }
    sys.stdout.write(json.dumps(facts))
