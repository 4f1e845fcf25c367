"""An engine whose pools' memory is mapped segment by segment sleeps and wakes, and a consumer reads it directly."""

from itertools import count

import pytest

from tests.integration.runtime_pair import Engine, same
from tests.support.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

MiB = 1 << 20
SHAPE = {"head_dim": 128, "block": 16, "num_blocks": 1024}
"""Four layers of K and V, each 16 MiB."""
SIZES = [48 * MiB, 32 * MiB, 32 * MiB, 32 * MiB]
"""Of the segments. A layer lies across each border between two of them."""
BLOCKS, NUM_TOKENS = list(range(3, 67)), 1024
PATHS = {"paths": {"direct": "always"}}


def load(p, d, name):
    """Returns the path by which a request's tokens came to the consumer, which is in a process of its own."""
    d.load(name, p.offer(name, BLOCKS, NUM_TOKENS), BLOCKS, NUM_TOKENS + 1)

    def step():
        for engine in (p, d):
            engine.step()

    until(lambda: name in d.call("received") and name in p.sent, step)
    assert name not in d.call("failed")
    assert same(p.dense(BLOCKS, NUM_TOKENS), d.dense(BLOCKS, NUM_TOKENS))
    (path,) = d.call("paths")[name]
    return path


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param("cuda:0", id="same GPU", marks=pytest.mark.gpu),
        pytest.param("cuda:1", id="other GPU", marks=pytest.mark.multi_gpu),
    ],
)
def test_a_producer_sleeps_and_wakes_with_new_memory(start, theirs):
    import torch

    from tests.support.gpu_segments import SegmentedMemory

    memory = SegmentedMemory(theirs, SIZES, lead=MiB)
    p = start("p", "producer", device=theirs, place=memory.place, shape=SHAPE, **PATHS)
    d = start(
        "d", "consumer", elsewhere=True, prefix=("env",), device="cuda:0", shape=SHAPE, **PATHS
    )
    assert isinstance(p, Engine)
    (worker,) = p.workers
    assert load(p, d, "before") == "direct"
    for turn in range(2):
        free_bytes, _ = torch.cuda.mem_get_info(theirs)
        worker.quiesce(DEADLINE_S)
        for index in range(len(SIZES)):
            memory.unmap(index)
        # A segment that anybody still maps keeps all of its memory, so without the smallest one at most this much is
        # free again. Others on the card may allocate less than that meanwhile, as drivers do for the kernels they load.
        freed_bytes = torch.cuda.mem_get_info(theirs)[0] - free_bytes
        assert freed_bytes > sum(SIZES) - min(SIZES)
        for index in range(len(SIZES)):
            memory.map(index)
        for caches in p.caches:
            for group in range(len(caches.rank.groups)):
                caches.scribble(group, range(1024))
        worker.resume()
        # until the consumer has mapped the new memory, reads are packed, and as right
        names = (f"{turn}-{number}" for number in count())
        until(lambda names=names: load(p, d, next(names)) == "direct", lambda: None)
