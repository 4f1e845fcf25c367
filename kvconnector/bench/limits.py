"""The limits of the machine, measured beside each benchmark: memcpy, a raw TCP socket, copies between GPUs, and between
hosts `ucx_perftest` of the UCX that carries the transfer.
"""

from __future__ import annotations

import csv
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvconnector.bench.deployment import Deployment
from kvconnector.bench.options import TIMEOUT_S, WARMUP
from kvconnector.bench.shapes import engine_geometry
from kvconnector.config import ConnectorConfig
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.planning import plan_transfer
from kvconnector.runtime.channels import ucx_options
from kvconnector.topology import TpKVTopology
from kvconnector.transport.ucx import SOURCES, load_library

_REQUEST = struct.Struct("<Q")
_SOCKET_BUFFER_BYTES = 4 << 20
MIN_BYTES = 64 << 20
"""Fewest bytes of a run: UCX's first messages are slower than the others."""
LIMIT_S = 120.0
START_S = 10.0
POLL_S = 0.05
_SLEEPING = ["-E", "sleep"]
"""Waiting for events, as workers do: two programs that spin take the cores that the kernel needs for TCP."""


def repeat(
    operation: Callable[[], object], iterations: int, warmup: int = WARMUP
) -> tuple[float, ...]:
    """Return the seconds of each of `iterations` calls, after `warmup` untimed ones."""
    samples = []
    for _ in range(warmup + iterations):
        started = time.perf_counter()
        operation()
        samples.append(time.perf_counter() - started)
    return tuple(samples[warmup:])


def host_copy(nbytes: int) -> Callable[[int], None]:
    """Return a function that copies up to `nbytes` bytes in host memory, in one thread."""
    source, target = np.full(nbytes, 1, dtype=np.uint8), np.full(nbytes, 2, dtype=np.uint8)
    return lambda count: np.copyto(target[:count], source[:count])


