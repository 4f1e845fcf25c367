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

from kvconnector.bench.deployment import Deployment, Transfer
from kvconnector.bench.engines import Runner
from kvconnector.bench.options import TIMEOUT_S, WARMUP
from kvconnector.bench.results import ContenderKind
from kvconnector.bench.shapes import engine_geometry
from kvconnector.errors import PeerLostError
from kvconnector.planning import plan_transfer
from kvconnector.topology import TpKVTopology

_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20


def repeat(
    operation: Callable[[], object], iterations: int, warmup: int = WARMUP
) -> tuple[float, ...]:
    """Seconds of each of `iterations` calls, after `warmup` untimed ones."""
    samples = []
    for _ in range(warmup + iterations):
        started = time.perf_counter()
        operation()
        samples.append(time.perf_counter() - started)
    return tuple(samples[warmup:])


def host_copy(nbytes: int) -> Callable[[int], None]:
    """Copies of at most that many bytes in host memory, by one thread."""
    source, target = np.full(nbytes, 1, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)
    return lambda count: np.copyto(target[:count], source[:count])


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


class Limit(Runner):
    """One limit, taking its turn among the contenders."""

    def __init__(
        self, name: str, kind: ContenderKind, token_bytes: int, move: Callable[[int], None]
    ) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self._token_bytes = token_bytes
        self._move = move

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds of moving as many bytes."""
        return repeat(lambda: self._move(transfer.num_tokens * self._token_bytes), 1, warmup=0)


@contextmanager
def limits_of(deployment: Deployment, num_tokens: int) -> Iterator[list[Limit]]:
    """The limits that apply to these devices and transports, for requests of at most that many tokens."""
    token_bytes = deployment.options.model.token_bytes
    if deployment.options.device == "cpu":
        copy: ContenderKind = "limit" if deployment.options.share_memory else "variant"
        with socket_stream(token_bytes * num_tokens) as stream:
            yield [
                Limit("memcpy, one thread", copy, token_bytes, host_copy(token_bytes * num_tokens)),
                Limit("raw TCP socket", "limit", token_bytes, stream.move),
            ]
        return
    plain = DeviceCopies(copies_of(deployment, num_tokens))
    yield [Limit(plain.name, "limit", token_bytes, plain.move)]


def copies_of(deployment: Deployment, num_tokens: int) -> Counter[tuple[str, str]]:
    """Bytes that a transfer moves from device to device."""
    model = deployment.options.model
    producer = engine_geometry(model, deployment.prefill, "prefill")
    consumer = engine_geometry(model, deployment.decode, "decode")
    sources, targets = (deployment.spec(name).devices() for name in ("prefill", "decode"))
    device_of = dict(zip(deployment.prefill.ranks, sources, strict=True))
    copies: Counter[tuple[str, str]] = Counter()
    for rank, target in zip(deployment.decode.ranks, targets, strict=True):
        topology = TpKVTopology(consumer, rank)
        plan = plan_transfer(topology, producer, [range(num_tokens)], chunk_bytes=1 << 30)
        for read in plan.reads:
            copies[device_of[read.source], target] += read.total_bytes
    return copies
