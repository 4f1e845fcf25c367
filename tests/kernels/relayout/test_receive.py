"""The three receive transforms, out of place and in place, and their refusals."""

from __future__ import annotations

import pytest
import torch

from kvconnector_kernels.relayout import (
    GeometryMismatchError,
    PackedSide,
    PagedSide,
    receive_block_size,
    receive_block_size_and_layout,
    receive_layout,
)
from tests.kernels.relayout.pools import Pool, Window, check_copy_equals_naive

# (transform, order and block size received, order and block size of the local pool)
CASES = [
    (receive_block_size, ("HND", 4), ("HND", 16)),
    (receive_block_size, ("NHD", 16), ("NHD", 4)),
    (receive_block_size, ("HND", 16), ("HND", 24)),
    (receive_layout, ("HND", 8), ("NHD", 8)),
    (receive_layout, ("NHD", 8), ("HND", 8)),
    (receive_layout, ("HDN", 8), ("NHD", 8)),
    (receive_block_size_and_layout, ("HND", 4), ("NHD", 16)),
    (receive_block_size_and_layout, ("NHD", 16), ("HND", 4)),
    (receive_block_size_and_layout, ("HND", 8), ("HDN", 16)),
]
with_cases = pytest.mark.parametrize(
    "transform,received,local",
    CASES,
    ids=[f"{case[0].name}-{case[1]}-{case[2]}" for case in CASES],
)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


@devices
@with_cases
def test_receive_transforms_equal_the_naive_copy(transform, received, local, device):
    src = Pool(*received, num_blocks=12, device=device).fill_random()
    dst = Pool(*local, num_blocks=12, device=device)
    check_copy_equals_naive(
        transform, Window(src), Window(dst), num_parts=2, num_heads=4, num_tokens=48
    )


@devices
def test_receive_works_in_place(device):
    """A remote with blocks of 4 tokens in HND has written into local blocks of 16 tokens in NHD."""
    local = Pool("NHD", 16, 3, gap_items=0, device=device)
    as_sent = Pool("HND", 4, 12, gap_items=0, device=device).fill_random()
    sent = [view.clone() for view in as_sent.views(as_sent.buffer)]
    landed = Pool("HND", 4, 12, gap_items=0, device=device)
    landed.buffer = local.buffer
    for view, part in zip(landed.views(local.buffer), sent, strict=True):
        view.copy_(part)
    counts = {"num_parts": 2, "num_heads": 4, "num_tokens": 48}
    room = torch.empty(2 * 4 * 48 * 6, dtype=torch.int16, device=device)
    ids = torch.arange(12, dtype=torch.int32, device=device)
    if device == "cpu":
        ids = ids.numpy()
    receive_block_size_and_layout(
        PagedSide(landed.table(), ids),
        PagedSide(local.table(), ids[:3]),
        **counts,
        scratch=PackedSide(room.data_ptr(), room.numel() * 2, "HND", device),
    )
    for view, part in zip(local.views(local.buffer), sent, strict=True):
        tokens = part.permute(1, 0, 2, 3).reshape(4, 48, 6)
        stored = view.permute(1, 0, 2, 3).reshape(4, 48, 6)
        assert torch.equal(stored, tokens)


@pytest.mark.parametrize(
    "transform,received,local,text",
    [
        (receive_block_size, ("HND", 8), ("HND", 8), "another block size.*received 8, local 8"),
        (receive_block_size, ("HND", 4), ("NHD", 8), "one order.*received HND, local NHD"),
        (receive_layout, ("HND", 4), ("NHD", 8), "one block size.*received 4, local 8"),
        (receive_layout, ("NHD", 8), ("NHD", 8), "another order.*received NHD, local NHD"),
        (receive_block_size_and_layout, ("HND", 8), ("NHD", 8), "another block size"),
        (receive_block_size_and_layout, ("HND", 4), ("HND", 8), "another order"),
    ],
)
def test_transforms_refuse_each_others_cases(transform, received, local, text):
    src, dst = Window(Pool(*received)).side(), Window(Pool(*local)).side()
    with pytest.raises(GeometryMismatchError, match=text):
        transform(src, dst, num_parts=2, num_heads=4, num_tokens=8)
