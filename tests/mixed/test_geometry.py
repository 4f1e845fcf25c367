"""What the integrations of vLLM and of SGLang state of one model's caches fits together."""

import pytest
import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.integrations.sglang.caches import registered_groups
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.topology import (
    EngineGeometry,
    ModelDescription,
    RankGeometry,
    TpKVTopology,
)
from kvconnector.topology.geometry import agreed_values
from tests.mixed.pure.engines import NamedPools
from tests.sglang.pure.pools import Model
from tests.vllm.cache_world import attention, placed, registered

pytestmark = pytest.mark.vllm

LAYERS, HEAD_DIM = 3, 32
MODEL = ModelDescription(model="m", dtype="float32", num_layers=LAYERS)
LAYOUTS = {
    "HND": (KVCacheLayout.LBHNC, "FLASH_ATTN"),
    "NHD": (KVCacheLayout.LBNHC, "FLASHINFER"),
    "on CPUs": (KVCacheLayout.LBHNC, "CPU_ATTN"),
}
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2)]


class WidePools(NamedPools):
    """Pools with heads as wide as vLLM's CPU code needs them."""

    head_dim = HEAD_DIM


def _engine(name, ranks, num_optional=0):
    return EngineGeometry(
        engine_id=name,
        tp_size=len(ranks),
        pp_size=1,
        model=MODEL,
        ranks=tuple(
            RankGeometry(pp_rank=0, tp_rank=number, groups=tuple(groups))
            for number, groups in enumerate(ranks)
        ),
        num_optional=num_optional,
    )


def _of_vllm(model, tp_size, layout="HND", block=32):
    layout, backend = LAYOUTS[layout]
    if backend == "CPU_ATTN" and not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this release has no kernels for CPUs")
    if model.latent:
        options = {"num_kv_heads": 1, "head_size": HEAD_DIM, "head_size_v": 0, "block_size": block}
        spec, backend = attention(kv.MLAAttentionSpec, **options), "FLASHMLA"
    else:
        heads = max(1, model.heads // tp_size)
        spec = attention(num_kv_heads=heads, head_size=HEAD_DIM, block_size=block)
    found = []
    for rank in range(tp_size):
        options = {"place": placed(rank), "tp_size": tp_size, "total_kv_heads": model.heads}
        group, _ = registered(spec, layout, backend, isa="vec", **options)
        found.append([group.cache.geometry])
    return _engine("vllm", found)


def _of_sglang(model, tp_size, page_size=4, *, is_prefill=False):
    found = []
    for rank in range(tp_size):
        options = {"tp_size": tp_size, "pp_size": 1, "page_size": page_size}
        pools = WidePools(model, rank=(0, rank), is_prefill=is_prefill, **options)
        groups, kinds = registered_groups(pools.args, pools.shape, MetadataRows(pools.args, "cpu"))
        found.append([group.geometry for group in groups])
    optional = sum(kind.is_draft or kind.kind == "row" for kind in kinds)
    return _engine("sglang", found, optional)


MODELS = {
    "MHA": Model(layers=LAYERS, heads=8),
    "GQA": Model(layers=LAYERS, heads=2),
    "MQA": Model(layers=LAYERS, heads=1),
    "MLA": Model(layers=LAYERS, latent=True),
    "a draft model in SGLang": Model(layers=LAYERS, heads=2, draft=1),
}


@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("model", [*MODELS.values()], ids=[*MODELS])
def test_both_state_the_same_of_a_model_and_each_reads_the_other(model, sizes, layout):
    vllm, sglang = _of_vllm(model, sizes[0], layout), _of_sglang(model, sizes[1])
    assert agreed_values(vllm, 1) == agreed_values(sglang, 1)
    for reader, read in ((vllm, sglang), (sglang, vllm)):
        for rank in reader.ranks:
            topology = TpKVTopology(reader, rank.rank)
            topology.check_compatible(read)
            segments = [s for each in topology.get_target_remote_ranks(read) for s in each.segments]
            heads = {head for each in segments for head in range(each.head_start, each.head_stop)}
            assert {each.group for each in segments} == {0}
            assert heads == {*rank.groups[0].families[0].head_range}
            assert {layer for each in segments for layer in each.layers} == {*range(LAYERS)}


def test_windows_of_one_engine_are_no_metadata_of_the_other():
    """Of vLLM the second group is one of caches, of SGLang one of metadata: this must not pass for the same."""
    plain = _of_sglang(Model(layers=LAYERS, heads=2), 1)
    (groups,) = (rank.groups for rank in _of_vllm(Model(layers=LAYERS, heads=2), 1).ranks)
    hybrid = _engine("vllm", [[*groups, *groups]])
    for ours, theirs in ((plain, hybrid), (hybrid, plain)):
        with pytest.raises(IncompatiblePeerError, match="layers_1"):
            TpKVTopology(ours, Rank(0, 0)).check_compatible(theirs)


def test_another_element_size_is_refused_by_name():
    spec = attention(num_kv_heads=2, head_size=HEAD_DIM, dtype=torch.bfloat16)
    group, _ = registered(spec, total_kv_heads=2)
    half = _engine("vllm", [[group.cache.geometry]])
    with pytest.raises(IncompatiblePeerError, match="item_size_bytes"):
        TpKVTopology(_of_sglang(MODELS["GQA"], 1), Rank(0, 0)).check_compatible(half)
