from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.cache.slot_mapping import BlockGeometry, naive_slot
from kvconnector.integrations.vllm.blocks import unwritten_slots
from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.integrations.vllm.messages import ConnectorStep, GroupInfo
from kvconnector.integrations.vllm.unwritten import clear_unwritten, slots_of
from kvconnector.layout import ContextParallel
from kvconnector.planning import GroupBlocks
from kvconnector.runtime import StepMetadata
from kvconnector.session.orders import LoadRequest
from kvconnector.topology import GroupGeometry, PartGeometry
from tests.vllm.cache_world import (
    NAMES,
    SIZE,
    attention,
    one_group,
    placed,
    registered,
    vllm_config,
)
from tests.vllm.test_worker_half import TakingWorker, worker_half

pytestmark = pytest.mark.vllm

LBNHC = KVCacheLayout.LBNHC
LAYOUTS = (KVCacheLayout.LBHNC, LBNHC, KVCacheLayout.BLHNC)


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
def test_the_rest_of_the_blocks_is_unwritten(
    *, turns, interleave, ratio, ranks, start, length, data
):
    rank, size = data.draw(st.integers(0, ranks - 1)), turns * interleave
    shared = ContextParallel(world_size=ranks, rank=rank, interleave_tokens=interleave)
    blocks = BlockGeometry(block_size=size * ratio, kernel_block_size=size, context_parallel=shared)
    tokens = range(start, start + length)
    touched = {token // blocks.virtual_block_tokens for token in tokens}
    rest = {block * size * ratio + slot for block in touched for slot in range(size * ratio)}
    # a request whose blocks have ascending numbers has its tokens in these slots
    rest -= {naive_slot(range(99), token, blocks) for token in tokens}
    group = geometry(size, dcp_size=ranks, dcp_rank=rank, interleave_tokens=interleave)
    info = GroupInfo(vllm_group=0, kernel_blocks=ratio)
    found = [
        index * size + slot
        for index, first, last in unwritten_slots(info, group, (start, start + length))
        for slot in range(first, last)
    ]
    assert sorted(found) == sorted(rest)


def test_states_have_no_unwritten_slots():
    info = GroupInfo(vllm_group=0, kernel_blocks=1, keeps="state")
    assert unwritten_slots(info, geometry(1), (99, 100)) == []


def load(ids, tokens, first=0):
    return LoadRequest("r", (tokens,), (GroupBlocks.of(ids, first),), (GroupBlocks.of([1]),))


def made_of_nan(spec, **engine):
    group, caches = registered(spec, **engine)
    for cache in caches.values():
        cache.fill_(float("nan"))
    return group, caches


LATENT = attention(MLAAttentionSpec, num_kv_heads=1, head_size=16, block_size=2 * SIZE)
# this rank has the second half of each 4 x SIZE tokens
SHARED = placed(1, world_size=2, rank=1, interleave_tokens=2 * SIZE)
SECOND = {"tp_size": 2, "place": SHARED}
AROUND = ([4, 2, 3], (5, SIZE + 3)), {4: range(5), 2: range(3, SIZE)}
CASES = {
    **{layout.name: (attention(), {"layout": layout}, *AROUND) for layout in LAYOUTS},
    "CPU": (
        attention(),
        {"backend": "CPU_ATTN", "isa": "vec"},
        ([1], (2 * SIZE, 2 * SIZE + 7), 2),
        {1: range(7, SIZE)},
    ),
    "kernel blocks": (
        attention(block_size=2 * SIZE),
        {"backend": "FLASHINFER", "kernel_block_size": SIZE},
        ([6, 7], (0, SIZE)),
        {7: range(SIZE)},
    ),
    # up to SIZE + 5 of its own in the second block, the joined one of kernel blocks 4 and 5
    "joined kernel blocks": (
        LATENT,
        {"backend": "FLASHMLA", "layout": LBNHC, "kernel_block_size": SIZE, **SECOND},
        ([4, 2], (0, 7 * SIZE + 5)),
        {2: range(SIZE + 5, 2 * SIZE)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_slots_around_a_load_are_zero(name):
    """Every element of them in every layer, and nothing else."""
    spec, engine, order, expected = CASES[name]
    if name == "CPU":
        current_platform.import_kernels()
        if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
            pytest.skip("this vLLM is its Python sources alone, without the CPU's kernels")
    group, caches = made_of_nan(spec, **engine)
    clear_unwritten([group], load(*order))
    for number, layer in enumerate(NAMES):
        parts = [slots_of(group.tensors[layer], view) for view in group.cache.views[number]]
        zero = torch.cat([part.flatten(3) == 0 for part in parts], dim=3)  # [B, H, N, parts x D]
        found = {tuple(place) for place in zero.all(dim=(1, 3)).nonzero().tolist()}
        assert found == {(block, slot) for block, slots in expected.items() for slot in slots}
        assert int((caches[layer] == 0).sum()) == len(found) * zero[0, :, 0].numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_a_layer_that_the_other_engine_may_lack_are_zero(layout, device):
    """All blocks of the load's tokens, in this layer alone."""
    config, caches = one_group(attention(), layout, device=device)
    engine = vllm_config("FLASHINFER")
    engine.speculative_config = SimpleNamespace(draft_model_config=None)
    engine.model_config.get_total_num_hidden_layers = lambda: len(NAMES) - 1
    (group,) = register_groups(engine, config, caches, placed())
    assert group.cache.geometry.optional_layers == (len(NAMES) - 1,)
    for cache in caches.values():
        cache.fill_(float("nan"))
    clear_unwritten([group], load([2, 3, 1], (SIZE, 3 * SIZE)))
    for layer in NAMES:
        zero = (caches[layer] == 0).flatten(1).all(dim=1).nonzero().flatten().tolist()
        assert zero == ([1, 3] if layer == NAMES[-1] else [])


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_worker_clears_the_same_slots_as_vllm(is_needed):
    group, caches = made_of_nan(attention())
    half = worker_half(TakingWorker(), is_clearing=is_needed)
    half._groups = [group]
    half.start_step(ConnectorStep.of(StepMetadata(orders=(load([1], (0, 3)),))))
    assert bool((caches[NAMES[0]][1] == 0).any()) == is_needed
