"""Our views of SGLang's own pools, as it lists them for transfers, have the elements that its layers write."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvconnector.errors import GeometryError
from kvconnector.integrations.fp8_rules import every_number, rule_of
from kvconnector.integrations.sglang.caches import Heads, Shape, registered_groups
from kvconnector.integrations.sglang.numbers import numbers_of_pool
from kvconnector.topology.geometry import UNKNOWN_ROUNDING
from kvconnector_kernels.relayout import (
    Conversion,
    PagedSide,
    PartTable,
    relayout,
    upload_block_ids,
)
from tests.sglang.listed import hybrid_pool, listed

NO_KERNEL = "this release keeps these kernels elsewhere"
pytestmark = pytest.mark.sglang
SIZE, PAGE, HEADS, DIM = 32, 4, 2, 8
SHAPE = Shape(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    is_prefill=True,
    num_layers=4,
    kv_heads=HEADS,
    window_heads=HEADS,
    kv_layers=range(4),
    window_layers=(),
    has_latent=False,
    device="cpu",
    dtype="float32",
)


def _registered(pool, shape, draft=None, num_layers=4):
    """Return groups and their kinds, without the rows of metadata."""
    sizes = {"row_bytes": 8, "own_bytes": 8, "seed_bytes": 0}
    rows = SimpleNamespace(address=8, num_rows=1, lacks=(), **sizes)
    groups, kinds = registered_groups(listed(pool, PAGE, draft, num_layers), shape, rows)
    found = [each for each in zip(groups, kinds, strict=True) if each[1].kind != "row"]
    return [group for group, _ in found], [kind.kind for _, kind in found]


def _bytes_at(view, block, head, token):
    """Return the elements of one head of one token."""
    steps = zip((block, head, token), view.strides_bytes, strict=False)
    address = view.address + sum(index * stride for index, stride in steps)
    dim, size, stride = view.head_dim, view.item_size_bytes, view.strides_bytes[3]
    return b"".join(ctypes.string_at(address + i * stride, size) for i in range(dim))


def _fill(tensor):
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def _has(view, tensor, heads=HEADS):
    """Check that every head of every token of some pages is where the view says."""
    for block in (0, 1, SIZE // PAGE):
        for token in range(PAGE):
            for head in range(heads):
                row = tensor[block * PAGE + token].reshape(heads, -1)[head]
                assert _bytes_at(view, block, head, token) == row.numpy().tobytes()
    return True


def _attention(layers=4, **more):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(SIZE, PAGE, torch.float32, HEADS, DIM, layers, "cpu", False, **more)


def test_keys_and_values_of_another_head_dim_and_a_draft_model():
    pool, draft = _attention(v_head_dim=4), _attention(1, v_head_dim=4)
    for tensor in (*pool.k_buffer, *pool.v_buffer, *draft.k_buffer, *draft.v_buffer):
        _fill(tensor)
    (kv, drafted), kinds = _registered(pool, SHAPE, draft)
    layers = kv.geometry.layers, drafted.geometry.layers
    assert (kinds, layers) == (["kv", "kv"], ((0, 1, 2, 3), (4,)))
    for layer in range(4):
        assert _has(kv.views[layer][0], pool.k_buffer[layer])
        assert _has(kv.views[layer][1], pool.v_buffer[layer])
    assert _has(drafted.views[4][1], draft.v_buffer[0])
    assert drafted.geometry.parts[0].head_start == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e5m2"])
def test_a_conversion_has_the_bytes_that_a_pool_stores(element, device):
    """Of every number of bf16, as the K and the V of each head."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    numbers = every_number(torch.bfloat16, DIM)
    size = len(numbers) + PAGE  # page 0 is nobody's
    pool = MHATokenToKVPool(
        size, PAGE, getattr(torch, element), HEADS, DIM, 1, device, enable_memory_saver=False
    )
    name = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}[element]
    options = {"backends": ("torch_native",) * 2, "has_latent": False, "is_scaled": False}
    shape = replace(
        SHAPE,
        kv_layers=range(1),
        device=device,
        dtype=name,
        numbers=numbers_of_pool(name, device=device, **options),
    )
    (kv,), _ = _registered(pool, shape, num_layers=1)
    part = kv.geometry.parts[0]
    assert part.element == element
    if device == "cpu":  # a GPU's casts have changed from release to release
        assert part.rounding == "cast"
    assert kv.geometry.scales == (((1.0,), (1.0,)),)
    slots = torch.arange(PAGE, PAGE + len(numbers), device=device)
    both = [numbers.unsqueeze(1).repeat(1, HEADS, 1).to(device) for _ in "kv"]
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(slots), *both)
    stored = [
        buffer[0][slots].view(torch.uint8).transpose(0, 1).cpu().numpy()
        for buffer in (pool.k_buffer, pool.v_buffer)
    ]
    assert rule_of(stored, kv.geometry.scales[0], numbers, element) == part.rounding
    if device != "cpu" and part.rounding != UNKNOWN_ROUNDING:
        _check_converted_on_a_gpu(both[0], stored, part)