def device_copies(nbytes: Mapping[tuple[str, str], int]) -> Callable[[int], None]:
    """Return a function that makes plain copies between GPUs at once, and waits until all GPUs are idle. `nbytes` are
    by (source, target); the function takes the bytes of all copies together, which may be fewer.
    """
    import torch

    copies = [
        (
            torch.ones(count, dtype=torch.uint8, device=source),
            torch.zeros(count, dtype=torch.uint8, device=target),
            # A copy between GPUs waits for the current streams of both: each gets its own.
            (torch.cuda.Stream(source), torch.cuda.Stream(target)),
        )
        for (source, target), count in nbytes.items()
    ]
    total = sum(nbytes.values())
    devices = sorted({device for pair in nbytes for device in pair})

    def move(wanted: int) -> None:
        for source, target, streams in copies:
            count = len(source) * wanted // total
            with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
                target[:count].copy_(source[:count], non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    return move


def copies_of(deployment: Deployment, num_tokens: int) -> Counter[tuple[str, str]]:
    """Return the bytes that a transfer moves, by source and target device."""
    model, shapes = deployment.options.model, deployment.shapes
    producer, consumer = (engine_geometry(model, each, side) for side, each in shapes.items())
    device_of = dict(zip(shapes["prefill"].ranks, deployment.devices("prefill"), strict=True))
    copies: Counter[tuple[str, str]] = Counter()
    ranges = model.ranges(range(num_tokens))
    for rank, target in zip(shapes["decode"].ranks, deployment.devices("decode"), strict=True):
        topology = TpKVTopology(consumer, rank)
        for read in plan_transfer(topology, producer, ranges, chunk_bytes=1 << 30):
            copies[device_of[read.source], target] += read.total_bytes * deployment.in_flight
    return copies


@contextmanager
def open_stream(address: tuple[str, int], nbytes: int) -> Iterator[Callable[[int], None]]:
    """Connect to `serve_stream`. Yields a function that asks for at most `nbytes` bytes and waits for them, in plain
    memory that only this limit's turns touch, as only a transfer's turns touch its pools. Raises PeerLostError: the
    other side does not answer.
    """
    target = np.full(nbytes, 2, dtype=np.uint8).data
    try:
        client = socket.create_connection(address, timeout=TIMEOUT_S)
    except OSError as error:
        raise PeerLostError(f"no raw socket: {error}", address=address) from error
    with client:
        _tune(client)
        yield partial(_move, client, target)


def _move(client: socket.socket, target: memoryview, nbytes: int) -> None:
    got = 0
    try:
        client.sendall(_REQUEST.pack(nbytes))
        while got < nbytes:
            count = client.recv_into(target[got:nbytes])
            if not count:
                raise ConnectionError("it was closed early")
            got += count
    except OSError as error:
        raise PeerLostError(f"the raw socket failed: {error}", got=got, wanted=nbytes) from error


def serve_stream(host: str, nbytes: int) -> int:
    """Answer one client with up to `nbytes` until it leaves, in a thread. Returns the port. An error ends it."""
    listener = socket.create_server((host, 0))
    threading.Thread(target=_serve, args=(listener, nbytes), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket, nbytes: int) -> None:
    content = memoryview(bytearray(b"\1") * nbytes)
    with suppress(OSError), listener:
        listener.settimeout(TIMEOUT_S)
        connection, _ = listener.accept()
        with connection:
            # it also waits for the turns of the other contenders
            connection.settimeout(10 * TIMEOUT_S)
            _tune(connection)
            while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                connection.sendall(content[: _REQUEST.unpack(request)[0]])


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def find_perftest(library: str) -> list[str]:
    """Return the command of the `ucx_perftest` that belongs to the UCX of `ucx.library`. Raises TransportError: that
    UCX has none, as in NIXL's wheel.
    """
    ucx = load_library(library)
    beside = ucx.path.parent.parent / "bin/ucx_perftest"
    path = str(beside) if beside.exists() else shutil.which("ucx_perftest")
    if path is None or (ucx.source in SOURCES and not beside.exists()):
        raise TransportError("this UCX brings no ucx_perftest", library=str(ucx.path))
    # the wheel's program does not know where the wheel's libraries are
    return ["env", f"LD_LIBRARY_PATH={Path(ucx.path).resolve().parent}", path]


def ucx_variables(config: ConnectorConfig) -> dict[str, str]:
    """Return the settings of a worker's transport as UCX's environment variables."""
    segment = dict.fromkeys(("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"), config.ucx.tcp_segment_bytes)
    options = {**ucx_options(config), **segment}
    return {f"UCX_{name}": str(each) for name, each in options.items() if each}


@contextmanager
def perftest_server(library: str, variables: Mapping[str, str]) -> Iterator[int]:
    """Start a `ucx_perftest` that waits for one client. Yields its port. Raises TransportError: this UCX has none."""
    command = find_perftest(library)
    with socket.create_server(("", 0)) as free:
        port = int(free.getsockname()[1])
    null: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command += [*_SLEEPING, "-p", str(port)]
    with subprocess.Popen(command, env={**os.environ, **variables}, **null) as process:
        try:
            yield port
        finally:
            process.kill()


def bandwidth(
    command: list[str], address: tuple[str, int], config: ConnectorConfig, nbytes: int
) -> float:
    """Return bytes a second of tagged messages of our chunks' size, up to 32 at once, to the server at `address`.

    Raises:
        TransportError: the program did not run to its end.
    """
    message_bytes = config.chunk_bytes("cpu")
    count = max(nbytes, MIN_BYTES) // message_bytes
    options = [*_SLEEPING, "-t", "tag_bw", "-s", str(message_bytes), "-n", str(count), "-v", "-f"]
    deadline = time.monotonic() + START_S
    while True:
        done = subprocess.run(
            [*command, address[0], "-p", str(address[1]), *options],
            env={**os.environ, **ucx_variables(config)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        # until the server listens a client ends at once
        if not done.returncode or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    try:
        *_, last = csv.DictReader(done.stdout.splitlines())
        return float(last["overall_bw"]) * 2**20  # from the run's beginning to its end
    except (KeyError, ValueError) as error:
        text = (done.stdout + done.stderr).strip()[-500:]
        raise TransportError("ucx_perftest measured nothing", output=text) from error
