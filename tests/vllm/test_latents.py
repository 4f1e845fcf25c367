"""Caches of one vector per token: rows, or pages in planes, stored by vLLM's own kernels and read back by our parts."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.latents import DENSE, planes_of
from kvconnector.integrations.vllm.parts import BLOCK_SPARSE
from kvconnector.integrations.vllm.unwritten import clear_unwritten
from kvconnector.planning import GroupBlocks
from kvconnector.session.orders import LoadRequest
from tests.vllm import kernel_pages
from tests.vllm.cache_world import NAMES, attention, placed, raw, read, registered

# the kernels run in a process of their own, which imports vLLM: longer than a test may take where others run beside it
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

INDEXER = "DEEPSEEK_V32_INDEXER"
ROWS = 64


def latent(width, dtype=torch.uint8, **options):
    """Return the spec of a cache with one vector of `width` elements per token."""
    defaults = {"num_kv_heads": 1, "head_size": width, "dtype": dtype, "block_size": ROWS}
    return attention(kv.MLAAttentionSpec, **{**defaults, **options})


def naive_row(page, row, planes):
    """Return the bytes of one row of a page (uint8) in planes: obviously right, and slow."""
    found, start = [], 0
    for nbytes in planes:
        found += page[start + row * nbytes : start + (row + 1) * nbytes].tolist()
        start += ROWS * nbytes
    return found


def row_of(views, block, row):
    """Return the bytes of one row as our parts have them."""
    return [byte for view in views for byte in read(view)[block, 0, row].reshape(-1).tolist()]


def move(source, target, tokens, blocks, size):
    """Move rows, as a load does, from one engine's blocks in order to another's `blocks` of `size` tokens."""
    for theirs, ours in zip(source.cache.views[0], target.cache.views[0], strict=True):
        for token in range(tokens):
            block = blocks[token // size]
            read(ours)[block, 0, token % size] = read(theirs)[token // ROWS, 0, token % ROWS]


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """Returns the rows that one of vLLM's kernels has stored, by one process that has Triton's interpreter, and that is
    there once a test asks it: a test on a GPU does not.
    """

    @functools.cache
    def run():
        file = tmp_path_factory.mktemp("pages") / "stored"
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "tests.vllm.kernel_pages", str(file)]
        subprocess.run(command, env=environment, check=True, timeout=300)
        return torch.load(file)

    def of(name):
        found = run()
        if found[name] is None:
            pytest.skip(
                "this kernel of vLLM 0.31 needs block pointers, which this Triton has no more"
            )
        return found[name]

    return of


@pytest.mark.parametrize("number", range(1, 65))
def test_every_row_of_a_page_brings_its_own_scale(number):
    """Against the naive version: any part of a page arrives, and no other byte changes."""
    source, theirs = registered(latent(132), backend=INDEXER)
    target, ours = registered(latent(132), backend=INDEXER)
    cache, before = ours[NAMES[0]], ours[NAMES[0]].clone()
    move(source, target, number, [3], ROWS)
    pages = theirs[NAMES[0]].reshape(-1, ROWS * 132)
    found, kept = cache.reshape(-1, ROWS * 132), before.reshape(-1, ROWS * 132)
    for row in range(ROWS):
        page = pages[0] if row < number else kept[3]
        assert naive_row(found[3], row, (128, 4)) == naive_row(page, row, (128, 4))
    assert torch.equal(found[[0, 1, 2, 4]], kept[[0, 1, 2, 4]])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_keys_that_the_indexers_kernel_stored_are_read_with_their_scales(stored, device):
    """Half a page is moved, and every key is what was stored."""
    on_gpu = device == "cuda"
    found = kernel_pages.run("indexer", device) if on_gpu else stored("indexer")
    source, theirs = registered(latent(132), backend=INDEXER)
    theirs[NAMES[0]].reshape(-1, ROWS * 132)[:2] = found["pages"]
    target, ours = registered(latent(132), backend=INDEXER)
    count = kernel_pages.ROWS - 4  # half of the second page
    move(source, target, count, [4, 1], ROWS)
    pages = ours[NAMES[0]].reshape(-1, ROWS * 132)
    for token in range(count):
        row = naive_row(pages[[4, 1][token // ROWS]], token % ROWS, (128, 4))
        values = torch.tensor(row[:128], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        scale = torch.tensor(row[128:], dtype=torch.uint8).view(torch.float32)
        assert torch.equal(values * scale, found["keys"][token].float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latents_that_the_windows_kernel_stored_are_read_with_their_scales(stored, device):
    """DeepSeek-V4's: 448 values in fp8 with a scale for each 64 of them, and 64 in bfloat16."""
    on_gpu = device == "cuda"
    found = kernel_pages.run("window", device) if on_gpu else stored("window")
    spec = latent(512, state_content_bytes=584, alignment=576)
    source, theirs = registered(spec, backend="DEEPSEEK_SPARSE_SWA")
    target, ours = registered(spec, backend="DEEPSEEK_SPARSE_SWA")
    for page, stored_page in zip(theirs[NAMES[0]], found["pages"], strict=False):
        page.reshape(-1)[:] = stored_page[: ROWS * 584]
    count = kernel_pages.ROWS - 4
    move(source, target, count, [4, 1], ROWS)
    for token in range(count):
        page = ours[NAMES[0]][[4, 1][token // ROWS]].reshape(-1)
        row = torch.tensor(naive_row(page, token % ROWS, (576, 8)), dtype=torch.uint8)
        values = row[:448].view(torch.float8_e4m3fn).float().view(7, 64)
        scales = 2.0 ** (row[576:583].float() - 127)
        rest = row[448:576].view(torch.bfloat16).float()
        read_back = torch.cat([(values * scales[:, None]).reshape(-1), rest])
        assert torch.equal(read_back, found["keys"][token].float())


@pytest.mark.parametrize("backend", sorted(BLOCK_SPARSE))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_block_sparse_attention_reads_k_and_v_where_they_are_moved(stored, device, backend):
    """MiniMax-M3's: its kernel gets from the pages the means of our V whose K in our parts have a query's pattern."""
    on_gpu = device == "cuda"
    found = kernel_pages.run("block-sparse", device) if on_gpu else stored("block-sparse")
    pages, q = found["pages"], found["q"]
    _, heads, size, content = pages.shape
    spec = attention(block_size=size, num_kv_heads=heads, head_size=content // 2)
    group, caches = registered(spec, KVCacheLayout.BLHNC, backend, total_kv_heads=heads)
    assert [part.name for part in group.cache.geometry.parts] == ["k", "v"]
    caches[NAMES[1]][: len(pages)] = pages
    k, v = (
        torch.from_numpy(read(view)[[*kernel_pages.TABLE]].copy()).view(torch.float32).squeeze(-1)
        for view in group.cache.views[1]
    )
    tokens = len(pages) * size - 5
    for head in range(q.shape[1]):
        own = head * heads // q.shape[1]
        keys, values = (each[:, own].reshape(-1, content // 2)[:tokens] for each in (k, v))
        seen = keys @ q[0, head] > 0
        assert seen.any()
        assert torch.equal(found["output"][0, head], values[seen].mean(0))


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float8_e4m3fn, marks=pytest.mark.gpu),
    ],
)
def test_keys_without_scales_are_scored_where_they_are_moved(stored, device, dtype):
    """MiniMax-M3's: each query's score of a block is the largest product with the rows of ours that it sees."""
    on_gpu = device == "cuda"
    found = kernel_pages.run("block-sparse-keys", device) if on_gpu else stored("block-sparse-keys")
    spec = latent(128, dtype, block_size=128)
    group, caches = registered(spec, KVCacheLayout.LBHNC, "MINIMAX_M3_SPARSE_INDEXER")
    caches[NAMES[1]][:2, 0] = found["keys"].to(dtype)
    (view,) = group.cache.views[1]
    rows = torch.from_numpy(read(view)[[1, 0], 0].copy()).view(dtype).float().reshape(256, 128)
    products = found["q"][:, 0].float() @ rows.T
    for number, of_query in enumerate(products):
        seen = 100 + number + 1
        assert found[str(dtype)][number, 0] == of_query[: min(seen, 128)].max()
        if seen > 128:
            assert found[str(dtype)][number, 1] == of_query[128:seen].max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["indexer", "fp8_ds_mla", "auto", "fp8"])
def test_rows_that_cuda_kernels_stored_are_read_back(kind):
    """By the operations of vLLM that store latents and keys, on a GPU."""
    from vllm import _custom_ops as ops

    count = kernel_pages.ROWS
    generator = torch.Generator(device="cuda").manual_seed(0)
    widths = {"indexer": 132, "fp8_ds_mla": 656, "auto": 576, "fp8": 576}
    dtype = torch.bfloat16 if kind == "auto" else torch.uint8
    pages = torch.zeros(2, ROWS, widths[kind], dtype=dtype, device="cuda")
    singles = [pages.clone() for _ in range(count)]
    latents = torch.randn(count, 512, generator=generator, device="cuda").to(torch.bfloat16)
    rope = torch.randn(count, 64, generator=generator, device="cuda").to(torch.bfloat16)
    slots = torch.arange(count, device="cuda")

    def store(cache, rows):
        if kind == "indexer":
            keys = latents[rows, :128].contiguous()
            ops.indexer_k_quant_and_cache(keys, cache, slots[rows], 128, "ue8m0")
        else:
            scale = torch.ones(1, device="cuda")
            ops.concat_and_cache_mla(latents[rows], rope[rows], cache, slots[rows], kind, scale)

    store(pages, slice(None))
    backend = INDEXER if kind == "indexer" else "FLASHMLA_SPARSE"
    opaque = {"state_content_bytes": 656} if kind == "fp8_ds_mla" else {}
    group, caches = registered(latent(widths[kind], dtype, **opaque), backend=backend)
    whole = caches[NAMES[0]]
    for token in range(count):  # the bytes that one row's store changes are the bytes of our row
        store(singles[token], slice(token, token + 1))
        whole.fill_(0)
        whole.reshape(whole.shape[0], ROWS, -1)[:2] = pages.cpu()
        expected = singles[token].cpu().view(torch.uint8).reshape(-1)
        views = group.cache.views[0]
        rows = [read(view)[token // ROWS, 0, token % ROWS].copy() for view in views]
        whole.fill_(0)
        for view, row in zip(views, rows, strict=True):
            read(view)[token // ROWS, 0, token % ROWS] = row
        assert torch.equal(whole.view(torch.uint8).reshape(-1)[: len(expected)], expected)


def test_kernel_pages_and_padding_keep_their_planes():
    """vLLM's blocks of several kernel pages, and pages that lie beside others in a block."""
    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC):
        group, caches = registered(latent(132), layout, INDEXER)
        cache = caches[NAMES[1]]
        page = cache[2].reshape(-1)
        assert row_of(group.cache.views[1], 2, 5) == naive_row(page, 5, (128, 4))
    group, caches = registered(
        latent(132, block_size=2 * ROWS), backend=INDEXER, kernel_block_size=ROWS
    )
    assert (group.info.kernel_blocks, group.cache.geometry.block_size) == (2, ROWS)
    page = caches[NAMES[0]][3].reshape(-1)
    assert row_of(group.cache.views[0], 3, 63) == naive_row(page, 63, (128, 4))


def test_unwritten_rows_are_zero_in_every_plane():
    """A recycled block's scales may read as NaN, and kernels multiply the rows that they mask."""
    group, caches = registered(latent(132), backend=INDEXER)
    for cache in caches.values():
        cache.fill_(255)
    order = LoadRequest("r", ((0, 100),), (GroupBlocks.of([4, 2]),), (GroupBlocks.of([1, 2]),))
    clear_unwritten([group], order)
    for cache in caches.values():
        pages = cache.reshape(-1, ROWS * 132)
        for block, page in enumerate(pages):
            for row in range(ROWS):
                is_clear = block == 2 and row >= 36
                assert set(naive_row(page, row, (128, 4))) == ({0} if is_clear else {255})


@pytest.mark.parametrize(
    "spec, backend, text",
    [
        (latent(132), "SOME_NEW_INDEXER", "SOME_NEW_INDEXER"),
        (latent(100), INDEXER, "row_bytes=100"),
        (latent(512, state_content_bytes=352), "FLASHMLA_SPARSE", "row_bytes=352"),
        (latent(512, state_content_bytes=584), "FLASHMLA_SPARSE", "row_bytes=584"),
        (latent(576, torch.bfloat16), "DOTS3_NOTE_PADDED_MLA_SPARSE", "DOTS3"),
        # MiniMax-M3's K and V in head slots of their own: NVFP4, and ROCm's AITER
        (attention(num_head_slots=4), "MINIMAX_M3_SPARSE", "num_head_slots=4"),
        (attention(kv_quant_mode=kv.KVQuantMode.NVFP4), "CUTLASS_MSA", "kv_quant_mode='5'"),
    ],
)
def test_rows_that_nobody_has_read_are_refused_by_name(spec, backend, text):
    with pytest.raises(GeometryError, match=text):
        registered(spec, backend=backend)


def test_keys_whose_blocks_have_gaps_are_refused_by_the_kernel_that_misses_them():
    """MiniMax-M3's, in a layout that vLLM takes from VLLM_KV_CACHE_LAYOUT."""
    spec = latent(128, torch.bfloat16, block_size=128)
    with pytest.raises(GeometryError, match="MINIMAX_M3_SPARSE_INDEXER"):
        registered(spec, KVCacheLayout.BLHNC, "MINIMAX_M3_SPARSE_INDEXER")
    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        group, _ = registered(spec, layout, "MINIMAX_M3_SPARSE_INDEXER")
        assert group.cache.geometry.block_size == 128


def test_elements_in_an_order_of_their_own_are_refused():
    """As on ROCm: an indexer's tiles of 16 rows, and TurboQuant's scales behind all values of a block."""
    quantised = attention(dtype=torch.uint8, state_content_bytes=70)
    for spec, backend, layer in (
        (latent(132), INDEXER, {"uses_shuffled_layout": True}),
        (quantised, "TURBOQUANT", {"impl": type("Impl", (), {"_soa_store": True})()}),
    ):
        with pytest.raises(GeometryError, match="device-specific order"):
            registered(spec, backend=backend, layer=layer)


def test_kernel_pages_in_planes_are_not_joined():
    """With a turn of the interleave that is longer than a page."""
    shared = placed(1, world_size=2, rank=1, interleave_tokens=2 * ROWS)
    with pytest.raises(GeometryError, match="interleave"):
        registered(
            latent(132, block_size=2 * ROWS),
            KVCacheLayout.LBNHC,
            INDEXER,
            kernel_block_size=ROWS,
            tp_size=2,
            place=shared,
        )


@pytest.mark.parametrize("backend", sorted(DENSE))
def test_dense_latents_are_rows_of_any_width(backend):
    assert (
        planes_of(backend, 576, is_opaque=False) == planes_of(backend, 1152, is_opaque=False) == ()
    )
    group, caches = registered(latent(576), backend=backend)  # bytes, as of an fp8 cache
    assert np.array_equal(read(group.cache.views[0][0]), raw(caches[NAMES[0]]))
