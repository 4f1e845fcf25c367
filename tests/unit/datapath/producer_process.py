"""A producer worker in a process of its own that consumers reach over UCX, and that can be frozen and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import msgspec

from kvconnector.wire.export import PoolExport
from tests.unit.datapath.caches import Shape
from tests.unit.datapath.pump_pair import TO_D, Side

DEADLINE_S = 120.0
OVER_TCP: dict[str, Any] = {
    "slot_bytes": 1 << 12,
    "num_slots": 3,
    "one_sided": True,
    "options": {"TLS": "tcp"},
}


class Producer:
    """Its caches hold what `Caches(shape, seed=1)` holds, all of it under a lease with `key`."""

    def __init__(self, shape: Shape, key: bytes, num_tokens: int, **knobs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(theirs, shape, key, num_tokens, {**OVER_TCP, **knobs})
        )
        self._process.start()
        theirs.close()
        self.address: bytes = self._answer()
        self.export = msgspec.msgpack.decode(self._answer(), type=PoolExport)

    def warm_up(self, address: bytes, tag: int, nbytes: int) -> None:
        """Connect to a consumer, as when it greets."""
        self._pipe.send((address, tag, nbytes))

    def freeze(self) -> None:
        """Let it do nothing from now on."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it without a word. It never looks at what was sent to it while it was frozen."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "the producer does not answer"
        return self._pipe.recv()


def _run(pipe: Any, shape: Shape, key: bytes, num_tokens: int, knobs: dict[str, Any]) -> None:
    side = Side(shape, seed=1, **knobs)
    side.path.publish_lease(key, num_tokens)
    pipe.send(side.transport.address)
    pipe.send(msgspec.msgpack.encode(side.path.export()))
    side.path.open_endpoint(TO_D, *pipe.recv())
    while True:
        side.path.pump(1e-2, ())
        side.path.step()
        side.transport.progress()
