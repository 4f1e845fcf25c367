"""Paged pools and dense chunks among sentinel bytes, and the check that a copy equals the naive one."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from kvconnector_kernels.relayout import (
    PackedSide,
    PagedSide,
    PartTable,
    TokenRuns,
    relayout_naive,
    upload_block_ids,
)
from kvconnector_kernels.relayout.runs import ADJACENT

TRITON_DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ORDERS = ("HND", "NHD", "HDN")
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD_ITEMS = 16
SENTINEL_BYTE = 0xA5


def inner_strides(order, heads, tokens, dims):
    """Return the strides of heads, tokens and dims in a block, in elements."""
    return {
        "HND": (tokens * dims, dims, 1),
        "NHD": (dims, heads * dims, 1),
        "HDN": (tokens * dims, 1, tokens),
    }[order]


def part_table(rows, sizes, device="cpu"):
    """A part table; `sizes` are blocks, tokens per block, heads, elements of a head's token, and bytes per element."""
    names = ("num_blocks", "block_size", "num_heads", "head_dim", "item_size_bytes")
    return PartTable(
        np.array(rows, np.int64), **dict(zip(names, sizes, strict=True)), device=device
    )


@dataclass
class Pool:
    """`num_parts` parts in one buffer, with guards around each part and a gap after each block."""

    order: str
    block_size: int
    num_blocks: int = 6
    num_heads: int = 4
    head_dim: int = 6
    item: int = 2
    num_parts: int = 2
    gap_items: int = 8
    device: str = "cpu"
    buffer: torch.Tensor = field(init=False)

    def __post_init__(self):
        items = 2 * GUARD_ITEMS + self.num_parts * self.part_items
        raw = torch.full((items * self.item,), SENTINEL_BYTE, dtype=torch.uint8)
        self.buffer = raw.view(DTYPES[self.item]).to(self.device)

    @property
    def block_items(self):
        return self.num_heads * self.block_size * self.head_dim + self.gap_items

    @property
    def part_items(self):
        return GUARD_ITEMS + self.num_blocks * self.block_items

    @property
    def strides(self):
        inner = inner_strides(self.order, self.num_heads, self.block_size, self.head_dim)
        return (self.block_items, *inner)

    def views(self, buffer):
        """Return the parts of a buffer of this pool's shape, as logical `[block, head, token, dim]`."""
        shape = (self.num_blocks, self.num_heads, self.block_size, self.head_dim)
        starts = [GUARD_ITEMS + part * self.part_items for part in range(self.num_parts)]
        return [buffer.as_strided(shape, self.strides, start) for start in starts]

    def fill_random(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(
            0, 256, (self.buffer.numel() * self.item,), dtype=torch.uint8, generator=generator
        )
        self.buffer.copy_(raw.view(DTYPES[self.item]))
        return self

    def table(self):
        rows = [
            (view.data_ptr(), *(stride * self.item for stride in view.stride()))
            for view in self.views(self.buffer)
        ]
        sizes = (self.num_blocks, self.block_size, self.num_heads, self.head_dim, self.item)
        return part_table(rows, sizes, self.device)

    def block_ids(self, seed=0):
        """All blocks, shuffled."""
        return np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)


@dataclass(frozen=True)
class Window:
    """A window of a pool, for `PagedSide` and for the naive copy."""

    pool: Pool
    head_start: int = 0
    token_start: int = 0
    runs: TokenRuns = ADJACENT
    part_start: int = 0

    def side(self):
        ids = upload_block_ids(
            self.pool.block_ids(), num_blocks=self.pool.num_blocks, device=self.pool.device
        )
        return PagedSide(
            self.pool.table(),
            ids,
            part_start=self.part_start,
            head_start=self.head_start,
            token_start=self.token_start,
            runs=self.runs,
        )

    def parts(self, buffer):
        return self.pool.views(buffer)[self.part_start :]

    @property
    def ids(self):
        return self.pool.block_ids().tolist()

    @property
    def buffer(self):
        return self.pool.buffer


