"""An engine whose ranks are processes: two prefill ranks, one decode rank. Run `python examples/embed_ranks.py`."""

from multiprocessing import get_context
from multiprocessing.connection import Connection

import msgspec
import torch

import kvconnector as kvc

LAYERS, BLOCKS, HEADS, HEAD_DIM = 4, 32, 8, 64
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def config_of(engine_id: str, role: str) -> kvc.Config:
    """Return an engine's settings, the same for all its processes."""
    base = {"engine_id": engine_id, "role": role, "control": {"insecure": True}}
    return kvc.Config.from_mapping(base)


def rank_process(pipe: Connection, engine_id: str, role: str, tp_rank: int, tp_size: int) -> None:
    """One rank: it sends its handshake, and then answers each step with what has ended. It has no scheduler."""
    heads = kvc.TpKVTopology.heads_of(HEADS, tp_rank=tp_rank, tp_size=tp_size)
    shape = (BLOCKS, len(heads), 16, HEAD_DIM)
    values = torch.arange(heads.start, heads.stop).reshape(1, -1, 1, 1) * float(role == "producer")
    caches = {n: (values.expand(shape).clone(), torch.zeros(shape)) for n in range(LAYERS)}
    # its pipeline stage, and its place among the stage's ranks
    rank = kvc.Rank(pp_rank=0, tp_rank=tp_rank)
    with kvc.Worker(config_of(engine_id, role), rank=rank, model="my-model@rev1") as worker:
        worker.register(caches, total_heads=HEADS, head_start=heads.start)
        pipe.send_bytes(encode(worker.handshake()))
        while step := pipe.recv_bytes():
            worker.start_step(decode(step, type=kvc.StepMetadata))
            worker.wait(0.01)  # here the model would run
            pipe.send_bytes(encode(worker.poll()))
        pipe.send_bytes(encode(caches[0][0][5, :, 0, 0].tolist()))


class Engine:
    """An engine's scheduler process, with a pipe to each rank."""

    def __init__(self, engine_id: str, role: str, tp_size: int) -> None:
        spawn = get_context("spawn")
        self.pipes = []
        for tp_rank in range(tp_size):
            pipe, theirs = spawn.Pipe()
            arguments = (theirs, engine_id, role, tp_rank, tp_size)
            spawn.Process(target=rank_process, args=arguments).start()
            self.pipes.append(pipe)
        handshakes = [decode(pipe.recv_bytes(), type=kvc.WorkerMetadata) for pipe in self.pipes]
        self.scheduler = kvc.Scheduler(config_of(engine_id, role), handshakes)
        self.aggregator = kvc.KVOutputAggregator(tp_size)

    def step(self) -> kvc.WorkerOutput:
        """Send every rank the step, and merge their reports: a request has ended when it has ended in all of them."""
        step = encode(self.scheduler.build_step())
        for pipe in self.pipes:
            pipe.send_bytes(step)
        outputs = [decode(pipe.recv_bytes(), type=kvc.WorkerOutput) for pipe in self.pipes]
        output = self.aggregator.aggregate(outputs)
        assert output is not None  # every rank has reported
        self.scheduler.update(output)
        return output

    def close(self) -> list[list[float]]:
        """Stop the ranks. Returns for each rank the first value of its heads in block 5 of the first layer."""
        for pipe in self.pipes:
            pipe.send_bytes(b"")
        found = [decode(pipe.recv_bytes(), type=list[float]) for pipe in self.pipes]
        self.scheduler.close()
        return found


def main() -> None:
    """Load a block of 16 tokens whose heads two prefill ranks share."""
    prefill, engine = Engine("p0", "producer", 2), Engine("d0", "consumer", 1)
    params = prefill.scheduler.offer("r0", blocks=[[3]], num_tokens=16)
    engine.scheduler.on_new_request("r0", params)
    count, _ = engine.scheduler.matched_tokens("r0", 17, 0)
    engine.scheduler.load("r0", blocks=[[5]], num_tokens=count)
    prefill.step()
    while "r0" not in (output := engine.step()).finished_recving:
        prefill.step()
    print("failed:" if output.failed_recving else "loaded", *output.failed_recving.values())
    print("heads of block 5:", *engine.close())
    prefill.close()


if __name__ == "__main__":
    main()
