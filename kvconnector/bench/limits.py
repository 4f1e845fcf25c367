"""What the machine can do at all, measured beside each benchmark: memcpy, a raw socket, copies between GPUs."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np

from kvconnector.bench.contract import TIMEOUT_S, WARMUP, ContenderKind
from kvconnector.bench.engines import Deployment, Transfer, one_pair
from kvconnector.bench.shapes import engine_geometry
from kvconnector.errors import PeerLostError
from kvconnector.planning import plan_transfer
from kvconnector.topology import TpKVTopology

INGRESS = "plain copies into one GPU"
_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20


def repeat(
    operation: Callable[[], object], iterations: int, warmup: int = WARMUP
) -> tuple[float, ...]:
    """Seconds of each of `iterations` calls, after `warmup` untimed ones."""
    for _ in range(warmup):
        operation()
    return tuple(timed(operation) for _ in range(iterations))


def timed(operation: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def gpu_times(operation: Callable[[], object], device: str, iterations: int) -> tuple[float, ...]:
    """GPU seconds of each call by events on the current stream.

    The calls are queued without waiting in between, so that the host's part shows only where it is the longer one.
    """
    import torch

    with torch.cuda.device(device):
        for _ in range(WARMUP):
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


class HostCopy:
    """Copies of at most that many bytes in host memory, by one thread."""

    def __init__(self, nbytes: int) -> None:
        self._source = np.full(nbytes, 1, dtype=np.uint8)
        self._target = np.full(nbytes, 2, dtype=np.uint8)

    def move(self, nbytes: int) -> None:
        """One copy."""
        np.copyto(self._target[:nbytes], self._source[:nbytes])


class SocketStream:
    """A request of eight bytes over TCP, answered with that many bytes from and into plain memory.

    The memory is as much as a transfer's own, each page of it is written before the first request, and it is touched
    only when it is this limit's turn, as a transfer's is. What came last is in `target`.
    """

    def __init__(self, client: socket.socket, nbytes: int) -> None:
        self.target = memoryview(bytearray(b"\2") * nbytes)
        self._client = client
        tune(client)

    def move(self, nbytes: int) -> None:
        """One request. Raises PeerLostError if the answer ends early."""
        got = 0
        try:
            self._client.sendall(_REQUEST.pack(nbytes))
            while got < nbytes:
                count = self._client.recv_into(self.target[got:nbytes])
                if not count:
                    raise PeerLostError("the socket was closed early", got=got, wanted=nbytes)
                got += count
        except OSError as error:
            raise PeerLostError(f"the socket failed: {error}", got=got, wanted=nbytes) from error


@contextmanager
def socket_stream(nbytes: int) -> Iterator[SocketStream]:
    """A stream over loopback, served by a thread of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        server = threading.Thread(target=_serve, args=(listener, nbytes), daemon=True)
        server.start()
        with socket.create_connection(listener.getsockname(), timeout=TIMEOUT_S) as client:
            yield SocketStream(client, nbytes)
        server.join(TIMEOUT_S)


def _serve(listener: socket.socket, nbytes: int) -> None:
    """Answer one client until it leaves. Whatever ends this early closes the connection, and the client says so."""
    content = memoryview(bytearray(b"\1") * nbytes)
    with suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            tune(connection)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                connection.sendall(content[: _REQUEST.unpack(request)[0]])


def tune(connection: socket.socket) -> None:
    """No delay, long buffers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


class DeviceCopies:
    """Plain copies from GPU memory to GPU memory, all at once: of that many bytes by (source, target), or a part."""

    def __init__(self, nbytes: Mapping[tuple[str, str], int]) -> None:
        import torch

        self._torch = torch
        self._copies = [
            (
                torch.ones(count, dtype=torch.uint8, device=source),
                torch.zeros(count, dtype=torch.uint8, device=target),
                # A copy between GPUs waits for the current streams of both: each gets its own.
                (torch.cuda.Stream(source), torch.cuda.Stream(target)),
            )
            for (source, target), count in nbytes.items()
        ]
        self._total = sum(nbytes.values())
        self._devices = sorted({device for pair in nbytes for device in pair})
        first = next(iter(nbytes))
        where = "one GPU's memory" if first[0] == first[1] else f"{first[0]} to {first[1]}"
        self.name = (
            f"plain copy, {where}" if len(nbytes) == 1 else f"{len(nbytes)} plain copies at once"
        )

    def move(self, nbytes: int) -> None:
        """One round of copies, until all GPUs are idle again."""
        for source, target, streams in self._copies:
            count = len(source) * nbytes // self._total
            with self._torch.cuda.stream(streams[0]), self._torch.cuda.stream(streams[1]):
                target[:count].copy_(source[:count], non_blocking=True)
        for device in self._devices:
            self._torch.cuda.synchronize(device)


class Limit:
    """One limit, taking its turn among the contenders. It has nothing to prepare, to check or to pause."""

    def __init__(
        self, name: str, kind: ContenderKind, token_bytes: int, move: Callable[[int], None]
    ) -> None:
        self.name = name
        self.kind = kind
        self._token_bytes = token_bytes
        self._move = move

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds of moving as many bytes."""
        return (timed(lambda: self._move(transfer.num_tokens * self._token_bytes)),)


@contextmanager
def limits_of(deployment: Deployment, num_tokens: int) -> Iterator[list[Limit]]:
    """The limits that apply to these devices and transports, for requests of at most that many tokens."""
    token_bytes = deployment.options.model.token_bytes
    if deployment.options.device == "cpu":
        copy: ContenderKind = "limit" if deployment.options.transport.share_memory else "variant"
        memory = HostCopy(token_bytes * num_tokens)
        with socket_stream(token_bytes * num_tokens) as stream:
            yield [
                Limit("memcpy, one thread", copy, token_bytes, memory.move),
                Limit("raw TCP socket", "limit", token_bytes, stream.move),
            ]
        return
    copies = copies_of(deployment, num_tokens)
    plain = DeviceCopies(copies)
    found = [Limit(plain.name, "limit", token_bytes, plain.move)]
    if one_pair(deployment) is not None:
        target = deployment.devices()[1][0]
        sources = sorted({source for source, _ in copies} - {target}) or [target]
        share = -(-token_bytes * num_tokens // len(sources))
        into_one = DeviceCopies({(source, target): share for source in sources})
        found.append(Limit(INGRESS, "variant", token_bytes, into_one.move))
    yield found


def copies_of(deployment: Deployment, num_tokens: int) -> Counter[tuple[str, str]]:
    """Bytes that a transfer moves from device to device."""
    model = deployment.options.model
    producer = engine_geometry(model, deployment.prefill, "prefill")
    consumer = engine_geometry(model, deployment.decode, "decode")
    sources, targets = deployment.devices()
    device_of = dict(zip(deployment.prefill.ranks, sources, strict=True))
    copies: Counter[tuple[str, str]] = Counter()
    for rank, target in zip(deployment.decode.ranks, targets, strict=True):
        topology = TpKVTopology(consumer, rank)
        plan = plan_transfer(topology, producer, [range(num_tokens)], chunk_bytes=1 << 30)
        for read in plan.reads:
            copies[device_of[read.source], target] += read.total_bytes
    return copies