@dataclass(frozen=True)
class Chunk:
    """A dense chunk with guards, for a copy of the given counts."""

    order: str
    num_parts: int
    num_heads: int
    num_tokens: int
    head_dim: int
    item: int
    buffer: torch.Tensor
    head_start: int = 0
    token_start: int = 0
    ids = (0,)
    runs = ADJACENT

    @classmethod
    def filled(cls, order, *, num_parts, num_heads, num_tokens, head_dim, item, device, seed=None):
        items = num_parts * num_heads * num_tokens * head_dim + 2 * GUARD_ITEMS
        raw = torch.full((items * item,), SENTINEL_BYTE, dtype=torch.uint8)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            raw = torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator)
        buffer = raw.view(DTYPES[item]).to(device)
        return cls(order, num_parts, num_heads, num_tokens, head_dim, item, buffer)

    def side(self):
        inner = self.buffer[GUARD_ITEMS:-GUARD_ITEMS]
        return PackedSide(
            inner.data_ptr(), inner.numel() * self.item, self.order, str(self.buffer.device)
        )

    def parts(self, buffer):
        """Return parts of one block each, `[1, num_heads, num_tokens, head_dim]`, in the buffer's memory."""
        sizes = {"H": self.num_heads, "N": self.num_tokens, "D": self.head_dim}
        stored = buffer[GUARD_ITEMS:-GUARD_ITEMS].view(
            self.num_parts, *(sizes[axis] for axis in self.order)
        )
        axes = [1 + self.order.index(axis) for axis in "HND"]
        return [part.unsqueeze(0) for part in stored.permute(0, *axes)]


TILED_BLOCK_SIZES = st.sampled_from([8, 16, 24, 32, 40, 64, 96, 128, 256])
"""Block sizes for tiles of 8 tokens or more. The first tile of a copy may begin before the copy."""


@st.composite
def token_runs(draw):
    """Draw adjacent tokens, or runs of one or more tokens with gaps between them; the copy may begin inside a run."""
    run = draw(st.none() | st.sampled_from([1, 2, 3, 8, 16]))
    if run is None:
        return ADJACENT
    gap = draw(st.sampled_from([0, 1, run, 3 * run, 5]))
    return TokenRuns(run, run + gap, draw(st.integers(0, run - 1)))


@st.composite
def windows(draw, *, num_parts, num_heads, num_tokens, like=None, runs=None, **pool):
    """Draw windows of this size in pools of any shape except for the sizes in `pool`, or of the shape of `like`'s."""
    token_start = draw(st.just(0) | st.integers(0, 40) | st.integers(1, 40).map(lambda n: 8 * n))
    runs = runs or draw(token_runs())
    if like is None:
        part_start, head_start = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        pool["order"] = draw(st.sampled_from(ORDERS))
        if "block_size" not in pool:
            pool["block_size"] = draw(TILED_BLOCK_SIZES | st.integers(1, 33))
        pool.setdefault("gap_items", draw(st.sampled_from([0, 0, 3, 64])))
        pool["num_heads"] = head_start + num_heads + draw(st.integers(0, 2))
    else:
        part_start, head_start = like.part_start, like.head_start
        for name in ("order", "block_size", "gap_items", "num_heads"):
            pool[name] = getattr(like.pool, name)
    num_blocks = (token_start + runs.offset(num_tokens)) // pool["block_size"] + 1
    whole = Pool(**pool, num_blocks=num_blocks, num_parts=part_start + num_parts)
    return Window(whole, head_start, token_start, runs, part_start)


def expected_buffer(src, dst, *, num_heads, num_tokens, **conversion):
    """Return the whole destination buffer after the copy, with guards and gaps. `conversion` as in `relayout_naive`."""
    want = dst.buffer.clone()
    relayout_naive(
        src.parts(src.buffer),
        dst.parts(want),
        src.ids,
        dst.ids,
        num_heads=num_heads,
        num_tokens=num_tokens,
        src_head_start=src.head_start,
        dst_head_start=dst.head_start,
        src_token_start=src.token_start,
        dst_token_start=dst.token_start,
        src_runs=src.runs,
        dst_runs=dst.runs,
        **conversion,
    )
    return want


def check_copy_equals_naive(copy, src, dst, *, num_parts, num_heads, num_tokens, **knobs):
    """Run `copy` and compare the whole destination and the untouched source, byte for byte."""
    want = expected_buffer(src, dst, num_heads=num_heads, num_tokens=num_tokens)
    source_before = src.buffer.clone()
    copy(
        src.side(),
        dst.side(),
        num_parts=num_parts,
        num_heads=num_heads,
        num_tokens=num_tokens,
        **knobs,
    )
    if dst.buffer.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(dst.buffer, want)
    assert torch.equal(src.buffer, source_before)
    # a copy that writes nothing would leave only sentinels
    assert num_tokens == 0 or (dst.buffer.view(torch.uint8) != SENTINEL_BYTE).any()
