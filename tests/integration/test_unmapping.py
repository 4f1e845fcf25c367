"""Producers that close while consumers have mapped their CUDA memory; on a CPU they only believe that it is mapped."""

import multiprocessing
import time

import pytest

import kvconnector as kvc
from kvconnector.datapath.direct.mappings import Mappings
from kvconnector.errors import MemoryInUseError
from kvconnector.runtime import driver_thread
from tests.integration import runtime_pair as rp
from tests.unit.runtime.test_unmapping import cuda_export

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

NUM_BLOCKS, NUM_TOKENS, LAYERS = 64, 1024, range(4)


def test_close_names_the_consumers_that_do_not_unmap_the_caches(start, monkeypatch):
    p, d = start("p", "producer"), start("d", "consumer")
    (worker,) = p.workers
    theirs, ours = (engine.workers[0]._thread._datapath for engine in (p, d))
    export = cuda_export(theirs.export())
    monkeypatch.setattr(theirs, "export", lambda: export)
    monkeypatch.setattr(ours, "open_export", lambda link, export: "mapped")
    monkeypatch.setattr(ours, "close_export", lambda link, then: None)
    d.load("w", p.offer("r", [1, 2], 30), [5, 6], 31)
    rp.until(lambda: "w" in d.received and "r" in p.sent, d, p)
    monkeypatch.setattr(driver_thread, "UNMAP_TIMEOUT_S", 0.1)
    p.workers.clear()
    for _ in range(2):
        with pytest.raises(MemoryInUseError, match=r"not unmapped .*'d rank \(0, 0\)'"):
            worker.close()


class GpuEngine:
    """An engine of one rank with its caches on a GPU."""

    def __init__(self, engine_id, role, device):
        import torch

        shape = (NUM_BLOCKS, 8, 16, 64)
        self.caches = {
            layer: tuple(torch.zeros(shape, device=device) for _ in range(2)) for layer in LAYERS
        }
        settings = {"control": {"insecure": True}, "paths": {"direct": "always"}}
        config = kvc.Config.from_mapping({"engine_id": engine_id, "role": role, **settings})
        self.worker = kvc.Worker(config, rank=(0, 0), model="m")
        self.worker.register(self.caches)
        self.scheduler = kvc.Scheduler(config, [self.worker.handshake()])

    def step(self):
        self.worker.start_step(self.scheduler.build_step())

    def load(self, params):
        """Load all tokens into the blocks they have at the producer; the path that they took."""
        self.scheduler.on_new_request("r", params)
        count, _ = self.scheduler.matched_tokens("r", NUM_TOKENS + 1, 0)
        self.scheduler.load("r", blocks=[list(range(NUM_BLOCKS))], num_tokens=count)
        self.step()
        assert self.worker.wait(rp.DEADLINE_S)
        output = self.worker.poll()
        assert not output.failed_recving
        return output.stats.transfers[0].path


def _consume(pipe, params, device, unmaps):
    """A consumer in a process of its own, which goes on until it is told to end."""
    close, unmapped_at = Mappings.close, []

    def close_and_note(mappings):
        if unmaps:
            close(mappings)
            unmapped_at.append(time.monotonic())
        else:
            time.sleep(2 * driver_thread.UNMAP_TIMEOUT_S)

    Mappings.close = close_and_note
    engine = GpuEngine("d", "consumer", device)
    path = engine.load(params)
    values = {tensor.min().item() for parts in engine.caches.values() for tensor in parts}
    pipe.send((path, values))
    pipe.recv()
    pipe.send(unmapped_at)
    engine.worker.close()
    engine.scheduler.close()


@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", ["unmaps", "hangs", "is killed"])
def test_a_consumer_that_has_mapped_the_memory_of_another_gpu(case):
    import torch

    p = GpuEngine("p", "producer", "cuda:0")
    for parts in p.caches.values():
        for tensor in parts:
            tensor.fill_(7.0)
    blocks = [list(range(NUM_BLOCKS))]
    params = p.scheduler.offer("r", blocks=blocks, num_tokens=NUM_TOKENS)
    p.step()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_consume, args=(theirs, params, "cuda:1", case != "hangs"))
    process.start()
    try:
        assert pipe.poll(2 * rp.DEADLINE_S)
        assert pipe.recv() == ("direct", {7.0})
        if case == "is killed":
            process.kill()
            p.worker.close()
        elif case == "hangs":
            with pytest.raises(MemoryInUseError, match="d rank"):
                p.worker.close()
        else:
            p.worker.close()
            closed_at = time.monotonic()
            pipe.send("end")
            assert pipe.poll(rp.DEADLINE_S)
            assert max(pipe.recv()) < closed_at
    finally:
        process.kill()
        process.join(rp.DEADLINE_S)
        p.scheduler.close()
    del p, parts, tensor
    torch.cuda.synchronize()
