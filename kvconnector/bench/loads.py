"""The work of an engine's main thread and GPU beside transfers, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

from kvconnector.errors import ConfigError

LoadName = Literal["idle", "torch", "python", "decode", "prefill"]
"""No work, small torch operations, pure Python, a decode step's GPU kernels, or `PREFILL_STEP_S` of a GPU's time."""
LAYERS = 32
"""Layers of a step of small torch operations; each is four of them."""
PYTHON_ITERATIONS = 20_000
PREFILL_STEP_S = 0.05
# A step of the decode-like load reads 2 + 1 GiB of bfloat16: matrices, and caches of keys and of values that are layers
# x (sequences x heads) x tokens x elements.
WEIGHTS = (16, 8192, 8192)
CACHES = (8, 256, 1024, 128)
BATCH = 8


@cache
def make_step(name: LoadName, device: str) -> Callable[[], None]:
    """Return a function that runs one step and returns when it is over; with "prefill", when the step before it is, as
    with asynchronous scheduling. Raises ConfigError: the load does not run on this device.
    """
    if name == "torch":
        return _torch_step(device)
    if name in ("idle", "python"):
        return _python_step if name == "python" else lambda: None
    if device == "cpu":
        raise ConfigError(
            "the load consists of GPU kernels, so it needs caches on a GPU",
            load=name,
            device=device,
        )
    return _decode_step(device) if name == "decode" else _prefill_step(device)


def _python_step() -> None:
    """Run interpreted code for about a millisecond, which releases the GIL only when it has to."""
    total = 0
    for value in range(PYTHON_ITERATIONS):
        total += value & 7


def _torch_step(device: str) -> Callable[[], None]:
    """Make a step of many small operations, as a decode step without CUDA graphs launches them, and a wait for them."""
    import torch

    hidden = torch.ones((BATCH, 256), device=device)
    weight = torch.full((256, 256), 1 / 256, device=device)

    def step() -> None:
        state = hidden
        for _ in range(LAYERS):
            state = torch.tanh(state @ weight) * 0.5 + hidden
        if device != "cpu":
            torch.cuda.current_stream(device).synchronize()

    return step


def _filled(device: str, *shape: int) -> Any:
    import torch

    return torch.full(shape, 1e-2, dtype=torch.bfloat16, device=device)


def _decode_step(device: str) -> Callable[[], None]:
    """Make a step of memory-bound kernels in one CUDA graph, for the weights of a small batch and long caches."""
    import torch

    weights = [_filled(device, *WEIGHTS[1:]) for _ in range(WEIGHTS[0])]
    caches = [
        (_filled(device, *CACHES[1:]), _filled(device, *CACHES[1:])) for _ in range(CACHES[0])
    ]
    hidden = _filled(device, BATCH, WEIGHTS[1])
    query = _filled(device, CACHES[1], 1, CACHES[3])

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
        torch.cuda.current_stream(device).synchronize()

    return step


def _products(device: str, rows: int) -> tuple[Callable[[int], Any], float]:
    """Return a function that queues matrix products on a stream and returns an event after them, and the seconds of
    one product. The stream becomes the current one.
    """
    import torch

    left, right = _filled(device, rows, 8192), _filled(device, 8192, 8192)
    # as in engines: the default stream would wait for other streams
    stream = torch.cuda.Stream(device)
    torch.cuda.set_stream(stream)

    def products(count: int) -> Any:
        for _ in range(count):
            torch.mm(left, right)
        return stream.record_event()

    count = 10 * (8192 // rows)
    products(count).synchronize()
    began_s = time.perf_counter()
    products(count).synchronize()
    return products, (time.perf_counter() - began_s) / count


def _prefill_step(device: str) -> Callable[[], None]:
    """Make a step of the number of large matrix products that take `PREFILL_STEP_S` here."""
    products, product_s = _products(device, 8192)
    count = round(PREFILL_STEP_S / product_s) or 1
    newest = products(count)

    def step() -> None:
        nonlocal newest
        before, newest = newest, products(count)
        before.synchronize()

    return step


@cache
def make_model(device: str) -> Callable[[float, int], Iterator[None]]:
    """Return a function that computes a step of the given seconds and layers, by matrix products on the current stream,
    or by pauses without a GPU. It yields when a layer is queued, or over, and ends when all layers are over.
    """
    if device == "cpu":
        return _pauses
    products, product_s = _products(device, 512)

    def kernels(seconds: float, num_layers: int) -> Iterator[None]:
        num_queued = 0
        for layer in range(1, num_layers + 1):
            num_due = round(seconds * layer / num_layers / product_s)
            products(num_due - num_queued)
            num_queued = num_due
            yield
        products(0).synchronize()

    return kernels


def _pauses(seconds: float, num_layers: int) -> Iterator[None]:
    began_s = time.perf_counter()
    for layer in range(1, num_layers + 1):
        time.sleep(max(0.0, began_s + seconds * layer / num_layers - time.perf_counter()))
        yield
