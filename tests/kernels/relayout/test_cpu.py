"""The CPU copy: threads, forks, distant addresses, light imports."""

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvconnector_kernels.relayout import (
    PackedSide,
    PagedSide,
    relayout,
    relayout_cpu,
    relayout_triton,
)
from tests.kernels.relayout.pools import TRITON_DEVICE, Pool, Window, expected_buffer, part_table
from tests.support.forked import run_python


def test_threads_copy_concurrently():
    pools = [(Pool("HND", 4, 64).fill_random(seed), Pool("NHD", 16, 16)) for seed in range(6)]
    counts = {"num_heads": 4, "num_tokens": 250}
    wants = [expected_buffer(Window(src), Window(dst), **counts) for src, dst in pools]
    start = threading.Barrier(len(pools))

    def copy(pair):
        start.wait(timeout=30)
        for _ in range(20):
            relayout(*(Window(pool).side() for pool in pair), num_parts=2, **counts)

    with ThreadPoolExecutor(len(pools)) as threads:
        list(threads.map(copy, pools))
    for (_, dst), want in zip(pools, wants, strict=True):
        assert torch.equal(dst.buffer, want)


_SMALL_COPY = """
import numpy as np
from kvconnector_kernels.relayout import PackedSide, PagedSide, PartTable, relayout

def copy_and_check():
    pool = np.arange(4 * 2 * 8 * 16, dtype=np.uint8).reshape(4, 2, 8, 16)
    out = np.zeros((24, 2, 16), np.uint8)
    rows = np.array([[pool.ctypes.data, *pool.strides]], np.int64)
    table = PartTable(rows, num_blocks=4, block_size=8, num_heads=2, head_dim=16,
                      item_size_bytes=1, device="cpu")
    relayout(PagedSide(table, np.array([2, 0, 3], np.int32)),
             PackedSide(out.ctypes.data, out.nbytes, "NHD", "cpu"),
             num_parts=1, num_heads=2, num_tokens=24)
    want = pool[[2, 0, 3]].transpose(0, 2, 1, 3).reshape(24, 2, 16)
    assert (out == want).all()
"""


def test_copying_on_the_cpu_imports_neither_torch_nor_triton():
    check = "import sys\ncopy_and_check()\nassert not {'torch', 'triton'} & set(sys.modules)\n"
    run_python("-c", _SMALL_COPY + check)


def test_the_first_copy_writes_no_file_and_starts_no_program():
    """A read-only root and a missing home are enough."""
    check = """
import os, sys
done = []
def audit(event, arguments):
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event.startswith(("subprocess", "os.posix_spawn", "os.exec", "os.fork", "os.mkdir")):
        done.append((event, arguments))
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writes:
        done.append((event, arguments))
sys.addaudithook(audit)
copy_and_check()
assert not done, done
"""
    run_python(
        "-B",
        "-c",
        "import numpy\n" + check.replace("copy_and_check()", _SMALL_COPY + "\ncopy_and_check()"),
    )


def test_a_forked_child_copies_after_its_parent():
    check = """
import os
copy_and_check()
child = os.fork()
if child == 0:
    copy_and_check()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
"""
    run_python("-c", _SMALL_COPY + check)


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="sparse host memory is not the GPU's to read")
@pytest.mark.parametrize("block_size,far_axes", [(2, 3), (8, 1), (8, 2)])
@pytest.mark.parametrize("copy", [relayout_cpu, relayout_triton])
def test_strides_beyond_32_bits(copy, block_size, far_axes):
    """Blocks (and heads, and tokens) lie more than 4 GiB apart. The strides are odd, so that kernels count in bytes."""
    far = (1 << 32) + 13
    num_tokens = 2 * block_size
    strides = {1: (far, 8 * block_size, 8), 2: (2 * far, far, 8), 3: (4 * far, 2 * far, far)}[
        far_axes
    ]
    # Linux's number, for Pythons without the name. Only touched pages take memory.
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    with mmap.mmap(-1, 8 * far, flags=flags) as memory:
        space = np.frombuffer(memory, np.uint8)
        table = part_table([[space.ctypes.data, *strides, 1]], (2, block_size, 2, 8, 1))
        side = PagedSide(table, np.array([1, 0], np.int32))
        sent = np.random.default_rng(0).integers(1, 255, (num_tokens, 2, 8), np.uint8)
        packed = PackedSide(sent.ctypes.data, sent.nbytes, "NHD", "cpu")
        counts = {"num_parts": 1, "num_heads": 2, "num_tokens": num_tokens}
        copy(packed, side, **counts)
        for token, head in np.ndindex(num_tokens, 2):
            block, offset = (1, 0)[token // block_size], token % block_size
            start = block * strides[0] + head * strides[1] + offset * strides[2]
            assert (space[start : start + 8] == sent[token, head]).all()
        back = np.zeros_like(sent)
        copy(side, PackedSide(back.ctypes.data, back.nbytes, "NHD", "cpu"), **counts)
        assert (back == sent).all()
        del space
