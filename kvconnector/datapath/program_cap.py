"""How many programs of a copy kernel run at a time, so that a model beside them keeps its share of the GPU."""

from __future__ import annotations

SHARE_OF_MULTIPROCESSORS = 2
"""Half of them reach what NVLink brings, within 2 %, and leave decode kernels three times the steps that copies on all
of them do; fewer make transfers slower and kernels beside them hardly faster. ARCHITECTURE has the figures.
"""


def program_cap(max_programs: int, device: str) -> int:
    """The cap for copies on `device` ("cpu" or "cuda:N"), 0 for none; below 0 is for the device's default."""
    if max_programs >= 0 or device == "cpu":
        return max(max_programs, 0)
    import torch

    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, count // SHARE_OF_MULTIPROCESSORS)