def _check_converted_on_a_gpu(numbers, stored, part):
    """Compare what a GPU makes of `[token, head, dim]` numbers by a rule with `[head, token, dim]` bytes of each part;
    of NaN, which has one form there, whatever its sign.
    """
    tokens, heads, dim = numbers.shape
    found = torch.zeros(tokens, heads, dim, dtype=torch.uint8, device=numbers.device)
    device = str(numbers.device)
    sides = []
    for memory in (numbers, found):
        item = memory.element_size()
        strides = (0, item * dim, item * heads * dim, item)
        sizes = {"num_blocks": 1, "block_size": tokens, "num_heads": heads, "head_dim": dim}
        rows = np.array([(memory.data_ptr(), *strides)], np.int64)
        table = PartTable(rows, **sizes, item_size_bytes=item, device=device)
        sides.append(PagedSide(table, upload_block_ids([0], num_blocks=1, device=device)))
    scales = np.ones((1, heads, 2), np.float32)
    conversion = Conversion("bfloat16", part.element, scales, device, rounding=part.rounding)
    relayout(*sides, conversion=conversion, num_parts=1, num_heads=heads, num_tokens=tokens)
    is_nan = numbers.isnan().transpose(0, 1).cpu().numpy()
    ours = found.transpose(0, 1).cpu().numpy()
    for theirs in stored:
        assert np.array_equal(ours[~is_nan], theirs[~is_nan])
        assert np.array_equal(ours[is_nan] | 0x80, theirs[is_nan] | 0x80)


def test_latents():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = MLATokenToKVPool(SIZE, PAGE, torch.float32, 16, 8, 4, "cpu", False)
    for tensor in pool.kv_buffer:
        _fill(tensor)
    shape = replace(SHAPE, kv_heads=1, has_latent=True)
    (kv,), _ = _registered(pool, shape)
    assert all(_has(kv.views[layer][0], pool.kv_buffer[layer], 1) for layer in range(4))


def test_windows():
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(SIZE, SIZE, PAGE, torch.float32, HEADS, DIM, [1, 3], [0, 2], "cpu")
    for tensor in (*pool.swa_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer):
        _fill(tensor)
    shape = replace(SHAPE, kv_layers=(0, 2), window_layers=(1, 3))
    (kv, windows), kinds = _registered(pool, shape)
    assert kinds == ["kv", "swa"]
    assert _has(kv.views[2][1], pool.full_kv_pool.v_buffer[1])
    assert _has(windows.views[3][0], pool.swa_kv_pool.k_buffer[1])


def _hybrid(groups, tp_size=1, **more):
    shape = {"size": SIZE, "heads": HEADS, "dim": DIM, "attention_layers": [1, 3]}
    return hybrid_pool(PAGE, "cpu", groups=groups, tp_size=tp_size, **shape, **more)


def test_states_in_the_order_of_amx_are_not_cut():
    """Their convolutions, by SGLang's own function, have a slot's channels innermost."""
    from sglang.srt.layers.amx_utils import _init_amx_conv_state

    pool = _hybrid([8, 8, 16], tp_size=2)
    conv = pool.mamba_pool.mamba_cache.conv
    conv[:] = _init_amx_conv_state(conv)
    assert conv[0].stride(2) == 1
    shape = replace(SHAPE, kv_layers=(), kv_heads=4, tp_size=2, is_transposed=True)
    (_, states), _ = _registered(pool, shape)
    assert [part.total_heads for part in states.geometry.parts] == [2, 2]


