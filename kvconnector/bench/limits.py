"""What the machine can do at all, measured beside each benchmark: memcpy, a raw socket, a copy between GPUs."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

import numpy as np

from kvconnector.bench.contract import Measurement
from kvconnector.bench.owner import Owner
from kvconnector.errors import PeerLostError

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


def timed(operation: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


class HostCopy:
    """Copies of that many bytes in host memory, by one thread."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.full(nbytes, 1, dtype=np.uint8)
        self._target = np.full(nbytes, 2, dtype=np.uint8)

    def move(self) -> float:
        """Seconds of one copy."""
        return timed(lambda: np.copyto(self._target, self._source))


def memcpy(nbytes: int, *, iterations: int, warmup: int) -> Measurement:
    """One copy of that many bytes in host memory, by one thread."""
    copy = HostCopy(nbytes)
    for _ in range(max(1, warmup)):
        copy.move()
    samples = tuple(copy.move() for _ in range(iterations))
    return Measurement(
        contender="memcpy, one thread", part="limit", samples_s=samples, nbytes=nbytes
    )


class SocketStream(Owner):
    """A request of eight bytes over TCP on loopback, answered with that many bytes from and into plain memory.

    The memory is as much as a transfer's own, each page of it is written before the first request, and it is touched
    only when it is this limit's turn, as a transfer's is. What came last is in `target`.
    """

    def __init__(self, nbytes: int, *, timeout_s: float) -> None:
        self.target = memoryview(bytearray(b"\2") * nbytes)
        with ExitStack() as exits:
            listener = exits.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(timeout_s)
            server = threading.Thread(target=_serve, args=(listener, timeout_s), daemon=True)
            server.start()
            exits.callback(server.join, timeout_s)
            self._client = exits.enter_context(
                socket.create_connection(listener.getsockname(), timeout=timeout_s)
            )
            _tune(self._client)
            super().__init__(exits)

    def move(self) -> float:
        """Seconds of one request. Raises PeerLostError if the answer ends early."""
        return timed(lambda: _fetch(self._client, self.target))


def _serve(listener: socket.socket, timeout_s: float) -> None:
    """Answer one client until it leaves. Whatever ends this early closes the connection, and the client says so."""
    content = memoryview(b"")
    with suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(timeout_s)
            _tune(connection)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                (wanted,) = _REQUEST.unpack(request)
                if wanted != len(content):
                    content = memoryview(bytearray(b"\1") * wanted)
                connection.sendall(content)


def _fetch(client: socket.socket, target: memoryview) -> None:
    got = 0
    try:
        client.sendall(_REQUEST.pack(len(target)))
        while got < len(target):
            count = client.recv_into(target[got:])
            if not count:
                raise PeerLostError("the socket was closed early", got=got, wanted=len(target))
            got += count
    except OSError as error:
        raise PeerLostError(f"the socket failed: {error}", got=got, wanted=len(target)) from error


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


class DeviceCopies:
    """Plain copies of that many bytes from GPU memory to GPU memory, all at once, by (source, target)."""

    def __init__(self, nbytes: Mapping[tuple[str, str], int]) -> None:
        import torch

        self._torch = torch
        self._copies = [
            (
                torch.ones(count, dtype=torch.uint8, device=source),
                torch.zeros(count, dtype=torch.uint8, device=target),
                # a copy between GPUs waits for the current streams of both: each gets its own
                (torch.cuda.Stream(source), torch.cuda.Stream(target)),
            )
            for (source, target), count in nbytes.items()
        ]
        self._devices = sorted({device for pair in nbytes for device in pair})
        first = next(iter(nbytes))
        where = "one GPU's memory" if first[0] == first[1] else f"{first[0]} to {first[1]}"
        self.name = (
            f"plain copy, {where}" if len(nbytes) == 1 else f"{len(nbytes)} plain copies at once"
        )
        self._settle()

    def move(self) -> float:
        """Seconds of one round of copies, until all GPUs are idle again."""
        return timed(self._copy)

    def _copy(self) -> None:
        for source, target, streams in self._copies:
            with self._torch.cuda.stream(streams[0]), self._torch.cuda.stream(streams[1]):
                target.copy_(source, non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        for device in self._devices:
            self._torch.cuda.synchronize(device)


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
