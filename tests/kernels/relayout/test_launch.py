"""Prepared launches pass a kernel the same numbers as a launch by Triton, whatever was prepared before.

No GPU is needed: tables and block ids are addresses, and a fake compiler records its arguments.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.lanes import IN_SLOT, Lane, Span, Window
from kvconnector.datapath.pump.copies import address_of
from kvconnector.datapath.pump.launches import Launches, windows_of
from kvconnector.layout import ALL_TOKENS, GroupBlocks, Stripe
from kvconnector.planning import SegmentWindow
from kvconnector_kernels.pump.records import CudaJob, num_words
from kvconnector_kernels.relayout import (
    BlockIdsAt,
    BlockIdsError,
    PackedSide,
    PagedSide,
    PartTable,
    RelayoutError,
    TokenRuns,
    launch,
    sides,
)
from kvconnector_kernels.relayout.runs import ADJACENT
from kvconnector_kernels.relayout.sides import check_copy
from kvconnector_kernels.relayout.tiles import plan_tiles
from kvconnector_kernels.relayout.triton import kernel_constants, relayout_kernel, side_numbers
from tests.kernels.relayout.pools import inner_strides, part_table

GPU = "cuda:0"
IDS_ADDRESS, NUM_IDS = 1 << 20, 1 << 12
HEADS, DIM, ITEM = 4, 64, 2


class Vector:
    """A fake vector in a GPU's memory."""

    dtype, shape, device = torch.int32, (NUM_IDS,), GPU

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def is_contiguous(self):
        return True


def fake_compile(*arguments, grid, num_warps, **constants):
    """A fake kernel for these arguments; its function is a number that depends on them."""
    names = relayout_kernel.arg_names
    given = dict(zip(names, arguments, strict=False))
    signature = {
        name: "constexpr" if name in constants or given[name] is None else "i64" for name in names
    }
    pointers = [given[f"{side}_{name}"] for side in ("src", "dst") for name in ("rows", "ids")]
    alignment = [None if one is None else one.data_ptr() % 16 for one in pointers]
    return SimpleNamespace(
        function=hash((*alignment, *map(str, constants.values()))),
        src=SimpleNamespace(signature=signature, fn=SimpleNamespace(arg_names=names)),
        metadata=SimpleNamespace(
            num_warps=num_warps, shared=0, global_scratch_size=0, profile_scratch_size=0
        ),
        _init_handles=lambda: None,
    )


@pytest.fixture(autouse=True, scope="module")
def no_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "relayout_kernel", SimpleNamespace(warmup=fake_compile))
        patch.setattr(launch, "on_device", lambda device: nullcontext())
        patch.setattr(sides, "_upload_and_wait", lambda rows, device: Vector(1 << 21))
        # stands for ids at an address
        patch.setattr("torch.empty", lambda *shape, dtype, device: Vector(1 << 19))
        patch.setattr(launch, "_kernels", {})
        yield


def table(order="HND", block=16, shift=0):
    elements = (HEADS * block * DIM, *inner_strides(order, HEADS, block, DIM))
    rows = [(4096 * part + shift, *(ITEM * stride for stride in elements)) for part in (1, 2, 3)]
    return part_table(rows, (NUM_IDS, block, HEADS, DIM, ITEM), GPU)


@st.composite
def paged_sides(draw):
    pool = table(
        draw(st.sampled_from(["HND", "NHD", "HDN"])),
        draw(st.sampled_from([16, 3, 64])),
        draw(st.sampled_from([0, 0, 4, 2])),
    )
    runs = draw(st.sampled_from([ADJACENT, ADJACENT, TokenRuns(16, 32), TokenRuns(2, 5, 1)]))
    ids = draw(
        st.sampled_from(
            [BlockIdsAt(IDS_ADDRESS, NUM_IDS, GPU), Vector(IDS_ADDRESS), Vector(IDS_ADDRESS + 4)]
        )
    )
    start = draw(st.integers(0, 100))
    return PagedSide(pool, ids, draw(st.integers(0, 1)), draw(st.integers(0, 1)), start, runs)


@st.composite
def chunks(draw):
    order = draw(st.sampled_from(["HND", "NHD", "HDN"]))
    return PackedSide(1 << 22 | draw(st.sampled_from([0, 8])), 1 << 30, order, GPU)


