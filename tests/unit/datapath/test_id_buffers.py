"""Memory for block ids in transit to a GPU, which is host memory here."""

import ctypes
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump.copies_cuda import CudaCopies
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


def expecting(*, status=0):
    """Return copies that send ids within host memory, with `status`, and a list of all buffers that they have made."""
    made = []

    def counted(*arguments):
        made.append(allocate(*arguments))
        return made[-1]

    def send(there, here, nbytes, stream):
        ctypes.memmove(there, here, nbytes)
        return copies.status

    copies = CudaCopies.__new__(CudaCopies)  # otherwise made only on a GPU
    copies.status, copies._expected, copies._ids = status, {}, IdBuffers(counted, 1)
    copies._cuda = SimpleNamespace(cuCtxSetCurrent=lambda _: 0, cuMemcpyHtoDAsync_v2=send)
    copies.begin, copies.streams = (0, 0), SimpleNamespace(handles=[0])
    return copies, made


def test_expected_ids_are_those_of_their_lease_and_the_oldest_make_room():
    copies, made = expecting()
    for number in range(500):
        copies.expect((GroupBlocks.of([number]), GroupBlocks.of([1000 + number] * 3)))
    newest = range(500 - len(copies._expected), 500)
    for number, (name, (blocks, _, places)) in zip(newest, copies._expected.items(), strict=True):
        assert name == id(blocks)
        found = [ids_at(*each) for each in zip(places, blocks, strict=True)]
        assert found == [[number], [1000 + number] * 3]
    assert len(copies._expected) < len(made) < 100


def test_leases_that_nobody_reads_hold_little_memory_however_long_they_are():
    copies, made = expecting()
    for exponent in range(20):
        group = GroupBlocks.of([0] * (1 << exponent))
        for _ in range(70):
            copies.expect((group,))
    held = [buffer for _, buffer, _ in copies._expected.values()]
    assert 1 << 20 < sum(each.here.nbytes for each in held) <= 16 << 20
    # other lengths have buffers of their own, each half as long as the next
    assert sum(each.here.nbytes for each in made) < 32 << 20


def test_expected_ids_that_cannot_be_sent_are_left_to_their_read():
    copies, made = expecting(status=2)
    blocks = (GroupBlocks.of([7]),)
    for _ in range(100):
        copies.expect(blocks)
    assert not copies._expected
    assert len(made) == 1
    copies.status = 0
    copies.expect(blocks)
    copies.expect(blocks)
    assert [buffer for _, buffer, _ in copies._expected.values()] == made
