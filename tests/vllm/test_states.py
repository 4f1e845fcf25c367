"""Recurrent states between engines that differ: in the number of tokens that they draft, and in how many ranks share a
group of Mamba's heads.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
    causal_conv1d_fn,
    causal_conv1d_update,
)
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvconnector.errors import GeometryError
from kvconnector.ids import Rank
from kvconnector.integrations.vllm.caches import register_groups
from kvconnector.integrations.vllm.placement import Placement
from kvconnector.topology import EngineGeometry, ModelDescription, RankGeometry, TpKVTopology
from tests.vllm.cache_world import read, vllm_config

pytestmark = pytest.mark.vllm

LAYER, BLOCKS, TAPS = "model.layers.0.mixer", 3, 4
HEADS, DIM, STATE = 8, 2, 4
"""Of the whole model: heads, channels of a head, and elements of a state per channel."""
INNER = HEADS * DIM
JUNK = 77


class StateLayer(SimpleNamespace):
    """What registration asks of a recurrent layer of vLLM."""

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: self.kind)


def shapes_of(kind, groups, tp_size, num_drafts):
    if kind == "MAMBA2":
        return mamba_utils.MambaStateShapeCalculator.mamba2_state_shape(
            tp_size, INNER, groups, HEADS, DIM, STATE, TAPS, num_drafts
        )
    return mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp_size, groups, HEADS, STATE, DIM, TAPS, num_drafts
    )


class StateEngine:
    """The ranks of an engine with one recurrent layer, whose pages are full of junk."""

    def __init__(self, name, kind, groups, *, tp_size=1, num_drafts=0, is_dim_first=False):
        self.kind, self.groups, self.is_dim_first = kind, groups, is_dim_first
        with mock.patch.object(mamba_utils, "is_conv_state_dim_first", return_value=is_dim_first):
            self.shapes = shapes_of(kind, groups, tp_size, num_drafts)
            own = [self._rank(rank, tp_size, num_drafts) for rank in range(tp_size)]
        self.pages, self.registered = ([each[i] for each in own] for i in (0, 1))
        ranks = tuple(
            RankGeometry(pp_rank=0, tp_rank=rank, groups=(group.cache.geometry,))
            for rank, group in enumerate(self.registered)
        )
        model = ModelDescription(model="m", dtype="float32", num_layers=1)
        self.geometry = EngineGeometry(
            engine_id=name, tp_size=tp_size, pp_size=1, model=model, ranks=ranks
        )

    def _rank(self, rank, tp_size, num_drafts):
        # vLLM counts a group of which each rank has a copy as many, except in the norm
        norm = SimpleNamespace(n_groups=self.groups)
        layer = StateLayer(kind=self.kind, conv_kernel_size=TAPS, norm=norm)
        page, group = state_group(self.shapes, layer, rank, tp_size, num_drafts)
        return page, group

    def conv(self, rank, block):
        """One rank's convolution state in a block, as vLLM's kernels see it: int16 `[channels, columns]`."""
        nbytes = 2 * int(np.prod(self.shapes[0]))
        state = self.pages[rank][block, 0, 0, :nbytes].view(torch.int16).view(self.shapes[0])
        return state if self.is_dim_first else state.T


def state_group(shapes, layer, rank=0, tp_size=1, num_drafts=0):
    """Return a rank's pages, and its only layer as a worker registers it."""
    spec = kv.MambaSpec(
        block_size=64,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[layer.kind],
        num_speculative_blocks=num_drafts,
    )
    page = torch.full((BLOCKS, 1, 1, spec.page_size_bytes), JUNK, dtype=torch.int8)
    config = vllm_config(layer.kind, names=[LAYER], tp_size=tp_size)
    config.compilation_config.static_forward_context[LAYER] = layer
    config.speculative_config = num_drafts and SimpleNamespace(num_speculative_tokens=num_drafts)
    of_group = kv.KVCacheGroupSpec(layer_names=[LAYER], kv_cache_spec=spec)
    caches = kv.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[of_group])
    place = Placement(rank=Rank(0, rank), tp_rank=rank)
    (group,) = register_groups(config, caches, {LAYER: page}, place)
    return page, group


