"""Bytes of every rank, in every rank, over SGLang's process group for the CPU."""

from __future__ import annotations

import torch
from torch import distributed


def gather(payload: bytes, group: distributed.ProcessGroup) -> list[bytes]:
    """Hand each rank's bytes to all ranks; the group's own timeout ends the wait.

    Args:
        payload: Of this rank; not empty.
        group: All ranks of the engine.

    Returns:
        In the order of the ranks.
    """
    size = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    distributed.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    longest = int(max(length.item() for length in lengths))
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    distributed.all_gather(parts, own, group=group)
    return [
        part[: int(length.item())].numpy().tobytes()
        for part, length in zip(parts, lengths, strict=True)
    ]
