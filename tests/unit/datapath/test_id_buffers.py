"""Memory for block ids in transit to a GPU, which is host memory here."""

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump.id_buffers import MIN_IDS, IdBuffer, IdBuffers
from kvconnector.planning import GroupBlocks


def allocate(num_ids, stream, free):
    """Return a buffer whose part on the GPU is aligned as on a real one."""
    here, there = np.zeros(num_ids, np.int32), np.zeros(num_ids + 4, np.int32)
    address = there.ctypes.data + -there.ctypes.data % 16
    room = memoryview(here).cast("B")
    return IdBuffer(room, here.ctypes.data, address, (here, there), free)


def ids_at(address, group):
    return list((ctypes.c_int32 * group.num_blocks).from_address(address))


@given(data=st.data())
def test_reads_under_way_have_their_own_ids(data):
    buffers = IdBuffers(allocate, 2)
    lent = []
    for seed in range(data.draw(st.integers(1, 12))):
        if lent and data.draw(st.booleans()):
            lent.pop(data.draw(st.integers(0, len(lent) - 1)))[0].give_back()
        counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 4, 500, MIN_IDS + 1]), max_size=4))
        rng = np.random.default_rng(seed)
        blocks = [GroupBlocks.of(rng.integers(0, 1 << 30, count).tolist()) for count in counts]
        buffer, places, nbytes = buffers.lend(blocks, seed % 2)
        assert nbytes <= buffer.here.nbytes
        ctypes.memmove(buffer.there_address, buffer.here_address, nbytes)
        lent.append((buffer, blocks, places))
        for _, mine, at in lent:
            found = [ids_at(*each) for each in zip(at, mine, strict=True)]
            assert found == [group.block_ids.tolist() for group in mine]


def test_the_first_read_of_each_stream_finds_memory():
    """Otherwise it would wait for pinned memory."""
    allocated = []

    def counted(*arguments):
        allocated.append(arguments)
        return allocate(*arguments)

    buffers, most = IdBuffers(counted, 4), [GroupBlocks.of([0] * MIN_IDS)]
    before = len(allocated)
    lent = [buffers.lend(most, stream)[0] for stream in range(4)]
    assert len({id(each) for each in lent}) == 4
    assert len(allocated) == before == 4


def test_memory_is_used_again():
    buffers = IdBuffers(allocate, 2)
    few, many = [GroupBlocks.of([0] * 5)], [GroupBlocks.of([0] * 2 * MIN_IDS)]
    first, *_ = buffers.lend(few, 0)
    first.give_back()
    assert buffers.lend(many, 0)[0] is not first
    # ids that were sent to it and never used may still be in transit on the first stream
    assert buffers.lend(few, 1)[0] is not first
    assert buffers.lend(few, 0)[0] is first
    assert buffers.lend(few, 0)[0] is not first
