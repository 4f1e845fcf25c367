"""What an engine's main thread does beside the connector, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvconnector.bench.messages import LoadName
from kvconnector.errors import ConfigError

LAYERS = 32
"""Layers of a step of small torch operations; each is four of them."""

PYTHON_ITERATIONS = 20_000

# What a step of the decode-like load reads, 2 + 1 GiB of bfloat16: matrices, and caches of keys and of values that are
# layers x (sequences x heads) x tokens x elements.
WEIGHTS = (16, 8192, 8192)
CACHES = (8, 256, 1024, 128)
BATCH = 8


def make_step(name: LoadName, device: str) -> Callable[[], None] | None:
    """A function that runs one step and returns when it is over; None for an engine that has nothing to do.

    Raises:
        ConfigError: the load does not run on this device.
    """
    return _MAKERS[name](device)


def _idle(_device: str) -> None:
    return None


def _python(_device: str) -> Callable[[], None]:
    """About a millisecond of interpreted code, which gives the GIL up only when it is made to."""

    def step() -> None:
        total = 0
        for value in range(PYTHON_ITERATIONS):
            total += value & 7

    return step


def _torch(device: str) -> Callable[[], None]:
    """Many small operations, as a decode step without CUDA graphs launches them, and a wait for their result."""
    import torch

    hidden = torch.ones((BATCH, 256), device=device)
    weight = torch.full((256, 256), 1 / 256, device=device)

    def step() -> None:
        state = hidden
        for _ in range(LAYERS):
            state = torch.tanh(state @ weight) * 0.5 + hidden
        _settle(torch, device)

    return step


def _decode(device: str) -> Callable[[], None]:
    """Memory-bound kernels in one CUDA graph: reading weights for a small batch, and attention over long caches."""
    if device == "cpu":
        raise ConfigError("the decode load is made of GPU kernels", device=device)
    import torch

    def filled(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1e-2, dtype=torch.bfloat16, device=device)

    weights = [filled(*WEIGHTS[1:]) for _ in range(WEIGHTS[0])]
    caches = [(filled(*CACHES[1:]), filled(*CACHES[1:])) for _ in range(CACHES[0])]
    hidden = filled(BATCH, WEIGHTS[1])
    query = filled(CACHES[1], 1, CACHES[3])

    def kernels() -> None:
        for weight in weights:
            torch.mm(hidden, weight)
        for keys, values in caches:
            scores = torch.bmm(query, keys.transpose(1, 2))
            torch.bmm(torch.softmax(scores, dim=-1), values)

    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            kernels()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()

    def step() -> None:
        graph.replay()
        _settle(torch, device)

    return step


def _settle(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


_MAKERS: Mapping[LoadName, Callable[[str], Callable[[], None] | None]] = MappingProxyType(
    {"idle": _idle, "torch": _torch, "python": _python, "decode": _decode}
)
