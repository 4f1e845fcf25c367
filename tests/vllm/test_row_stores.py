"""K and V that vLLM's backends store with their own kernels: moving some rows leaves what a kernel leaves that stores
only these.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.vllm.cache_world import NAMES, read, registered
from tests.vllm.row_stores import CASES, PART, SIZE, STORES, plain_spec, stored

# the kernels run in a process of their own, which imports vLLM: longer than a test may take where others run beside it
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

SAVE = """
import sys
from tests.vllm.kernel_pages import with_triton
with_triton()
from tests.vllm.row_stores import save
save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the kernels have stored in Triton's interpreter."""
    file = tmp_path_factory.mktemp("rows") / "stored"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run(
        [sys.executable, "-c", SAVE, str(file)], env=environment, check=True, timeout=250
    )
    return torch.load(file)


def check_moved(found, name, layout):
    """Move `PART` of the rows that were stored, a block and a half, and compare all memory."""
    spec = replace(plain_spec(name), state_content_bytes=found["content"])
    source, theirs = registered(spec, KVCacheLayout[layout], STORES[name][0])
    target, ours = registered(spec, KVCacheLayout[layout], STORES[name][0])
    memories = [
        torch.tensor([], dtype=torch.uint8).set_(caches[NAMES[1]].untyped_storage())
        for caches in (theirs, ours)
    ]
    memories[0].copy_(found["whole"])
    memories[1].copy_(found["first"])  # some backends write scales of 1 into all rows first
    for their_view, our_view in zip(source.cache.views[1], target.cache.views[1], strict=True):
        for row in range(PART):
            at = row // SIZE, slice(None), row % SIZE
            read(our_view)[at] = read(their_view)[at]
    assert torch.equal(memories[1], found["part"])
    assert not torch.equal(found["whole"], found["part"])


@pytest.mark.parametrize("name, layout", CASES)
def test_rows_that_a_backend_stored_are_moved(interpreted, name, layout):
    if interpreted[name, layout] is None:
        pytest.skip(f"this release of vLLM has no {STORES[name][0]}")
    check_moved(interpreted[name, layout], name, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("name, layout", CASES)
def test_rows_that_a_backend_stored_on_a_gpu_are_moved(name, layout):
    check_moved(stored(name, layout, "cuda"), name, layout)
