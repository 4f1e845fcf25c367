import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.cache.slot_mapping import BlockGeometry, naive_slot
from kvconnector.integrations.vllm.blocks import unwritten_slots
from kvconnector.integrations.vllm.messages import ConnectorStep, GroupInfo
from kvconnector.integrations.vllm.unwritten import clear_unwritten, slots_of
from kvconnector.layout import ContextParallel
from kvconnector.planning import GroupBlocks
from kvconnector.runtime import StepMetadata
from kvconnector.session.orders import LoadRequest
from kvconnector.topology import GroupGeometry, PartGeometry
from tests.vllm.cache_world import BLOCKS, DIM, NAMES, SIZE, attention, placed, registered
from tests.vllm.test_worker_half import TakingWorker, worker_half

pytestmark = pytest.mark.vllm


def geometry(block_size, **shared):
    part = PartGeometry(
        name="latent", total_heads=1, head_start=0, head_stop=1, head_dim=1, item_size_bytes=1
    )
    return GroupGeometry(block_size=block_size, layers=(0,), parts=(part,), **shared)


@given(
    turns=st.integers(1, 3),
    interleave=st.integers(1, 3),
    ratio=st.integers(1, 3),
    ranks=st.integers(1, 3),
    start=st.integers(0, 30),
    length=st.integers(0, 30),
    data=st.data(),
)
def test_what_is_unwritten_is_the_rest_of_the_blocks(
    *, turns, interleave, ratio, ranks, start, length, data
):
    rank, size = data.draw(st.integers(0, ranks - 1)), turns * interleave
    shared = ContextParallel(world_size=ranks, rank=rank, interleave_tokens=interleave)
    blocks = BlockGeometry(block_size=size * ratio, kernel_block_size=size, context_parallel=shared)
    tokens = range(start, start + length)
    touched = {token // blocks.virtual_block_tokens for token in tokens}
    rest = {block * size * ratio + slot for block in touched for slot in range(size * ratio)}
    # a request whose blocks are numbered as they come has its tokens in these slots
    rest -= {naive_slot(range(99), token, blocks) for token in tokens}
    group = geometry(size, dcp_size=ranks, dcp_rank=rank, interleave_tokens=interleave)
    info = GroupInfo(vllm_group=0, kernel_blocks=ratio)
    found = [
        index * size + slot
        for index, first, last in unwritten_slots(info, group, (start, start + length))
        for slot in range(first, last)
    ]
    assert sorted(found) == sorted(rest)


def test_a_state_has_nothing_unwritten():
    info = GroupInfo(vllm_group=0, kernel_blocks=1, keeps="state")
    assert unwritten_slots(info, geometry(1), (99, 100)) == []


def load(ids, tokens, first=0):
    return LoadRequest("r", (tokens,), (GroupBlocks.of(ids, first),), (GroupBlocks.of([1]),))


def made_of_nan(spec, layout=KVCacheLayout.LBHNC, backend="FLASH_ATTN", **engine):
    group, caches = registered(spec, layout, backend, **engine)
    for cache in caches.values():
        cache.fill_(float("nan"))
    return group, caches


def is_zero(group, number, block):
    """`[part, head, token, dim]`, True where an element of a layer's block is zero."""
    tensor = group.tensors[NAMES[number]]
    parts = [slots_of(tensor, view)[block] for view in group.cache.views[number]]
    return torch.stack(parts) == 0


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC])
def test_slots_around_a_load_are_zero_in_every_layout(layout):
    group, caches = made_of_nan(attention(), layout)
    clear_unwritten([group], load([4, 2, 3], (5, SIZE + 3)))
    for number, name in enumerate(NAMES):
        assert is_zero(group, number, 4)[:, :, :5].all()
        assert is_zero(group, number, 2)[:, :, 3:].all()
        # each token has K and V
        cleared = (caches[name] == 0).sum(dim=(1, 3)) / (caches[name].shape[1] * 2 * DIM)
        assert cleared.count_nonzero() == 5 + SIZE - 3


def test_slots_around_a_load_are_zero_where_the_cpu_attention_keeps_them():
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is its Python sources alone, without the CPU's kernels")
    group, caches = made_of_nan(attention(), backend="CPU_ATTN", isa="vec")
    clear_unwritten([group], load([1], (2 * SIZE, 2 * SIZE + 7), first=2))
    zero = is_zero(group, 0, 1)
    assert zero[:, :, 7:].all()
    assert not zero[:, :, :7].any()
    assert not (caches[NAMES[0]][[0, 2, 3, 4]] == 0).any()


def test_the_other_kernel_blocks_of_a_block_are_zero():
    spec = attention(block_size=2 * SIZE)
    group, caches = made_of_nan(spec, backend="FLASHINFER", kernel_block_size=SIZE)
    clear_unwritten([group], load([6, 7], (0, SIZE)))
    assert (caches[NAMES[0]][7] == 0).all()
    assert not (caches[NAMES[0]][6] == 0).any()
    assert len(caches[NAMES[0]]) == 2 * BLOCKS


def test_slots_around_a_load_are_zero_in_joined_kernel_blocks():
    spec = attention(MLAAttentionSpec, num_kv_heads=1, head_size=16, block_size=2 * SIZE)
    place = placed(1, world_size=2, rank=1, interleave_tokens=2 * SIZE)
    engine = {"kernel_block_size": SIZE, "tp_size": 2, "place": place}
    group, caches = made_of_nan(spec, KVCacheLayout.LBNHC, "FLASHMLA", **engine)
    # this rank has the second half of each 4 x SIZE tokens: here up to SIZE + 5 of its own in the second block
    clear_unwritten([group], load([4, 2], (0, 7 * SIZE + 5)))
    cleared = (caches[NAMES[0]] == 0).all(dim=(1, 3))
    assert not cleared[[8, 9, 4]].any()
    assert cleared[5].tolist() == [False] * 5 + [True] * (SIZE - 5)
    assert int(cleared.sum()) == SIZE - 5


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_worker_clears_where_vllm_would(is_needed):
    group, caches = made_of_nan(attention())
    half = worker_half(TakingWorker(), is_clearing=is_needed)
    half._groups = [group]
    half.start_step(ConnectorStep.of(StepMetadata(orders=(load([1], (0, 3)),))))
    assert bool((caches[NAMES[0]][1] == 0).any()) == is_needed
