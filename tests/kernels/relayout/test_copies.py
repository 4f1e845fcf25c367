"""Both implementations against the oracle: layouts, block sizes, head slices, runs of tokens, item sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector_kernels.relayout import TokenRuns, relayout_cpu, relayout_triton
from kvconnector_kernels.relayout.runs import ADJACENT
from tests.kernels.relayout.pools import (
    TRITON_DEVICE,
    Chunk,
    Pool,
    Window,
    check_copy_equals_naive,
)

ORDERS = ("HND", "NHD", "HDN")
NUM_PARTS = 2

triton_kernel = pytest.param(
    relayout_triton,
    TRITON_DEVICE,
    id="triton",
    marks=[pytest.mark.gpu] if torch.cuda.is_available() else [],
)
implementations = pytest.mark.parametrize(
    "copy,device", [pytest.param(relayout_cpu, "cpu", id="cpu"), triton_kernel]
)


def _num_blocks(block_size, token_start, num_tokens, runs=ADJACENT):
    return (token_start + runs.offset(num_tokens)) // block_size + 1


@implementations
@pytest.mark.parametrize("src_order,dst_order", [("HND", "NHD"), ("NHD", "NHD"), ("HDN", "HND")])
def test_between_two_chunks(copy, device, src_order, dst_order):
    counts = {"num_parts": 2, "num_heads": 3, "num_tokens": 7}
    src = Chunk.filled(src_order, **counts, head_dim=5, item=2, device=device, seed=1)
    dst = Chunk.filled(dst_order, **counts, head_dim=5, item=2, device=device)
    check_copy_equals_naive(copy, src, dst, **counts, head_dim=5, item_size_bytes=2)


@implementations
@pytest.mark.parametrize("empty", ["num_parts", "num_heads", "num_tokens"])
def test_nothing_to_copy_changes_nothing(copy, device, empty):
    src, dst = Pool("HND", 4, device=device).fill_random(), Pool("NHD", 8, device=device)
    before = dst.buffer.clone()
    counts = {"num_parts": 2, "num_heads": 4, "num_tokens": 5} | {empty: 0}
    copy(Window(src).side(), Window(dst).side(), **counts)
    assert torch.equal(dst.buffer, before)


@pytest.mark.parametrize("max_programs", [1, 3, 10_000])
def test_capped_launch_copies_everything(max_programs):
    src = Pool("HND", 4, 12, device=TRITON_DEVICE).fill_random()
    dst = Pool("NHD", 8, 6, device=TRITON_DEVICE)
    check_copy_equals_naive(
        relayout_triton,
        Window(src, 0, 2),
        Window(dst, 0, 1),
        num_parts=2,
        num_heads=4,
        num_tokens=43,
        max_programs=max_programs,
    )


@st.composite
def token_runs(draw):
    """Adjacent tokens, single ones with gaps between them, or longer runs, which the copy may begin inside of."""
    run = draw(st.sampled_from([None, 1, 2, 3, 8, 16]))
    if run is None:
        return ADJACENT
    gap = draw(st.sampled_from([0, 1, run, 3 * run, 5]))
    return TokenRuns(run, run + gap, draw(st.integers(0, run - 1)))


pool_sizes = st.fixed_dictionaries(
    {
        "order": st.sampled_from(ORDERS),
        "block_size": st.integers(1, 33),
        "gap_items": st.integers(0, 9),
        "part_start": st.integers(0, 1),
        "head_start": st.integers(0, 2),
        "token_start": st.just(0) | st.integers(0, 40),
        "runs": token_runs(),
    }
)


def _window(sizes, device, *, num_heads, num_tokens, **pool):
    sizes = dict(sizes)
    head_start, token_start = sizes.pop("head_start"), sizes.pop("token_start")
    runs, part_start = sizes.pop("runs"), sizes.pop("part_start")
    num_blocks = _num_blocks(sizes["block_size"], token_start, num_tokens, runs)
    heads = head_start + num_heads
    built = Pool(
        **sizes,
        num_blocks=num_blocks,
        num_heads=heads,
        num_parts=part_start + NUM_PARTS,
        device=device,
        **pool,
    )
    return Window(built, head_start, token_start, runs, part_start)


@implementations
@settings(max_examples=40, deadline=None)
@given(
    src_sizes=pool_sizes,
    dst_sizes=pool_sizes,
    kind=st.sampled_from(["relayout", "alike", "pack", "unpack"]),
    num_heads=st.integers(1, 5),
    num_tokens=st.integers(1, 70) | st.sampled_from([16, 32, 64]),
    # with a latent's width, and that of an opaque state
    head_dim=st.integers(1, 40) | st.sampled_from([72, 300]),
    item=st.sampled_from([1, 2, 4, 8]),
)
def test_any_geometry(
    *, copy, device, src_sizes, dst_sizes, kind, num_heads, num_tokens, head_dim, item
):
    """From a pool to another one, or to or from a chunk. Two pools may be alike but for where the tokens begin, and
    have no gaps: consecutive blocks may be one run then.
    """
    if kind == "alike":
        src_sizes = src_sizes | {"gap_items": 0, "runs": ADJACENT}
        dst_sizes = src_sizes | {"token_start": dst_sizes["token_start"]}
    geometry = {"head_dim": head_dim, "item": item}
    counts = {"num_heads": num_heads, "num_tokens": num_tokens}
    sides = [_window(sizes, device, **geometry, **counts) for sizes in (src_sizes, dst_sizes)]
    counts["num_parts"] = NUM_PARTS
    if kind in ("pack", "unpack"):
        sizes, seed = (dst_sizes, None) if kind == "pack" else (src_sizes, 1)
        chunk = Chunk.filled(sizes["order"], **counts, **geometry, device=device, seed=seed)
        sides[kind == "pack"] = chunk
    if kind != "unpack":
        sides[0].pool.fill_random()
    check_copy_equals_naive(copy, *sides, **counts)