def test_states_that_only_some_layers_have_are_refused():
    from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

    options = {"size": 4, "device": "cpu"}
    beside = [
        NGramPool(context_len=3, eos_token_id=1, **options),
        ShortConvPool(layer_ids=[0], state_shape=(8, 3), dtype=torch.bfloat16, **options),
    ]
    for each in beside:
        pool = _hybrid([8, 8, 16])
        pool.mamba_pool._slot_siblings = [each]
        with pytest.raises(GeometryError, match="n-grams"):
            _registered(pool, replace(SHAPE, kv_layers=()))


@pytest.mark.parametrize("is_spec", [False, True])
def test_replays_of_recurrent_states_are_not_listed(is_spec):
    """What `--enable-linear-replayssm-spec` keeps beside them is scratch, which begins empty in each request's slot."""
    plain = _hybrid([8, 8, 16]).mamba_pool
    pool = _hybrid([8, 8, 16], enable_linear_replayssm_spec=is_spec).mamba_pool
    assert (pool.mamba_cache.replayssm_k is not None) == is_spec
    assert pool.get_state_layer_ids() == plain.get_state_layer_ids()
    assert pool.get_contiguous_buf_infos()[2] == plain.get_contiguous_buf_infos()[2]


def test_recurrent_states_cut_channel_by_channel_and_head_by_head():
    pool = _hybrid([8, 8, 16])
    conv, temporal = pool.mamba_pool.mamba_cache.conv[0], pool.mamba_pool.mamba_cache.temporal
    _fill(conv), _fill(temporal)
    (kv, states), kinds = _registered(pool, replace(SHAPE, kv_layers=()))
    assert (kinds, kv.geometry.layers, states.geometry.layers) == (["kv", "mamba"], (1, 3), (0, 2))
    parts = states.geometry.parts
    assert [part.total_heads for part in parts] == [8, 8, 16, 4]
    query, key, value, heads = states.views[2]
    for view, first in ((query, 0), (key, 8), (value, 16)):
        expected = conv[1, 3, first + 5].contiguous().view(torch.uint8).numpy().tobytes()
        assert _bytes_at(view, 3, 5, 0) == expected
    assert _bytes_at(heads, 3, 2, 0) == temporal[1, 3, 2].numpy().tobytes()


def test_states_of_unknown_parts_match_only_the_same_parallelism():
    (_, states), _ = _registered(_hybrid(None), replace(SHAPE, kv_layers=()))
    shape = replace(SHAPE, kv_layers=(), tp_size=2, tp_rank=1)
    (_, cut), _ = _registered(_hybrid(None, 2), shape)
    assert {part.total_heads for part in states.geometry.parts} == {1}
    assert {(part.head_start, part.total_heads) for part in cut.geometry.parts} == {(1, 2)}


@pytest.mark.parametrize("is_single", [False, True], ids=["groups", "one group"])
def test_a_mamba_2_convolution_is_x_and_b_and_c_each_split_by_itself(is_single):
    group = Heads(4, range(4)) if is_single else Heads(8, range(4, 8))
    conv_heads = [Heads(16, range(8, 16)), group, group]
    shape = replace(SHAPE, kv_layers=(), tp_size=2, tp_rank=1, conv_heads=conv_heads)
    (_, states), _ = _registered(_hybrid(None, 2), shape)
    *conv, temporal = states.geometry.parts
    held = [(part.head_start, part.head_stop, part.total_heads) for part in conv]
    group = (group.held.start, group.held.stop, group.total)
    assert held == [(8, 16, 16), group, group]
    assert (temporal.head_start, temporal.total_heads) == (2, 4)
    first, second, _, _ = states.views[0]
    assert second.address - first.address == 8 * 3 * 2


def test_a_pool_of_other_layers_is_refused():
    with pytest.raises(GeometryError, match="the number of buffers"):
        _registered(_attention(3), SHAPE)


SPARSE = replace(SHAPE, num_layers=3, kv_layers=range(3), kv_heads=1, has_latent=True)


def _on_a_cpu(page_size):
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args(device="cpu", page_size=page_size)


def _sparse(pool, page_size):
    sizes = {"row_bytes": 8, "own_bytes": 8, "seed_bytes": 0}
    rows = SimpleNamespace(address=8, num_rows=1, lacks=(), **sizes)
    args = listed(pool, page_size, num_layers=3)
    (*groups, _), kinds = registered_groups(args, SPARSE, rows)
    return {kind.kind: group for kind, group in zip(kinds, groups, strict=False)}


