"""What a GPU's copies take of the GPU that a model runs on: memory, and multiprocessors."""

from __future__ import annotations

from typing import cast

import pytest

from kvconnector.datapath.program_cap import program_cap
from tests.unit.datapath.caches import Caches, Shape

SLOT_BYTES = 1 << 20


@pytest.mark.parametrize("setting, cap", [(-1, 0), (0, 0), (7, 7)])
def test_host_copies_are_capped_only_on_request(setting: int, cap: int) -> None:
    assert program_cap(setting, "cpu") == cap


@pytest.mark.gpu
def test_a_model_keeps_half_of_the_multiprocessors() -> None:
    import torch

    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert program_cap(-1, "cuda:0") == count // 2
    assert program_cap(0, "cuda:0") == 0
    assert program_cap(9, "cuda:0") == 9


@pytest.mark.gpu
def test_block_ids_do_not_go_where_a_models_kernels_may_still_write() -> None:
    import torch

    from kvconnector.datapath.pump.copying_cuda import CudaCopies

    caches = Caches(Shape(), seed=1, device="cuda:0")
    copies = CudaCopies(
        caches.pools, slot_address=SLOT_BYTES, slot_bytes=SLOT_BYTES, max_programs=0
    )
    program = caches.program([2, 0, 1, 4, 3], range(18), order="HND", chunk_tokens=64, chunk_rows=3)
    # the allocator has this memory for the next who asks on the same stream, kernels or not
    freed = torch.empty(16, dtype=torch.int32, device="cuda:0")
    address = freed.data_ptr()
    del freed
    jobs = copies.make_jobs(program, packing=True)
    uploaded: list[torch.Tensor] = [
        ids for ids, _ in cast("tuple[tuple[torch.Tensor, object], ...]", jobs.kept)
    ]
    assert address not in {ids.data_ptr() for ids in uploaded}
    torch.cuda.synchronize()
    for ids, group in zip(uploaded, program.blocks, strict=True):
        assert ids[: len(group.block_ids)].tolist() == group.block_ids.tolist()
