"""Resources that copies take from a GPU on which a model runs: memory and multiprocessors."""

import threading

import pytest

from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.datapath.direct.shared_memory import is_known_to_cuda
from kvconnector.datapath.pump.copies import program_cap
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.datapath.pump.digests import Digests
from kvconnector.datapath.pump.marks import FREE_STREAM
from kvconnector.datapath.staging import SlotPool
from kvconnector.runtime.cuda_context import CudaContext
from kvconnector_kernels.pump.records import CudaJob, State, word_of
from tests.support.gpu_flags import ends, held_back
from tests.unit.datapath.caches import Caches, Shape

SLOT_BYTES = 1 << 20


def caches_and_copies():
    caches = Caches(Shape(), seed=1, device="cuda:0")
    copies = CudaCopies(
        caches.pools, slot_address=SLOT_BYTES, slot_bytes=SLOT_BYTES, max_programs=0
    )
    return caches, copies


def make_ready_for_every_stream(copies, *programs):
    """Load the kernels of reads, and allocate the memory of their block ids, which may wait for kernels that run."""
    import torch

    for program in programs:
        copies.make_jobs(program.source, program.blocks, packing=True).buffer.give_back()
    lent = [
        copies._ids.lend(programs[0].blocks, each) for each in range(len(copies.streams.copies))
    ]
    for buffer, *_ in lent:
        buffer.give_back()
    torch.cuda.synchronize()


def test_host_copies_are_capped_only_on_request():
    assert [program_cap(cap, "cpu") for cap in (-1, 0, 7)] == [0, 0, 7]


@pytest.mark.gpu
def test_a_model_keeps_half_of_the_multiprocessors():
    import torch

    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert program_cap(-1, "cuda:0") == count // 2
    assert [program_cap(cap, "cuda:0") for cap in (0, 9)] == [0, 9]


@pytest.mark.gpu
def test_digests_are_written_from_pinned_memory():
    # a copy from other memory may end after its call, and the chunk be sent with its predecessor's digest
    state = State()
    digests = Digests("cuda:0", SLOT_BYTES)
    digests.attach(state)
    last = state.digest_room + SLOT_BYTES - 1
    assert is_known_to_cuda(state.digest_room)
    assert is_known_to_cuda(last)


@pytest.mark.gpu
def test_block_ids_do_not_go_where_a_models_kernels_may_still_write():
    import torch

    caches, copies = caches_and_copies()
    program = caches.program([2, 0, 1, 4, 3], range(18), order="HND", chunk_tokens=64, chunk_rows=3)
    # the allocator gives this memory to the next request on the same stream, whether or not kernels still use it
    freed = torch.empty(16, dtype=torch.int32, device="cuda:0")
    address = freed.data_ptr()
    del freed
    jobs = _, buffer, _ = copies.make_jobs(program.source, program.blocks, packing=True)
    _, uploaded = buffer.memory
    assert not uploaded.data_ptr() <= address < uploaded.data_ptr() + uploaded.nbytes
    torch.cuda.synchronize()
    (group,) = program.blocks
    assert uploaded[: len(group.block_ids)].tolist() == group.block_ids.tolist()
    jobs[1].give_back()


@pytest.mark.gpu
def test_block_ids_of_expected_reads_are_uploaded_early(monkeypatch):
    import torch

    caches, copies = caches_and_copies()
    cut = {"order": "HND", "chunk_tokens": 64, "chunk_rows": 3}
    program, *others = (caches.program([0, 3, 1], range(12), **cut) for _ in range(99))
    for other in others:
        copies.expect(other.blocks)
    copies.expect(program.blocks)
    torch.cuda.synchronize()
    monkeypatch.setattr(copies, "_send_ids", None)
    _, buffer, _ = copies.make_jobs(program.source, program.blocks, packing=True)
    assert buffer.memory[1][:3].tolist() == [0, 3, 1]


@pytest.mark.gpu
def test_copies_run_on_no_stream_of_the_engines():
    import torch

    _, copies = caches_and_copies()
    engines = {torch.cuda.Stream(device=0).cuda_stream for _ in range(64)}
    assert engines.isdisjoint([copies.streams.board.cuda_stream, *copies.streams.handles])


@pytest.mark.gpu
def test_copies_wait_for_the_kernels_of_their_own_request_alone():
    import torch

    caches, copies = caches_and_copies()
    cut = {"order": "HND", "chunk_tokens": 64, "chunk_rows": 3}
    own, other = (caches.program(ids, range(8), **cut) for ids in ([0, 1], [2, 3]))
    make_ready_for_every_stream(copies, own, other)
    engine, mark = torch.cuda.Stream(), torch.cuda.Event()
    with held_back(engine) as release:
        mark.record(engine)
        copies.order_after(mark, [own.blocks])
        streams = []
        for program in (own, other):
            jobs = copies.make_jobs(program.source, program.blocks, packing=True)
            words, _ = jobs.memory
            (handle,) = set(words[:, word_of(CudaJob, "stream")].tolist())
            streams.append(copies.streams.copies[copies.streams.handles.index(handle)])
            jobs.buffer.give_back()
        waiting, free = streams
        assert ends(free)
        assert not mark.query()
        assert not waiting.query()
        release()
        assert ends(waiting)
        assert mark.query()
    assert copies.streams.marks.stream_of(own.blocks) == FREE_STREAM


@pytest.mark.gpu
def test_staging_can_be_mapped_by_a_peer_whatever_torch_allocates():
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with torch.cuda.device(0):
            pool = SlotPool(2, SLOT_BYTES, "cuda:0")
            allocation = CudaDriver().allocation_of(pool.address(1))
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert allocation.address <= pool.address(0)
    assert pool.address(1) + SLOT_BYTES <= allocation.address + allocation.nbytes


@pytest.mark.gpu
def test_the_drivers_thread_spoils_no_capture_of_a_graph():
    """It queries and allocates while another thread captures in CUDA's strictest mode."""
    import torch

    context = CudaContext("cuda:0")
    caches, copies = caches_and_copies()
    program = caches.program([0, 1], range(8), order="HND", chunk_tokens=64, chunk_rows=3)
    is_capturing, is_over = threading.Event(), threading.Event()
    failures = []

    def drive():
        try:
            context.allow_captures()
            context.make_current()
            is_capturing.wait(60.0)
            SlotPool(2, SLOT_BYTES, "cuda:0")
            asked = program.source, program.blocks
            kept = [copies.make_jobs(*asked, packing=True) for _ in range(3)]
            copies.check_device()
            copies.finish()
            for jobs in kept:
                jobs[1].give_back()
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=drive)
    thread.start()
    values = torch.zeros(4, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        values += 1
        is_capturing.set()
        assert is_over.wait(60.0)
        values += 1
    thread.join()
    assert not failures
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == [2.0] * 4
