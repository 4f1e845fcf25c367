"""One rank of an engine: `python -m minillm.worker --config FILE --rank N`. Model, cache and connector worker.

It serves steps from its PAIR socket until a `Shutdown` arrives. The kernel kills it when its engine dies.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import zmq

from kvconnector.errors import ConfigError
from minillm.batch import Batch
from minillm.block_moves import BlockMover
from minillm.cache_groups import (
    cache_limits,
    host_config,
    layer_groups,
    num_stored_host_blocks,
    pool_sizes,
    rank_pool,
    uniform_specs,
)
from minillm.config import EngineConfig, load_engine_config
from minillm.messages import (
    Failed,
    FromWorker,
    Ready,
    SampledToken,
    Shutdown,
    Step,
    StepResult,
    encoder,
    stored_event,
    to_worker_decoder,
)
from minillm.model import Stage
from minillm.paged_cache import PagedCache
from minillm.parallel import ProcessGroups, choose_backend
from minillm.partition import rank_share
from minillm.processes import die_with_parent, log_to_stderr
from minillm.rank_tables import create_rank_tables
from minillm.transfer import WorkerTransfer
from minillm.weights import RankWeights

logger = logging.getLogger(__name__)


def choose_device(config: EngineConfig, global_rank: int) -> str:
    """Return this rank's device; ranks share GPUs when there are fewer.

    Raises:
        ConfigError: A GPU is requested, but torch sees none.
    """
    if config.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device", torch_version=torch.__version__)
    index = (config.device_offset + global_rank) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    # the greedy tokens of two engines are compared exactly: no TF32, neither in products nor in convolutions
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return f"cuda:{index}"


class RankWorker:
    """The model share, cache and connector half of one rank."""

    def __init__(self, config: EngineConfig, global_rank: int, run_dir: Path) -> None:
        self.config = config
        self.transfer = WorkerTransfer()
        self.device = choose_device(config, global_rank)
        share = rank_share(config.model, config.parallel, global_rank)
        self.groups = ProcessGroups(
            config.parallel,
            global_rank,
            device=self.device,
            backend=choose_backend(config.device, config.parallel.world_size),
            store_path=run_dir / "store",
            timeout_s=config.step_timeout_s,
        )
        groups = layer_groups(config.model, config.cache, config.parallel.dcp_size)
        sizes = pool_sizes(config)

        def cache_of(
            config: EngineConfig, counts: Sequence[int], device: str, *, pinned: bool = False
        ) -> PagedCache:
            groups = layer_groups(config.model, config.cache, config.parallel.dcp_size)
            pools = [rank_pool(config, share, *each) for each in enumerate(counts)]
            layout = config.resolved_layout
            return PagedCache(share, groups, pools, layout=layout, device=device, pinned=pinned)

        self.cache = cache_of(config, [size.num_blocks for size in sizes], self.device)
        host_blocks = num_stored_host_blocks(config, sizes)
        host = None
        if any(host_blocks):
            host = cache_of(host_config(config), host_blocks, "cpu", pinned=config.device == "cuda")
        for pool, size in enumerate(sizes):
            for kind in uniform_specs(config, share, pool):
                what = f"{size.num_blocks} blocks" if kind.is_cached else "nothing"
                logger.info("pool %d: %s of %s", pool, what, ", ".join(kind.kv_cache_specs))
        self.mover = BlockMover(self.cache, host)
        limits = cache_limits(config)
        self.tables = create_rank_tables(
            config.resolved_block_tables,
            groups,
            max_rows=config.max_running,
            max_model_len=max(limits.max_model_len, limits.max_num_encoder_tokens),
            max_batched_tokens=config.max_batched_tokens,
            device=self.device,
            context_parallel=share.context_parallel,
        )
        self.tables.warm_up()
        weights = RankWeights(config.model, share, self.device)
        self.stage = Stage(weights, self.cache, self.groups)
        if config.role != "mono":
            # imported here so that a rank without a connector starts without its transports and kernels
            from minillm.worker_transfer import ConnectorWorkerTransfer

            self.transfer = ConnectorWorkerTransfer(config, share, self.cache)

    def ready(self) -> Ready:
        """Return this rank's greeting, with the connector's handshake metadata."""
        return Ready(self.transfer.handshake())

    def run(self, step: Step) -> StepResult:
        """Run one step: move blocks, give the connector its metadata, compute, collect finished transfers."""
        if step.moves:
            self.mover.run(step.moves)
            # the connector may receive into blocks whose content was just moved away
            self._synchronize()
        self.transfer.start_step(step.connector)
        tokens: dict[str, list[SampledToken]] = {}
        self.tables.update(step.tables)
        if step.inputs:
            groups = self.cache.groups
            batch = Batch.build(step.inputs, groups, self.tables, step.common_blocks)
            sampled = self.stage.run(batch, self.transfer.layer_written)
            # the scheduler may offer this step's cache to a consumer as soon as all ranks have answered
            self._synchronize()
            if sampled:
                left = iter(sampled)
                tokens = {
                    item.request_id: list(islice(left, item.num_samples))
                    for item in step.inputs
                    if item.num_samples
                }
        elif step.idle_wait_s > 0:
            self.transfer.wait(step.idle_wait_s)
        return StepResult(
            step_id=step.step_id,
            tokens=tokens,
            connector=self.transfer.poll(tuple(map(stored_event, step.inputs))),
        )

    def _synchronize(self) -> None:
        if self.config.device == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Close the connector first: it must not read caches that are being freed."""
        self.transfer.close()
        self.groups.close()


def serve(socket: zmq.Socket[bytes], config: EngineConfig, global_rank: int, run_dir: Path) -> int:
    """Serve steps until `Shutdown`. Returns the exit status; an error is reported to the engine first."""

    def send(message: FromWorker) -> None:
        socket.send(encoder.encode(message))

    worker: RankWorker | None = None
    try:
        worker = RankWorker(config, global_rank, run_dir)
        send(worker.ready())
        while True:
            message = to_worker_decoder.decode(socket.recv())
            if isinstance(message, Shutdown):
                return 0
            send(worker.run(message))
    except Exception as error:  # whatever it is, the engine must learn of it
        traceback.print_exc()
        send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        if worker is not None:
            worker.close()


def main() -> int:
    """Entry point of the rank process."""
    parser = argparse.ArgumentParser(prog="minillm.worker")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(signal.SIGKILL)
    log_to_stderr()
    torch.set_num_threads(1)
    # the ranks of one engine share a host; gloo would otherwise listen wherever the host's name resolves to
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = load_engine_config(arguments.config)
    run_dir = arguments.config.parent
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(f"ipc://{run_dir}/rank{arguments.rank}")
    try:
        return serve(socket, config, arguments.rank, run_dir)
    finally:
        socket.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
