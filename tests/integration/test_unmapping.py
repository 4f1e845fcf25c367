"""Producers that close while consumers have mapped their CUDA memory, which on a CPU is only pretended."""

import multiprocessing
import time

import pytest
from msgspec.structs import replace

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.errors import MemoryInUseError
from kvconnector.runtime import driver_thread
from tests.integration.runtime_pair import Engine, arrives, same, until
from tests.support.waiting import DEADLINE_S
from tests.unit.runtime.test_unmapping import SEGMENTED, cuda_export

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

BLOCKS, NUM_TOKENS = list(range(64)), 1024


def _pretend_to_map(link, export, routes):
    link.maps_pools = True
    return "pretended"


def test_close_names_the_consumers_that_do_not_unmap_the_caches(start, monkeypatch):
    p, d = start("p", "producer"), start("d", "consumer")
    (worker,) = p.workers
    theirs, ours = (engine.workers[0]._thread._datapath for engine in (p, d))
    monkeypatch.setattr(theirs, "export", cuda_export(theirs.export))
    monkeypatch.setattr(ours.reads, "open", _pretend_to_map)
    monkeypatch.setattr(ours.reads, "submit", ours.receives.submit)
    monkeypatch.setattr(ours.reads, "close", lambda link, then: None)
    d.load("w", p.offer("r", [1, 2], 30), [5, 6], 31)
    until(lambda: "w" in d.received and "r" in p.sent, d, p)
    monkeypatch.setattr(driver_thread, "UNMAP_TIMEOUT_S", 0.1)
    p.workers.clear()
    for _ in range(2):
        with pytest.raises(MemoryInUseError, match=r"not unmapped .*'d rank \(0, 0\)'"):
            worker.close()


def test_sleep_names_the_consumers_that_do_not_unmap_the_caches(start, monkeypatch):
    p, d = start("p", "producer"), start("d", "consumer")
    (worker,) = p.workers
    theirs, ours = (engine.workers[0]._thread._datapath for engine in (p, d))
    exported = replace(theirs.export, device="cuda", ranges=(), segments=(SEGMENTED,))
    monkeypatch.setattr(theirs, "export", exported)
    monkeypatch.setattr(theirs, "_export_again", lambda: replace(exported, epoch=1))
    monkeypatch.setattr(ours.reads, "open", _pretend_to_map)
    monkeypatch.setattr(ours.reads, "submit", ours.receives.submit)
    closing = []

    def close(link, then):
        if link.maps_pools:
            closing.append((link, then))
        else:
            then()

    monkeypatch.setattr(ours.reads, "close", close)
    d.load("w", p.offer("r", [1, 2], 30), [5, 6], 31)
    until(lambda: "w" in d.received and "r" in p.sent, d, p)
    with pytest.raises(MemoryInUseError, match=r"not unmapped .*'d rank \(0, 0\)'"):
        worker.quiesce(0.1)
    ((link, then),) = closing
    link.maps_pools = False
    then()
    worker.quiesce(DEADLINE_S)
    worker.resume()
    until(lambda: link.maps_pools, d, p)
    closing.clear()
    monkeypatch.setattr(ours.reads, "close", lambda link, then: then())
    assert arrives(p, d, "again", [1, 2], [7, 8])


def _consume(pipe, params, unmaps):
    """Run a consumer, in a process of its own, until it is asked to end."""
    close, unmapped_at = RemotePools.close, []

    def close_and_note(pools):
        if unmaps:
            close(pools)
            unmapped_at.append(time.monotonic())
        else:
            time.sleep(2 * driver_thread.UNMAP_TIMEOUT_S)

    RemotePools.close = close_and_note
    d = Engine("d", "consumer", device="cuda:1", paths={"direct": "always"})
    d.load("r", params, BLOCKS, NUM_TOKENS + 1)
    until(lambda: "r" in d.received, d)
    pipe.send((d.failed, d.paths["r"], d.dense(BLOCKS, NUM_TOKENS)))
    pipe.recv()
    pipe.send(unmapped_at)
    d.close()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", ["unmaps", "hangs", "is killed"])
def test_a_consumer_that_has_mapped_the_memory_of_another_gpu(case):
    import torch

    p = Engine("p", "producer", seed=1, device="cuda:0", paths={"direct": "always"})
    (worker,) = p.workers
    params = p.offer("r", BLOCKS, NUM_TOKENS)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_consume, args=(theirs, params, case != "hangs"))
    process.start()
    try:
        assert pipe.poll(2 * DEADLINE_S)
        failed, paths, found = pipe.recv()
        assert (failed, paths) == ({}, {"direct"})
        assert same(p.dense(BLOCKS, NUM_TOKENS), found)
        if case == "is killed":
            process.kill()
            worker.close()
        elif case == "hangs":
            with pytest.raises(MemoryInUseError, match="d rank"):
                worker.close()
        else:
            worker.close()
            closed_at = time.monotonic()
            pipe.send("end")
            assert pipe.poll(DEADLINE_S)
            assert max(pipe.recv()) < closed_at
    finally:
        process.kill()
        process.join(DEADLINE_S)
        p.scheduler.close()
    del p, worker
    torch.cuda.synchronize()
