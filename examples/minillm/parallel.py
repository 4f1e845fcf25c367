"""Tensor and pipeline parallelism over torch.distributed: all-reduce in a stage, hidden states to the next one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from minillm.config import ParallelConfig


def choose_backend(device: str, world_size: int) -> str:
    """NCCL where each rank has a GPU of its own, else gloo (through host copies for GPU tensors)."""
    if device == "cuda" and torch.cuda.device_count() >= world_size:
        return "nccl"
    return "gloo"


class Communicator(Protocol):
    """What a model stage needs of its peers."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the tensor-parallel ranks of this stage. May work in place; use the result."""
        ...

    def send_forward(self, hidden_TE: Tensor) -> None:
        """Hand `[tokens, hidden_size]` to the same tensor rank of the next stage."""
        ...

    def recv_forward(self, num_tokens: int, hidden_size: int) -> Tensor:
        """The previous stage's `[num_tokens, hidden_size]`, float32."""
        ...


class ProcessGroups:
    """The communicator of a rank process, over torch.distributed. Every operation ends within `timeout_s`."""

    def __init__(
        self,
        parallel: ParallelConfig,
        global_rank: int,
        *,
        device: str,
        backend: str,
        store_path: Path,
        timeout_s: float,
    ) -> None:
        self.parallel = parallel
        self.global_rank = global_rank
        self.device = device
        self.host_copies = backend == "gloo" and device != "cpu"
        self._tp_group: dist.ProcessGroup | None = None
        if parallel.world_size == 1:
            return
        dist.init_process_group(
            backend,
            store=FileStore(str(store_path), parallel.world_size),
            rank=global_rank,
            world_size=parallel.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        for stage in range(parallel.pp_size):
            ranks = list(range(stage * parallel.tp_size, (stage + 1) * parallel.tp_size))
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if global_rank in ranks:
                self._tp_group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.parallel.tp_size == 1:
            return tensor
        staged = tensor.cpu() if self.host_copies else tensor
        dist.all_reduce(staged, group=self._tp_group)
        return staged.to(tensor.device)

    def send_forward(self, hidden_TE: Tensor) -> None:
        staged = hidden_TE.cpu() if self.host_copies else hidden_TE
        dist.send(staged.contiguous(), self.global_rank + self.parallel.tp_size)

    def recv_forward(self, num_tokens: int, hidden_size: int) -> Tensor:
        hidden_TE = torch.empty(
            num_tokens, hidden_size, device="cpu" if self.host_copies else self.device
        )
        dist.recv(hidden_TE, self.global_rank - self.parallel.tp_size)
        return hidden_TE.to(self.device)

    def close(self) -> None:
        """Leave the groups; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
