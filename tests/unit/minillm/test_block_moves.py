"""Blocks that are swapped out and in again, and copied inside a pool, through a rank's own caches."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from minillm.block_moves import BlockMover
from minillm.cache_groups import layer_groups, rank_group
from minillm.config import Architecture, CacheConfig, Layout, ModelConfig, ParallelConfig
from minillm.messages import BlockMove
from minillm.paged_cache import PagedCache
from minillm.partition import rank_share

NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 5
SWAPPED = [7, 2, 11]
HOST_IDS = [4, 0, 3]
BACK = [1, 9, 7]


def caches(
    architecture: Architecture, layout: Layout, device: str
) -> tuple[PagedCache, PagedCache]:
    """A rank's cache and its counterpart in host memory, both full of random numbers."""
    model = ModelConfig(architecture=architecture, num_layers=4, max_model_len=64)
    groups = layer_groups(model, CacheConfig(block_size=8))
    share = rank_share(model, ParallelConfig(tp_size=2), 1)
    specs = [rank_group(model, CacheConfig(block_size=8), group, share) for group in groups]
    pools = [
        PagedCache(
            share,
            groups,
            specs,
            num_blocks=[count] * len(groups),
            layout=layout,
            device=place,
            pinned=place == "cpu" and device != "cpu",
        )
        for place, count in ((device, NUM_BLOCKS), ("cpu", NUM_HOST_BLOCKS))
    ]
    generator = torch.Generator().manual_seed(0)
    for pool in pools:
        for parts in pool.parts.values():
            for part in parts:
                part.copy_(torch.randn(part.shape, generator=generator))
    return pools[0], pools[1]


def snapshot(cache: PagedCache) -> dict[tuple[int, int], torch.Tensor]:
    """All that a cache holds, by layer and part, on the CPU."""
    if cache.device != "cpu":
        torch.cuda.synchronize()
    return {
        (layer, index): part.to("cpu", copy=True)
        for layer, parts in cache.parts.items()
        for index, part in enumerate(parts)
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_blocks_come_back_from_host_memory_as_they_were(
    architecture: Architecture, layout: Layout, device: str
) -> None:
    cache, host = caches(architecture, layout, device)
    before, host_before = snapshot(cache), snapshot(host)
    mover = BlockMover(cache, host)
    num_groups = len(cache.groups)
    mover.run(
        [BlockMove(g, "out", list(zip(SWAPPED, HOST_IDS, strict=True))) for g in range(num_groups)]
    )
    for key, part in snapshot(host).items():
        expected = host_before[key]
        expected[HOST_IDS] = before[key][SWAPPED]
        assert torch.equal(part, expected)
    for parts in cache.parts.values():
        for part in parts:
            part[SWAPPED] = 0.0
    mover.run(
        [BlockMove(g, "in", list(zip(HOST_IDS, BACK, strict=True))) for g in range(num_groups)]
    )
    for key, part in snapshot(cache).items():
        expected = before[key].clone()
        expected[SWAPPED] = 0.0
        expected[BACK] = before[key][SWAPPED]
        assert torch.equal(part, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_copies_inside_a_pool_follow_each_other(device: str) -> None:
    """A block that one copy reads and the next one writes."""
    cache, host = caches("mamba", "HND", device)
    before = snapshot(cache)
    moves = [BlockMove(1, "copy", [(3, 4)]), BlockMove(1, "copy", [(4, 5), (6, 3)])]
    BlockMover(cache, host).run(moves)
    after = snapshot(cache)
    states = cache.group_layers(1)
    for (layer, index), part in after.items():
        expected = before[layer, index].clone()
        if layer in states:
            for source, target in ((3, 4), (4, 5), (6, 3)):
                expected[target] = expected[source].clone()
        assert torch.equal(part, expected)


def test_without_host_blocks_nothing_can_be_swapped() -> None:
    cache, _ = caches("llama", "HND", "cpu")
    with pytest.raises(ValueError, match="without host blocks"):
        BlockMover(cache, None).run([BlockMove(0, "out", [(1, 1)])])