def test_an_indexers_planes_are_where_sglangs_kernel_stores_them():
    pytest.importorskip("sglang.kernels.ops.kvcache.dsa_index_k_cache", reason=NO_KERNEL)
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import SetKAndS
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    _on_a_cpu(64).install()
    pool = DSATokenToKVPool(
        256,
        64,
        512,
        torch.uint8,
        64,
        3,
        "cpu",
        128,
        False,
        656,
        skip_topk_layers=[False, True, False],
    )
    groups = _sparse(pool, 64)
    assert [groups[kind].geometry.layers for kind in ("kv", "dsa")] == [(0, 1, 2), (0, 2)]
    slots = torch.tensor([64 + 37, 128 + 63])
    keys = torch.randint(0, 120, (2, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(2)
    SetKAndS.execute(
        pool=pool,
        buf=pool.index_k_with_scale_buffer[2],
        loc=slots,
        index_k=keys,
        index_k_scale=scales,
    )
    values, factors = groups["dsa"].views[2]
    for at, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, 64)
        assert _bytes_at(values, block, 0, token) == keys[at].view(torch.uint8).numpy().tobytes()
        assert _bytes_at(factors, block, 0, token) == scales[at].numpy().tobytes()


def test_compressed_rows_and_states_are_where_sglang_stores_them():
    pytest.importorskip("sglang.kernels.ops.kvcache.dsv4_main_kv_store", reason=NO_KERNEL)
    from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    _on_a_cpu(256).install()
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=1024,
        c4_size=256,
        c128_size=8,
        c4_state_pool_size=64,
        c128_state_pool_size=512,
        page_size=256,
        swa_page_size=256,
        dtype=torch.uint8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0, 4, 128],
    )
    groups = _sparse(pool, 256)
    assert [*groups] == ["c4", "c128", "swa", "c4-state", "c128-state"]
    stored = {
        "swa": (pool.swa_kv_pool, 0, 1, 256),
        "c4": (pool.kv_pools[4], 0, 1, 64),
        "c128": (pool.kv_pools[128], 0, 2, 2),
    }
    for kind, (own, index, layer, rows) in stored.items():
        slots = torch.tensor([rows + rows // 2, rows - 1])
        nope = torch.randint(0, 120, (2, 448), dtype=torch.uint8).view(torch.float8_e4m3fn)
        rope, scales = (
            torch.rand(2, 64).bfloat16(),
            torch.randint(0, 255, (2, 7), dtype=torch.uint8),
        )
        at_layer = layer if kind == "swa" else index
        own.set_key_buffer(at_layer, slots, NopeFp8RopeBf16Pack(nope, rope, scales))
        values, factors = groups[kind].views[layer][:2]
        for at, slot in enumerate(slots.tolist()):
            block, row = divmod(slot, rows)
            expected = (
                nope[at].view(torch.uint8).numpy().tobytes()
                + rope[at].view(torch.uint8).numpy().tobytes()
            )
            assert _bytes_at(values, block, 0, row) == expected
            assert _bytes_at(factors, block, 0, row)[:7] == scales[at].numpy().tobytes()
    slots = torch.tensor([64 + 37, 63])
    keys = torch.randint(0, 120, (2, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(2)
    pool.c4_indexer_kv_pool.set_index_k_scale_buffer(0, slots, keys, scales)
    # those of the layer with rows of 4 follow its latents, whose planes are two
    values, factors = groups["c4"].views[1][2:]
    for at, slot in enumerate(slots.tolist()):
        block, row = divmod(slot, 64)
        assert _bytes_at(values, block, 0, row) == keys[at].view(torch.uint8).numpy().tobytes()
        assert _bytes_at(factors, block, 0, row) == scales[at].numpy().tobytes()
    for states, kind, part in (
        (pool.compress_state_pools[1], "c4-state", 0),
        (pool.indexer_compress_state_pools[1], "c4-state", 1),
        (pool.compress_state_pools[2], "c128-state", 0),
    ):
        tensor = states.kv_score_buffer.kv_score
        _fill(tensor)
        group = groups[kind]
        view, size = group.views[1 + (kind == "c128-state")][part], group.geometry.block_size
        for slot in (0, 13, len(tensor) // size * size - 1):
            expected = tensor[slot].numpy().tobytes()
            assert _bytes_at(view, slot // size, 0, slot % size) == expected
