"""Calls of the CUDA driver, with a stand-in for libcuda whose calls wait as those of a GPU that hangs do."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnector.datapath.direct import cuda_driver
from kvconnector.datapath.direct.cuda_driver import CudaDriver
from kvconnector.errors import TransportError
from native import build
from tests.support.waiting import until

WAITS = """
int NAME(unsigned long long *address, struct handle handle, unsigned flags)
{
    struct timespec pause = {0, 1000000};
    is_in = 1;
    for (int i = 0; i < LIMIT_MS && !may_return; i++)
        nanosleep(&pause, NULL);
    *address = 1;
    return may_return ? 0 : 999;
}
"""
SOURCE = """
#include <time.h>
__attribute__((visibility("default"))) volatile int is_in, may_return;
struct handle { char reserved[64]; };
#pragma GCC visibility push(default)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A libcuda whose `cuIpcOpenMemHandle_v2` returns when the test lets it, or with an error after a while."""
    compiler = build.system_compiler()
    if not compiler:
        pytest.skip("no C compiler")
    waits = "cuIpcOpenMemHandle_v2"
    others = [name for name in cuda_driver._FUNCTIONS if name != waits]
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in others)
    source, path = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text(SOURCE + functions + WAITS.replace("NAME", waits))
    flags = ["-shared", "-DLIMIT_MS=5000", "-Wno-error"]
    build.compile_files(compiler, path, [source], flags)
    monkeypatch.setattr(cuda_driver, "_SONAME", str(path))
    return ctypes.CDLL(str(path))


def test_a_call_that_waits_for_a_gpu_leaves_the_gil_to_the_engine(library):
    driver = CudaDriver()
    with ThreadPoolExecutor(1) as pool:
        mapped = pool.submit(driver.open_ipc, bytes(64))
        until(lambda: ctypes.c_int.in_dll(library, "is_in").value)
        ctypes.c_int.in_dll(library, "may_return").value = 1
        assert mapped.result() == (1, 0)


def test_a_function_that_the_driver_lacks_is_named(library):
    with pytest.raises(TransportError, match="cuFromTheFuture"):
        cuda_driver.load_libcuda("cuIpcOpenMemHandle_v2", "cuFromTheFuture")