def move(producer, consumer, source, target):
    """Move a state from block `source` of one engine to block `target` of another, as the topology says."""
    for number, group in enumerate(consumer.registered):
        topology = TpKVTopology(consumer.geometry, Rank(0, number))
        topology.check_compatible(producer.geometry)
        for their, segments in (
            (each.rank, each.segments)
            for each in topology.get_target_remote_ranks(producer.geometry)
        ):
            theirs = producer.registered[their.tp_rank].cache
            for segment in segments:
                for index in group.cache.geometry.families[segment.family].part_indices:
                    views = theirs.views[0][index], group.cache.views[0][index]
                    starts = [
                        each.geometry.parts[index].head_start for each in (theirs, group.cache)
                    ]
                    from_, to = (
                        read(view)[block, segment.head_start - start : segment.head_stop - start]
                        for view, start, block in zip(views, starts, (source, target), strict=True)
                    )
                    to[:] = from_


def sharded(whole, groups, rank, tp_size):
    """Return a rank's channels of `x, B, C`, with vLLM's own loader of the weights that make them."""
    replicas = tp_size if groups % tp_size and groups == 1 else groups
    of_group = (replicas * STATE, (replicas - groups) * STATE, groups == 1)
    loader = mamba_v2_sharded_weight_loader([(INNER, 0, False), of_group, of_group], tp_size, rank)
    channels = torch.full(((INNER + 2 * replicas * STATE) // tp_size, *whole.shape[1:]), -1)
    loader(channels, whole)
    return channels.to(whole.dtype)


def state_of(channels, seed):
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 9999, (channels, TAPS - 1), generator=random, dtype=torch.int16),
        torch.randn(HEADS, DIM, STATE, generator=random),
    )


