"""A producer worker in a process of its own that shares its pools, publishes leases, and can be killed."""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import Any

import msgspec

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.cuda_driver import StreamWriter
from kvconnector.datapath.direct.export import PoolExporter
from kvconnector.wire.export import PoolExport
from tests.unit.datapath.caches import Caches, Shape

DEADLINE_S = 120.0


class Exporter:
    """Its caches hold what `Caches(shape, seed=seed)` holds."""

    def __init__(self, shape: Shape, *, seed: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, shape, seed, device))
        self._process.start()
        theirs.close()
        self.export = msgspec.msgpack.decode(self._answer(), type=PoolExport)

    def publish(self, key: bytes, num_tokens: int) -> None:
        """Publish a lease."""
        self._ask("publish", key, num_tokens)

    def retract(self, key: bytes) -> None:
        """Retract a lease."""
        self._ask("retract", key)

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None

    def close(self) -> None:
        """End it in order, if it still lives."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(DEADLINE_S)
        self._pipe.close()

    def _ask(self, name: str, *arguments: object) -> None:
        self._pipe.send((name, arguments))
        self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "the exporter does not answer"
        return self._pipe.recv()


def _run(pipe: Any, shape: Shape, seed: int, device: str) -> None:
    caches = Caches(shape, seed=seed, device=device)
    share = PoolExporter(caches.pools, LeaseBoard(None if device == "cpu" else _writer_of(device)))
    pipe.send(msgspec.msgpack.encode(share.message))
    while (question := pipe.recv()) is not None:
        name, arguments = question
        getattr(share.board, name)(*arguments)
        if device != "cpu":
            import torch

            torch.cuda.synchronize(device)
        pipe.send(None)
    share.board.close()


def _writer_of(device: str) -> Any:
    import torch

    torch.cuda.set_device(device)
    stream, context = torch.cuda.Stream(), ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return lambda address, nbytes: StreamWriter(
        stream.cuda_stream, context.value or 0, address, nbytes
    )
