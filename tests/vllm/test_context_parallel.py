"""Ranks that share a request's tokens, in vLLM's own terms."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.placement import Placement
from tests.vllm.cache_world import SIZE, attention, placed, registered
from tests.vllm.harness.model import make_model
from tests.vllm.scheduler_world import state_spec
from tests.vllm.shared_tokens import Shape, check_read, engines, until

pytestmark = pytest.mark.vllm
SHARED = placed(0, world_size=2, rank=0, interleave_tokens=2 * SIZE)
WINDOW = attention(SlidingWindowSpec, sliding_window=48)


def vllm_placements(monkeypatch, tp_size, pp_size, pcp_size, dcp_size):
    """Return the place of every worker in the groups that vLLM makes."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        prefill_context_parallel_size=pcp_size,
        decode_context_parallel_size=dcp_size,
        cp_kv_cache_interleave_size=4,
        distributed_executor_backend="mp",
    )
    with monkeypatch.context() as patch:
        return [_placement_of(patch, parallel, rank) for rank in range(parallel.world_size)]


def _placement_of(patch, parallel, rank):
    def group(group_ranks, *others, **options):
        (mine,) = (ranks for ranks in group_ranks if rank in ranks)
        return SimpleNamespace(rank_in_group=mine.index(rank), world_size=len(mine))

    for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        patch.setattr(parallel_state, name, None)
    config = SimpleNamespace(parallel_config=parallel, model_config=None, engram_config=None)
    patch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    patch.setattr(parallel_state, "init_model_parallel_group", group)
    patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
    patch.setattr(torch.distributed, "is_initialized", lambda: True)
    patch.setattr(torch.distributed, "get_world_size", lambda: parallel.world_size)
    patch.setattr(torch.distributed, "get_rank", lambda: rank)
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        backend="gloo",
    )
    return Placement.here(parallel)


@pytest.mark.parametrize(
    "tp_size,pp_size,pcp_size,dcp_size",
    [(4, 1, 1, 2), (4, 2, 1, 4), (2, 1, 2, 2), (2, 1, 2, 4), (1, 2, 4, 4)],
)
def test_every_token_of_a_head_is_on_one_rank_of_each_group(
    monkeypatch, tp_size, pp_size, pcp_size, dcp_size
):
    found = vllm_placements(monkeypatch, tp_size, pp_size, pcp_size, dcp_size)
    ranks = sorted((place.rank.pp_rank, place.rank.tp_rank) for place in found)
    assert ranks == [
        (stage, index) for stage in range(pp_size) for index in range(tp_size * pcp_size)
    ]
    for stage in range(pp_size):
        shares = [p.context_parallel for p in found if p.rank.pp_rank == stage]
        assert {share.rank for share in shares} == set(range(dcp_size))
        assert {(share.world_size, share.interleave_tokens) for share in shares} == {(dcp_size, 4)}
    if pcp_size == 1:
        # ranks of one group are neighbours, which is how heads are replicated
        assert all(p.context_parallel.rank == p.tp_rank % dcp_size for p in found)


def test_ranks_of_prefill_context_parallelism_alone_are_copies_of_the_first(monkeypatch):
    found = vllm_placements(monkeypatch, 2, 1, 2, 1)
    assert [p.is_replica for p in found] == [False, False, True, True]
    assert [p.rank.tp_rank for p in found if not p.is_replica] == [0, 1]
    assert {p.context_parallel.world_size for p in found} == {1}


@pytest.mark.parametrize("kind", ["window", "state"])
def test_a_group_that_vllm_keeps_whole_on_every_rank_is_not_shared(kind):
    """A window by its own word, and states like Kimi K3's, beside whose latents are shared ones."""
    window = replace(WINDOW, dcp_sharded=False), KVCacheLayout.LBNHC
    spec, layout = window if kind == "window" else (state_spec(), KVCacheLayout.LBHNC)
    group, _ = registered(spec, layout, tp_size=2, place=SHARED)
    assert group.cache.geometry.dcp_size == 1
    latents = attention(MLAAttentionSpec, num_kv_heads=1, block_size=2 * SIZE)
    group, _ = registered(latents, layout, "FLASH_ATTN_MLA", tp_size=2, place=SHARED)
    assert group.cache.geometry.dcp_size == 2


@pytest.mark.parametrize(
    "spec,kernel_block_size,text",
    [
        (WINDOW, None, "groups that keep all tokens.*window"),
        (attention(block_size=2 * SIZE), SIZE, "cp-kv-cache-interleave-size"),
    ],
)
def test_windows_and_kernel_blocks_that_cannot_be_shared_are_refused(spec, kernel_block_size, text):
    engine = {"tp_size": 2, "total_kv_heads": 4, "place": SHARED}
    with pytest.raises(GeometryError, match=text):
        registered(spec, kernel_block_size=kernel_block_size, **engine)


GQA = {"tp_size": 4, "kv_heads": 2}
CASES = {
    "one to two": (Shape(), Shape(tp_size=2, dcp_size=2, interleave_tokens=4)),
    "two to one": (Shape(tp_size=2, dcp_size=2), Shape(block_size=8)),
    "two to four": (
        Shape(tp_size=2, dcp_size=2, interleave_tokens=16),
        Shape(tp_size=4, dcp_size=4, interleave_tokens=2, block_size=8),
    ),
    "two of four to two": (
        Shape(tp_size=4, dcp_size=2, interleave_tokens=8, block_size=24),
        Shape(tp_size=2, dcp_size=2),
    ),
    "heads": (
        Shape(**GQA, dcp_size=2, interleave_tokens=4),
        Shape(tp_size=1, kv_heads=2, block_size=32),
    ),
    "to heads": (Shape(tp_size=2, kv_heads=2), Shape(**GQA, dcp_size=2, interleave_tokens=16)),
    "kernel blocks": (
        Shape(**GQA, dcp_size=2, interleave_tokens=4, block_size=32, kernel_block_size=8),
        # shorter than the interleave: they are joined
        Shape(
            **GQA,
            dcp_size=2,
            interleave_tokens=32,
            block_size=32,
            kernel_block_size=16,
            layout=KVCacheLayout.LBNHC,
        ),
    ),
    "prefill context parallel": (Shape(tp_size=2, pcp_size=2), Shape(tp_size=2, dcp_size=2)),
    "both kinds": (
        Shape(tp_size=2, pcp_size=2, dcp_size=4, interleave_tokens=4),
        Shape(pcp_size=2, dcp_size=2, interleave_tokens=8),
    ),
}


@pytest.mark.ucx
@pytest.mark.parametrize("name", CASES)
def test_tokens_arrive_in_the_slots_that_vllm_reads(tmp_path_factory, name):
    """Tokens also arrive after a prefix hit. Except for the model all is vLLM's: scheduling, blocks, tensors, slots."""
    prefill, decode = CASES[name]
    virtual_block = decode.block_size * decode.dcp_size
    # vLLM lets ranks share the tokens of a head that they would otherwise hold twice
    folder = tmp_path_factory.getbasetemp()
    model = make_model(folder / "models", kv_heads=max(prefill.kv_heads, 1))
    with engines(str(model), prefill, decode) as (producer, consumer):
        for num_tokens, num_known in ((75, 0), (101, 75 // virtual_block * virtual_block)):
            check_read(producer, consumer, 1, num_tokens)
            assert consumer.loads.pop().token_ranges == ((num_known, num_tokens),)
            owned = set().union(*(rank.own_tokens(num_tokens) for rank in consumer.ranks))
            assert owned == set(range(num_tokens))
        until(lambda: producer.world.used_blocks == 0, consumer, producer)