def fill(engine, block, whole):
    conv, temporal = whole
    tp_size = engine.geometry.tp_size
    for rank in range(tp_size):
        own = sharded(conv, engine.groups, rank, tp_size)
        engine.conv(rank, block)[:, : TAPS - 1] = own
        heads = temporal[rank * HEADS // tp_size : (rank + 1) * HEADS // tp_size]
        count = 2 * int(np.prod(engine.shapes[0]))
        raw = heads.contiguous().view(torch.int8).flatten()
        engine.pages[rank][block, 0, 0, count : count + len(raw)] = raw


SIZES = {1: (1, 2, 4, 8), 2: (1, 2), 4: (1, 2, 4), 8: (1, 2, 4, 8)}
"""Tensor parallel sizes that vLLM starts, by the groups of heads: divisors of these, or any if there is one."""


@st.composite
def pairs(draw):
    groups = draw(st.sampled_from(sorted(SIZES)))
    engines = [
        {
            "tp_size": draw(st.sampled_from(SIZES[groups])),
            "num_drafts": draw(st.integers(0, 3)),
            "is_dim_first": draw(st.booleans()),
        }
        for _ in range(2)
    ]
    return groups, engines


@given(pairs(), st.integers(0, 1 << 20))
def test_a_mamba_state_arrives_whatever_is_drafted_and_however_groups_are_replicated(pair, seed):
    """Each rank gets the channels that it would have computed itself, and nothing beside them is written."""
    groups, (prefill, decode) = pair
    producer = StateEngine("p", "MAMBA2", groups, **prefill)
    consumer = StateEngine("d", "MAMBA2", groups, **decode)
    expected = StateEngine("d", "MAMBA2", groups, **decode)
    whole = state_of(INNER + 2 * groups * STATE, seed)
    fill(producer, 1, whole)
    fill(expected, 2, whole)
    move(producer, consumer, 1, 2)
    for found, wanted in zip(consumer.pages, expected.pages, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("drafts", [(0, 3), (3, 0), (1, 2)])
@pytest.mark.parametrize("is_dim_first", [False, True])
def test_a_delta_net_with_a_state_of_another_engine_continues_as_if_it_had_computed_it(
    drafts, is_dim_first
):
    """With vLLM's own convolution: the prefill engine's over a prompt, the decode engine's over the next tokens."""
    producer = StateEngine("p", "GDN_ATTN", 4, num_drafts=drafts[0], is_dim_first=is_dim_first)
    consumer = StateEngine("d", "GDN_ATTN", 4, num_drafts=drafts[1], is_dim_first=not is_dim_first)
    channels = 2 * 4 * STATE + INNER
    tokens, weight = torch.randn(channels, 9).bfloat16(), torch.randn(channels, TAPS).bfloat16()

    def run(engine, block, some, has_state):
        # the kernel gets all blocks as `[block, channel, column]`
        states = torch.stack([engine.conv(0, each) for each in range(BLOCKS)]).view(torch.bfloat16)
        out = causal_conv1d_fn_cpu(
            some,
            weight,
            None,
            states,
            torch.tensor([0, some.shape[1]]),
            torch.tensor([block]),
            torch.tensor([has_state]),
        )
        engine.conv(0, block)[:] = states[block].view(torch.int16)
        return out

    run(producer, 1, tokens[:, :7], False)
    move(producer, consumer, 1, 2)
    alone = StateEngine("a", "GDN_ATTN", 4, num_drafts=drafts[1])
    wanted = run(alone, 0, tokens, False)[:, 7:]
    assert torch.equal(run(consumer, 2, tokens[:, 7:], True), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_gpu_checks_drafts_from_the_state_of_an_engine_that_drafts_nothing(num_drafts):
    """vLLM's Triton kernels: the first step after a load computes one token, the next one a token and its drafts."""
    producer = StateEngine("p", "GDN_ATTN", 4)
    consumer = StateEngine("d", "GDN_ATTN", 4, num_drafts=num_drafts)
    channels = 2 * 4 * STATE + INNER
    tokens = torch.randn(channels, 8 + 1 + num_drafts, device="cuda").bfloat16()
    weight = torch.randn(channels, TAPS, device="cuda").bfloat16()

    def on_gpu(engine):
        states = torch.stack([engine.conv(0, each) for each in range(BLOCKS)])
        return states.view(torch.bfloat16).cuda()

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def prefilled(states, some, block):
        bounds, began = ints(0, some.shape[1]), torch.tensor([False], device="cuda")
        return causal_conv1d_fn(some, weight, None, states, bounds, ints(block), began, None)

    states = on_gpu(producer)
    prefilled(states, tokens[:, :7], 1)
    producer.conv(0, 1)[:] = states[1].cpu().view(torch.int16)
    move(producer, consumer, 1, 2)
    wanted = prefilled(on_gpu(StateEngine("a", "GDN_ATTN", 4)), tokens, 1)[:, 7:].T
    states = on_gpu(consumer)
    found = [
        causal_conv1d_update(
            step.T.contiguous(),
            states,
            weight,
            conv_state_indices=ints(2),
            num_accepted_tokens=ints(1),
            query_start_loc=ints(0, step.shape[1]),
            max_query_len=1 + num_drafts,
        )
        for step in (tokens[:, 7:8], tokens[:, 8:])
    ]
    torch.testing.assert_close(torch.cat(found), wanted)


def test_columns_of_a_convolution_that_nobody_knows_are_refused():
    shapes = shapes_of("MAMBA2", 2, 1, 2)
    layer = StateLayer(kind="MAMBA2", conv_kernel_size=TAPS)
    with pytest.raises(GeometryError, match="columns that are not known") as refused:
        state_group(shapes, layer, num_drafts=1)
    assert refused.value.context["columns"] == TAPS - 1 + 2
