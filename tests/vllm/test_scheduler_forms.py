"""Our readers and transforms give the same results as vLLM's own."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector import utils

from kvconnector.cache.engine_step import yield_req_data
from kvconnector.layout import part_table
from kvconnector.runtime import view_of
from kvconnector_kernels.relayout import (
    PackedSide,
    PagedSide,
    PartTable,
    receive_block_size,
    receive_block_size_and_layout,
    receive_layout,
)

pytestmark = pytest.mark.vllm

RELEASE = tuple(int(number) for number in vllm.__version__.split(".")[:2])
BLOCKS, HEADS, DIM = 6, 3, 8


def drawn_step(rng):
    def tables():
        return tuple([rng.randrange(99) for _ in range(rng.randrange(3))] for _ in range(2))

    names = [f"r{number}" for number in range(rng.randrange(6))]
    running = [f"old{number}" for number in range(rng.randrange(6))]
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=n, block_ids=tables()) for n in names],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=running,
            new_block_ids=[rng.choice([None, tables()]) for _ in running],
            resumed_req_ids=set(rng.sample(running, rng.randint(0, len(running)))),
        ),
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_steps_requests_are_those_that_this_release_of_vllm_yields(seed):
    step = drawn_step(random.Random(seed))
    assert list(yield_req_data(step, release=RELEASE)) == list(utils.yield_req_data(step))


def table(cache_BHND):
    """Return a pool of one part, for the kernels."""
    num_blocks, num_heads, block_size, head_dim = cache_BHND.shape
    return PartTable(
        part_table([view_of(cache_BHND)]),
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=num_heads,
        head_dim=head_dim,
        item_size_bytes=cache_BHND.element_size(),
        device="cpu",
    )


@pytest.mark.parametrize(
    "ratio, stored, transform",
    [
        (4, "HND", receive_block_size),
        (1, "NHD", receive_layout),
        (4, "NHD", receive_block_size_and_layout),
    ],
)
def test_received_blocks_are_laid_out_in_place_as_vllm_does(ratio, stored, transform):
    """Some local blocks of 16 tokens hold the bytes of a remote's smaller ones in HND."""
    shape = {"HND": (BLOCKS, HEADS, 16, DIM), "NHD": (BLOCKS, 16, HEADS, DIM)}[stored]
    memory = torch.randint(-99, 99, shape, dtype=torch.int16)
    expected = memory.clone()
    ours, theirs = (
        whole if stored == "HND" else whole.transpose(1, 2) for whole in (memory, expected)
    )
    if RELEASE < (0, 32):  # its functions take tokens before heads
        theirs = theirs.transpose(1, 2)
    blocks = [4, 1, 2]
    if transform is receive_block_size:
        utils.kv_postprocess_blksize_on_receive(theirs, torch.tensor(blocks), ratio)
    else:
        utils.kv_postprocess_blksize_and_layout_on_receive(theirs, torch.tensor(blocks), ratio)
    sent = memory.view(BLOCKS * ratio, HEADS, 16 // ratio, DIM)
    sent_ids = [block * ratio + part for block in blocks for part in range(ratio)]
    room = torch.empty(len(blocks) * 16 * HEADS * DIM, dtype=memory.dtype)
    transform(
        PagedSide(table(sent), np.array(sent_ids, np.int32)),
        PagedSide(table(ours), np.array(blocks, np.int32)),
        num_parts=1,
        num_heads=HEADS,
        num_tokens=len(blocks) * 16,
        scratch=PackedSide(room.data_ptr(), room.nbytes, "HND", "cpu"),
    )
    assert torch.equal(memory, expected)
