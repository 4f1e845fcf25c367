"""What the machine can do at all, measured beside each benchmark: memcpy, a raw socket, a copy between GPUs."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from kvconnector.bench.contract import Measurement
from kvconnector.errors import TransferTimeoutError

_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20


def repeat(operation: Callable[[], object], *, iterations: int, warmup: int) -> tuple[float, ...]:
    """Seconds of each of `iterations` calls, after `warmup` untimed ones."""
    for _ in range(warmup):
        operation()
    samples = []
    for _ in range(iterations):
        started = time.perf_counter()
        operation()
        samples.append(time.perf_counter() - started)
    return tuple(samples)


def memcpy(nbytes: int, *, iterations: int, warmup: int) -> Measurement:
    """One copy of that many bytes in host memory, by one thread."""
    source = np.full(nbytes, 1, dtype=np.uint8)
    target = np.full(nbytes, 2, dtype=np.uint8)
    samples = repeat(
        lambda: np.copyto(target, source), iterations=iterations, warmup=max(1, warmup)
    )
    return Measurement(
        contender="memcpy, one thread", part="limit", samples_s=samples, nbytes=nbytes
    )


def raw_socket(nbytes: int, *, iterations: int, warmup: int, timeout_s: float) -> Measurement:
    """A request of eight bytes over TCP on loopback, answered with that many bytes from and into plain memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(timeout_s)
        server = threading.Thread(target=_serve, args=(listener, timeout_s), daemon=True)
        server.start()
        with socket.create_connection(listener.getsockname(), timeout=timeout_s) as client:
            _tune(client)
            target = memoryview(bytearray(nbytes))
            samples = repeat(
                lambda: _fetch(client, target), iterations=iterations, warmup=max(1, warmup)
            )
        server.join(timeout_s)
    return Measurement(contender="raw TCP socket", part="limit", samples_s=samples, nbytes=nbytes)


def _serve(listener: socket.socket, timeout_s: float) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(timeout_s)
        _tune(connection)
        content = memoryview(b"")
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            (wanted,) = _REQUEST.unpack(request)
            if wanted != len(content):
                content = memoryview(bytes([1]) * wanted)
            connection.sendall(content)


def _fetch(client: socket.socket, target: memoryview) -> None:
    client.sendall(_REQUEST.pack(len(target)))
    got = 0
    while got < len(target):
        count = client.recv_into(target[got:])
        if not count:
            raise TransferTimeoutError("the socket was closed early", got=got, wanted=len(target))
        got += count


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def device_copy(
    nbytes: int, *, source: str, target: str, iterations: int, warmup: int
) -> Measurement:
    """One copy of that many bytes from GPU memory to GPU memory, until both GPUs are idle again."""
    import torch

    content = torch.ones(nbytes, dtype=torch.uint8, device=source)
    into = torch.zeros(nbytes, dtype=torch.uint8, device=target)

    def copy() -> None:
        into.copy_(content, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    copy()
    samples = repeat(copy, iterations=iterations, warmup=max(1, warmup))
    where = "one GPU's memory" if source == target else f"{source} to {target}"
    return Measurement(
        contender=f"plain copy, {where}", part="limit", samples_s=samples, nbytes=nbytes
    )


def gpu_times(
    operation: Callable[[], object], *, device: str, iterations: int, warmup: int
) -> tuple[float, ...]:
    """GPU seconds of each call by events on the current stream.

    The calls are queued without waiting in between, so that the host's part shows only where it is the longer one.
    """
    import torch

    with torch.cuda.device(device):
        for _ in range(max(1, warmup)):
            operation()
        torch.cuda.synchronize()
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(iterations)
        ]
        for begin, end in pairs:
            begin.record()
            operation()
            end.record()
        torch.cuda.synchronize()
        return tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