@given(
    src=paged_sides(),
    dst=st.one_of(paged_sides(), chunks()),
    swapped=st.booleans(),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 300)),
)
def test_prepared_launches_equal_tritons_own(src, dst, swapped, sizes):
    pair = (dst, src) if swapped else (src, dst)
    counts = dict(zip(("num_parts", "num_heads", "num_tokens"), sizes, strict=True))
    geometry = check_copy(*pair, **counts)
    tiling = plan_tiles(*pair, geometry)
    prepared = launch.prepare_launch(*pair, **counts)
    arguments, pointers = [], []
    for side, tiles in zip(pair, (tiling.src, tiling.dst), strict=True):
        rows = ids = None
        if isinstance(side, PagedSide):
            rows = side.table.rows_address
            ids = getattr(side.block_ids, "address", None)
        arguments += [rows, ids, *side_numbers(side, tiles, geometry)]
        pointers += [rows, ids]
    per_part = int(np.prod(tiling.counts(geometry)))
    arguments += [*sizes[1:], tiling.lead_tokens, sizes[0] * per_part]
    arguments += tiling.counts(geometry)
    named = dict(zip(relayout_kernel.arg_names, arguments, strict=False))
    expected = {name: value for name, value in named.items() if value is not None}
    assert dict(zip(prepared.kernel.names, prepared.values, strict=True)) == expected
    assert prepared.tiles_per_part == per_part
    # and the kernel is the one that was compiled for them
    alignment = [None if address is None else address % 16 for address in pointers]
    constants = kernel_constants(tiling).values()
    assert prepared.kernel.function == hash((*alignment, *map(str, constants)))


pools = st.builds(
    table, st.sampled_from(["HND", "NHD", "HDN"]), block=st.sampled_from([16, 8, 3, 64])
)
CHUNKS = [PackedSide(1 << 22, 1 << 30, order, GPU) for order in ("HND", "NHD")]


def prepare(pair, starts, num_tokens, num_parts=1):
    sides = (
        PagedSide(pool, BlockIdsAt(IDS_ADDRESS, NUM_IDS, GPU), token_start=start)
        if isinstance(pool, PartTable)
        else pool
        for pool, start in zip(pair, starts, strict=True)
    )
    return launch.prepare_launch(
        *sides, num_heads=HEADS, num_tokens=num_tokens, num_parts=num_parts
    )


def prepared_for(src, dst, num_heads, num_tokens, conversion=None):
    return launch.prepare_launch(
        src, dst, num_heads=num_heads, num_tokens=num_tokens, conversion=conversion
    )


one_table = cache(table)
orders = st.sampled_from(["HND", "NHD", "HDN"])
row_edges = st.lists(st.integers(0, 3), min_size=2, unique=True).map(sorted)
starts = st.integers(0, 200)
TOKEN_BYTES, MAX_PROGRAMS, MAX_UNCAPPED_BYTES, STREAM = 1 << 14, 9, 4 << 20, 77
BLOCKS = GroupBlocks.of(range(NUM_IDS))


def window_of(pool, heads, stripe=ALL_TOKENS):
    segment = SegmentWindow(0, 0, 0, heads[0], heads[1], TOKEN_BYTES, "HND", stripe)
    return Window(pool, segment)


def span_of(ends, firsts, num_tokens, rows, *, num_heads=HEADS, ids=(0, 0)):
    tokens = (
        end.tokens(first, num_tokens, 1, BLOCKS, IDS_ADDRESS + at)
        if isinstance(end, Window)
        else IN_SLOT
        for end, first, at in zip(ends, firsts, ids, strict=True)
    )
    lane = Lane(*ends, num_heads, TOKEN_BYTES)
    return Span(lane, *tokens, num_tokens, slice(0, len(rows) - 1), rows)


@st.composite
def spans(draw):
    """Spans of packed or unpacked chunks, or of reads from other pools."""
    heads = draw(st.sampled_from([(0, HEADS), (0, 2), (2, 2), (1, 1)]))
    windows = st.builds(
        window_of,
        st.builds(one_table, orders, st.sampled_from([16, 8, 3, 64])),
        st.just(heads),
        st.sampled_from([ALL_TOKENS, ALL_TOKENS, Stripe(0, 16, 32), Stripe(3, 2, 5)]),
    )
    slots = st.builds(PackedSide, st.just(1 << 22), st.just(1 << 30), orders, st.just(GPU))
    ends = draw(st.tuples(windows, windows | slots).flatmap(st.permutations))
    num_tokens = draw(st.integers(1, 300) | st.integers(1, 20).map(lambda blocks: 16 * blocks))
    ids = st.sampled_from([0, 64])
    return span_of(
        ends,
        draw(st.tuples(starts, starts)),
        num_tokens,
        draw(row_edges),
        num_heads=heads[1],
        ids=draw(st.tuples(ids, ids)),
    )


def sides_of(span):
    ends = (span.lane.src, span.src), (span.lane.dst, span.dst)
    return [end.side(tokens) if isinstance(end, Window) else end for end, tokens in ends]


