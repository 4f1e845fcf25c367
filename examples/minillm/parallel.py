"""Parallelism over torch.distributed: all-reduce in a stage, hidden states to the next one, and the exchange among
ranks that share a sequence's tokens.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from minillm.config import ParallelConfig


def choose_backend(device: str, world_size: int) -> str:
    """NCCL if each rank has a GPU of its own, else gloo (which copies GPU tensors through the host)."""
    if device == "cuda" and torch.cuda.device_count() >= world_size:
        return "nccl"
    return "gloo"


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
        self._dcp_group: dist.ProcessGroup | None = None
        if parallel.world_size == 1:
            return
        dist.init_process_group(
            backend,
            store=FileStore(str(store_path), parallel.world_size),
            rank=global_rank,
            world_size=parallel.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._tp_group = self._own_group(parallel.tp_size, timeout_s)
        self._dcp_group = self._own_group(parallel.dcp_size, timeout_s)

    def _own_group(self, size: int, timeout_s: float) -> dist.ProcessGroup | None:
        """Make a group of each run of `size` ranks, in the same order on all ranks. Returns this rank's group."""
        found = None
        for first in range(0, self.parallel.world_size if size > 1 else 0, size):
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            found = group if self.global_rank in ranks else found
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over this stage's tensor-parallel ranks. May work in place; use the result."""
        if self.parallel.tp_size == 1:
            return tensor
        staged = tensor.cpu() if self.host_copies else tensor
        dist.all_reduce(staged, group=self._tp_group)
        return staged.to(tensor.device)

    def gather_shares(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors, of one shape, of all ranks that share this one's tokens, in the order of their shares."""
        staged = (tensor.cpu() if self.host_copies else tensor).contiguous()
        shares = [torch.empty_like(staged) for _ in range(self.parallel.dcp_size)]
        dist.all_gather(shares, staged, group=self._dcp_group)
        return tuple(share.to(tensor.device) for share in shares)

    def send_forward(self, hidden_TE: Tensor) -> None:
        """Send `[tokens, hidden_size]` to the same tensor rank of the next stage."""
        staged = hidden_TE.cpu() if self.host_copies else hidden_TE
        dist.send(staged.contiguous(), self.global_rank + self.parallel.tp_size)

    def recv_forward(self, num_tokens: int, hidden_size: int) -> Tensor:
        """Receive the previous stage's `[num_tokens, hidden_size]`, float32."""
        hidden_TE = torch.empty(
            num_tokens, hidden_size, device="cpu" if self.host_copies else self.device
        )
        dist.recv(hidden_TE, self.global_rank - self.parallel.tp_size)
        return hidden_TE.to(self.device)

    def close(self) -> None:
        """Leave the groups; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
