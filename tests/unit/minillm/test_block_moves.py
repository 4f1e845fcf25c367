"""Blocks that are swapped out and in again have the same tokens, whatever their form in host memory."""

import pytest
import torch

from kvconnector.cache.host_copy import KVPool
from kvconnector_kernels.relayout import (
    receive_block_size,
    receive_block_size_and_layout,
    receive_layout,
)
from minillm.block_moves import transform_between
from minillm.messages import BlockMove
from minillm.worker import RankWorker
from tests.unit.minillm.seed_cases import config_of

OUT, IN = [(5, 2), (0, 3), (3, 0)], [(3, 4), (0, 1), (2, 2)]


@pytest.mark.parametrize(
    "layout, host, expected",
    [
        ("NHD", {}, None),
        ("HDN", {}, None),
        ("CROSS", {"host_layout": "HND"}, None),
        ("NHD", {"host_layout": "NHD", "host_block_size": 4}, receive_block_size),
        ("NHD", {"host_layout": "HND"}, receive_layout),
        ("CROSS", {"host_layout": "NHD"}, receive_layout),
        ("HND", {"host_layout": "NHD", "host_block_size": 2}, receive_block_size_and_layout),
    ],
)
def test_swapped_blocks_return_as_they_were(tmp_path, layout, host, expected):
    config = config_of(
        "llama", block_size=8, num_blocks=6, num_host_blocks=4, layout=layout, **host
    )
    rank = RankWorker(config, 0, tmp_path)
    try:
        stored = rank.mover.host
        for name, views in rank.cache.views.items():
            pools = KVPool(views, "cpu"), KVPool(stored.views[name], "cpu")
            assert transform_between(*pools, "cpu") is expected
        for parts in rank.cache.parts.values():
            for part in parts:
                part.copy_(torch.rand(part.shape))
        before = {
            name: [part.clone() for part in parts] for name, parts in rank.cache.parts.items()
        }
        rank.mover.run([BlockMove(0, "out", OUT)])
        for parts in rank.cache.parts.values():
            for part in parts:
                part[[source for source, _ in OUT]] = -1.0
        rank.mover.run([BlockMove(0, "in", IN)])
    finally:
        rank.close()
    returned = {block: next(s for s, t in OUT if t == place) for place, block in IN}
    for name, parts in rank.cache.parts.items():
        for part, old in zip(parts, before[name], strict=True):
            for block, source in returned.items():
                assert torch.equal(part[block], old[source])
            assert (part[[0, 3, 5]] == -1.0).all()