@given(asked=st.lists(spans(), min_size=2, max_size=8))
def test_cached_launches_equal_fresh_ones(asked):
    known = Launches(prepared_for, MAX_PROGRAMS)
    for span in asked:
        words = np.empty((len(span.rows) - 1, num_words(CudaJob)), np.int64)
        known.fill(address_of(words), span, STREAM, max_uncapped_bytes=MAX_UNCAPPED_BYTES)
        jobs = map(CudaJob.from_buffer, words)
        for job, (part_start, stop) in zip(jobs, pairwise(span.rows), strict=True):
            num_parts = stop - part_start
            counts = {"num_heads": span.lane.num_heads, "num_tokens": span.num_tokens}
            pair = sides_of(span)
            sides = (
                replace(side, part_start=part_start) if isinstance(side, PagedSide) else side
                for side in pair
            )
            own = launch.prepare_launch(*sides, **counts, num_parts=num_parts)
            assert tuple(job.params[: len(own.values)]) == own.values
            slot = next(
                (
                    f"{name}_address"
                    for name, side in zip(("src", "dst"), pair, strict=True)
                    if isinstance(side, PackedSide)
                ),
                None,
            )
            num_tiles, nbytes = num_parts * own.tiles_per_part, num_parts * counts["num_tokens"]
            nbytes *= TOKEN_BYTES
            is_capped = nbytes > MAX_UNCAPPED_BYTES
            expected = {
                "nbytes": nbytes,
                "function": own.kernel.function % (1 << 64),  # an address
                "num_programs": min(num_tiles, MAX_PROGRAMS) if is_capped else num_tiles,
                "num_threads": own.kernel.num_threads,
                "num_params": len(own.values) + 2,
                "slot_param": own.index(slot) if slot else 0,
                "stream": STREAM,
            }
            assert {name: getattr(job, name) for name in expected} == expected


def test_similar_copies_are_prepared_once():
    prepared = []

    def prepare(*sides_and_counts):
        prepared.append(sides_and_counts)
        return prepared_for(*sides_and_counts)

    known, words = Launches(prepare, MAX_PROGRAMS), np.empty((1, num_words(CudaJob)), np.int64)
    for start, at, part in product((5, 21, 37), (0, 64), [[0, 1], [1, 3]]):
        for other in (window_of(one_table("NHD", 16), (0, HEADS)), CHUNKS[0]):
            ends = window_of(one_table("HND", 16), (0, HEADS)), other
            span = span_of(ends, (start, start + 3), 16 * start, part, ids=(at, 0))
            known.fill(address_of(words), span, STREAM, max_uncapped_bytes=0)
    assert len(prepared) == 2


def test_windows_refuse_missing_parts_and_blocks():
    window = window_of(one_table(), (0, HEADS))
    assert window.tokens(16, 48, 3, GroupBlocks.of([5, 6, 7], 1), 64) == (64, 3, 0, 0)
    for first, num_tokens in ((15, 16), (16, 49)):
        with pytest.raises(BlockIdsError, match="of 3 blocks of 16 tokens"):
            window.tokens(first, num_tokens, 1, GroupBlocks.of([5, 6, 7], 1), 64)
    with pytest.raises(RelayoutError, match="row 4 of 3"):
        window.tokens(0, 1, 4, BLOCKS, 64)
    # a stripe also counts the tokens before its first run, which are not copied
    stripe = window_of(one_table(), (0, HEADS), Stripe(8, 4, 32))
    assert stripe.tokens(6, 2, 1, GroupBlocks.of([5, 6], 2), 64) == (64, 2, 8, 2)
    with pytest.raises(BlockIdsError, match="tokens 10 to 41"):
        stripe.tokens(6, 3, 1, GroupBlocks.of([5, 6], 2), 64)


@given(
    pair=st.tuples(pools, pools | st.sampled_from(CHUNKS)).flatmap(st.permutations),
    starts=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    num_tokens=st.integers(1, 300),
)
def test_warm_up_windows_compile_every_kernel(pair, starts, num_tokens):
    launch._kernels.clear()
    windows = windows_of(min(side.block_size for side in pair if isinstance(side, PartTable)))
    for (there, count), (here, _) in product(windows, windows):
        prepare(pair, (there, here), count)
    known = len(launch._kernels)
    prepare(pair, starts, num_tokens)
    assert len(launch._kernels) == known


def test_a_kernel_with_other_parameters_is_refused(monkeypatch):
    def compile_otherwise(*arguments, **options):
        kernel = fake_compile(*arguments, **options)
        kernel.src.signature["num_heads"] = "constexpr"
        return kernel

    monkeypatch.setattr(launch, "relayout_kernel", SimpleNamespace(warmup=compile_otherwise))
    monkeypatch.setattr(launch, "_kernels", {})
    side = PagedSide(table(), BlockIdsAt(IDS_ADDRESS, NUM_IDS, GPU))
    chunk = PackedSide(1 << 22, 1 << 30, "NHD", GPU)
    with pytest.raises(RelayoutError, match="other parameters"):
        launch.prepare_launch(side, chunk, num_heads=4, num_tokens=16)


def test_impossible_launches_are_refused():
    chunk = PackedSide(1 << 22, 1 << 30, "NHD", GPU)
    host = PackedSide(1 << 22, 1 << 30, "NHD", "cpu")
    for pair, why in (((chunk, chunk), "two chunks"), ((host, host), "one on a GPU")):
        with pytest.raises(RelayoutError, match=why):
            launch.prepare_launch(*pair, num_heads=4, num_tokens=16)
    short = PagedSide(table(), BlockIdsAt(IDS_ADDRESS, 2, GPU))
    with pytest.raises(BlockIdsError, match=r"2 block ids of 16 tokens.*needs 3"):
        launch.prepare_launch(short, chunk, num_heads=4, num_tokens=33)
