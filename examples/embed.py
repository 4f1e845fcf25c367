"""kvconnector in two engines: all calls that a prefill and a decode engine make. Run `python examples/embed.py`."""

import torch

import kvconnector as kvc

LAYERS, BLOCKS, HEADS, HEAD_DIM = range(4), 32, 8, 64


class Engine:
    """An engine of one rank: its caches, and the connector's two halves."""

    def __init__(self, engine_id: str, role: str, block_size: int) -> None:
        base = {"engine_id": engine_id, "role": role, "control": {"insecure": True}}
        config = kvc.Config.from_mapping(base)
        shape = (BLOCKS, HEADS, block_size, HEAD_DIM)
        self.caches = {layer: (torch.zeros(shape), torch.zeros(shape)) for layer in LAYERS}
        self.worker = kvc.Worker(config, rank=(0, 0), model="my-model@rev1")
        self.worker.register(self.caches, total_heads=HEADS, head_start=0)
        self.scheduler = kvc.Scheduler(config, [self.worker.handshake()])

    def step(self) -> kvc.WorkerOutput:
        """Run one step of the engine's loop."""
        self.worker.start_step(self.scheduler.build_step())
        self.worker.wait(0.01)  # here the model would run
        self.scheduler.update(output := self.worker.poll())
        return output


def main() -> None:
    """Move three blocks of 16 tokens into one of 64."""
    prefill, decode = Engine("p0", "producer", 16), Engine("d0", "consumer", 64)
    for keys, values in prefill.caches.values():
        keys.normal_(), values.normal_()
    # Prefill has computed a prompt of 40 tokens. It keeps the blocks; the router carries `params` to decode.
    params = prefill.scheduler.offer("r0", blocks=[[3, 1, 2]], num_tokens=40)
    decode.scheduler.on_new_request("r0", params)
    count, _ = decode.scheduler.matched_tokens("r0", 41, 0)
    decode.scheduler.load("r0", blocks=[[5]], num_tokens=count)
    outputs: list[kvc.WorkerOutput] = []
    # Each load ends within the connector's own deadlines. If it failed, `failed_recving` has the reason.
    while not outputs or "r0" not in outputs[-1].finished_recving:
        prefill.step()
        outputs.append(decode.step())
    decode.scheduler.finish("r0")
    print(
        "failed:" if outputs[-1].failed_recving else "loaded", *outputs[-1].failed_recving.values()
    )
    for layer, parts in prefill.caches.items():
        for sent, arrived in zip(parts, decode.caches[layer], strict=True):
            tokens = sent[[3, 1, 2]].transpose(0, 1).reshape(HEADS, 48, HEAD_DIM)[:, :40]
            assert torch.equal(arrived[5, :, :40], tokens)
    for engine in (prefill, decode):
        engine.worker.close()
        engine.scheduler.close()


if __name__ == "__main__":
    main()
