"""Both implementations against the naive copy: layouts, block sizes, head slices, runs of tokens, item sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector_kernels.relayout import TokenRuns, cpu, relayout_cpu, relayout_triton
from kvconnector_kernels.relayout.runs import ADJACENT
from tests.kernels.relayout.pools import (
    ORDERS,
    TILED_BLOCK_SIZES,
    TRITON_DEVICE,
    Chunk,
    Pool,
    Window,
    check_copy_equals_naive,
    windows,
)
from tests.support.examples import examples

triton_kernel = pytest.param(
    relayout_triton,
    TRITON_DEVICE,
    id="triton",
    marks=[pytest.mark.gpu] if torch.cuda.is_available() else [],
)
implementations = pytest.mark.parametrize(
    "copy,device", [pytest.param(relayout_cpu, "cpu", id="cpu"), triton_kernel]
)


@implementations
@pytest.mark.parametrize("empty", ["num_parts", "num_heads", "num_tokens"])
def test_empty_copies_change_nothing(copy, device, empty):
    src, dst = Pool("HND", 4, device=device).fill_random(), Pool("NHD", 8, device=device)
    before = dst.buffer.clone()
    counts = {"num_parts": 2, "num_heads": 4, "num_tokens": 5} | {empty: 0}
    copy(Window(src).side(), Window(dst).side(), **counts)
    assert torch.equal(dst.buffer, before)


@implementations
@pytest.mark.parametrize("orders", [("HND", "NHD"), ("HDN", "HDN"), ("HDN", "HND")], ids="-".join)
@pytest.mark.parametrize("starts", [(11, 18), (11, 19), (8, 18), (16, 24)], ids=str)
def test_first_tiles_may_begin_before_the_copy(copy, device, orders, starts):
    """Tiles of 8 tokens fit into both sides' blocks. They begin at the destination's blocks, so inside the source's
    blocks or before the first token.
    """
    pools = (Pool(order, size, device=device) for order, size in zip(orders, (32, 24), strict=True))
    src, dst = (Window(pool, 0, start) for pool, start in zip(pools, starts, strict=True))
    src.pool.fill_random()
    check_copy_equals_naive(copy, src, dst, num_parts=2, num_heads=4, num_tokens=26)


@implementations
@pytest.mark.parametrize("run, step, block_size", [(8, 24, 8), (16, 32, 16), (16, 48, 32)])
def test_runs_that_fill_tiles(copy, device, run, step, block_size):
    """No tile crosses a run or a block, so its first token gives the place of the others."""
    runs = TokenRuns(run, step, 0)
    pool = Pool("HND", block_size, num_blocks=runs.offset(40) // block_size + 1, device=device)
    src = Window(pool.fill_random(), runs=runs)
    dst = Window(Pool("NHD", 8, device=device))
    check_copy_equals_naive(copy, src, dst, num_parts=2, num_heads=4, num_tokens=40)


@implementations
@examples(60)
@given(
    data=st.data(),
    kind=st.sampled_from(["relayout", "tiled", "alike", "pack", "unpack"]),
    num_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 70) | st.sampled_from([16, 32, 64]),
    # includes the widths of a latent and of an opaque state
    head_dim=st.integers(1, 40) | st.sampled_from([72, 300]),
    item=st.sampled_from([1, 2, 4, 8]),
)
def test_any_geometry_is_copied_like_the_naive_one(
    *, copy, device, data, kind, num_heads, num_tokens, head_dim, item
):
    """Copies from pool to pool, and to and from chunks. Two pools may differ only in the first token and have no gaps,
    so that consecutive blocks may be one run. Or tiles fit into the blocks of both, wherever the tokens begin.
    """
    sizes = {"head_dim": head_dim, "item": item, "device": device}
    counts = {"num_parts": 2, "num_heads": num_heads, "num_tokens": num_tokens}

    def chunk(seed=None):
        return Chunk.filled(data.draw(st.sampled_from(ORDERS)), **counts, **sizes, seed=seed)

    def tiled():
        is_tiled = kind == "tiled"
        return {"runs": ADJACENT, "block_size": data.draw(TILED_BLOCK_SIZES)} if is_tiled else {}

    dense = {"gap_items": 0, "runs": ADJACENT} if kind == "alike" else tiled()
    if kind == "unpack":
        src = chunk(seed=1)
    else:
        src = data.draw(windows(**counts, **sizes, **dense))
        src.pool.fill_random()
    if kind == "pack":
        dst = chunk()
    elif kind == "alike":
        dst = data.draw(windows(**counts, **sizes, like=src, runs=ADJACENT))
    else:
        dst = data.draw(windows(**counts, **sizes, **tiled()))
    asked = {}
    if copy is relayout_triton:
        asked["max_programs"] = data.draw(st.sampled_from([None, 1, 3, 10_000]))
    with pytest.MonkeyPatch.context() as patch:
        # also bypass the caches, as copies that are too large for them do
        patch.setattr(cpu, "MIN_STREAMED_COPY_BYTES", data.draw(st.sampled_from([1, 2 << 20])))
        check_copy_equals_naive(copy, src, dst, **counts, **asked)
