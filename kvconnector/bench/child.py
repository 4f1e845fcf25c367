"""One rank of one engine in a process of its own: `python -m kvconnector.bench.child FD`."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import ClassVar

from kvconnector.bench import messages as m
from kvconnector.bench.agents import PeerAgent, open_agent
from kvconnector.bench.engine_loads import make_step
from kvconnector.bench.engine_loop import EngineLoop
from kvconnector.bench.pools import RankPools
from kvconnector.errors import (
    KVConnectorError,
    LocalProtocolError,
    PeerLostError,
    TransferTimeoutError,
)
from kvconnector.ids import Rank
from kvconnector.runtime import Worker
from kvconnector.runtime.steps import HoldRequest

ROUTER_HOP_S = 2e-3
"""From a producer's answer to a consumer's request for its blocks; no part of any time that is told."""


class RankProcess:
    """Answers requests, one at a time, as an engine's thread would carry them out."""

    def __init__(self, opened: m.Open) -> None:
        self._opened = opened
        self._rank = Rank(opened.pp_rank, opened.tp_rank)
        self._pools = RankPools(
            opened.model,
            opened.shape,
            self._rank,
            num_blocks=opened.num_blocks,
            device=opened.device,
        )
        self._worker: Worker | None = None
        self._agent: PeerAgent | None = None
        self._loads: dict[m.LoadName, Callable[[], None] | None] = {}

    def answer(self, request: m.Request) -> m.Answer:
        """Carry one request out.

        Raises:
            KVConnectorError: it failed.
        """
        if type(request) not in self._ACTIONS:
            raise LocalProtocolError("not now", request=type(request).__name__)
        return self._ACTIONS[type(request)](self, request)

    def close(self) -> None:
        """Release everything."""
        if self._worker is not None:
            self._worker.close()
        if self._agent is not None:
            self._agent.close()

    def _start_worker(self, request: m.StartWorker) -> m.Answer:
        model = self._opened.model.description()
        self._worker = Worker(request.config, rank=self._rank, model=model)
        self._worker.register([self._pools.cache_group()])
        return m.Registered(self._worker.handshake())

    def _write(self, request: m.Write) -> m.Answer:
        self._pools.write(self._opened.seed, request.block_ids, request.num_tokens)
        self._settle()
        return m.Ok()

    def _poison(self, _request: m.Poison) -> m.Answer:
        self._pools.poison()
        self._settle()
        return m.Ok()

    def _check(self, request: m.Check) -> m.Answer:
        self._settle()
        return m.Checked(
            self._pools.mismatch(self._opened.seed, request.block_ids, request.num_tokens)
        )

    def _settle(self) -> None:
        """What this process wrote is complete before anybody else reads it."""
        if self._opened.device != "cpu":
            import torch

            torch.cuda.synchronize(self._opened.device)

    def _step(self, request: m.Step) -> m.Answer:
        if self._worker is None:
            raise LocalProtocolError("there is no worker yet")
        started_s = time.perf_counter()
        self._worker.start_step(request.step)
        if any(isinstance(order, HoldRequest) for order in request.step.orders):
            # a consumer hears of a request through a router, so the producer has been at its next step for a while
            self._worker.wait(ROUTER_HOP_S)
        awaited = request.received or request.released
        path = self._await(self._worker, request) if awaited else ""
        return m.Stepped(started_s, time.perf_counter(), path)

    def _await(self, worker: Worker, request: m.Step) -> str:
        """Until the worker reports the request; the path of a load."""
        deadline = time.monotonic() + self._opened.timeout_s
        while True:
            output = worker.poll()
            if reason := output.failed_recving.get(request.received):
                raise KVConnectorError(f"the load failed: {reason}", request=request.received)
            if request.received in output.finished_recving:
                return "+".join(each.path for each in output.stats.transfers)
            if request.released in output.finished_sending:
                return ""
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransferTimeoutError(
                    "the worker did not report a request",
                    received=request.received,
                    released=request.released,
                )
            worker.wait(left_s)

    def _drive(self, request: m.Drive) -> m.Answer:
        if self._worker is None:
            raise LocalProtocolError("there is no worker yet")
        if request.load not in self._loads:
            self._loads[request.load] = make_step(request.load, self._opened.device)
        step = self._loads[request.load]
        return EngineLoop(self._worker, request, step, self._opened.timeout_s).run()

    def _open_agent(self, request: m.OpenAgent) -> m.Answer:
        self._agent = open_agent(request, self._pools)
        return self._agent.opened()

    def _join_agent(self, request: m.JoinAgent) -> m.Answer:
        self._joined().join(request.peer)
        return m.Ok()

    def _read_blocks(self, request: m.ReadBlocks) -> m.Answer:
        return self._joined().read(
            remote=request.remote, local=request.local, timeout_s=self._opened.timeout_s
        )

    def _joined(self) -> PeerAgent:
        if self._agent is None:
            raise LocalProtocolError("there is no agent yet")
        return self._agent

    _ACTIONS: ClassVar[dict[type, Callable[..., m.Answer]]] = {
        m.StartWorker: _start_worker,
        m.Write: _write,
        m.Poison: _poison,
        m.Check: _check,
        m.Step: _step,
        m.Drive: _drive,
        m.OpenAgent: _open_agent,
        m.JoinAgent: _join_agent,
        m.ReadBlocks: _read_blocks,
    }


def serve(connection: socket.socket) -> None:
    """Answer until `Stop`, or until the parent is gone."""
    rank: RankProcess | None = None
    try:
        while True:
            request = m.receive_request(connection)
            if isinstance(request, m.Stop):
                break
            try:
                answer: m.Answer = m.Ok()
                if isinstance(request, m.Open):
                    rank = RankProcess(request)
                elif rank is None:
                    raise LocalProtocolError("the first message is Open")
                else:
                    answer = rank.answer(request)
            except Exception as error:
                # whatever it was, the parent must hear of it rather than wait
                answer = m.Failed(_story(error))
            m.send_message(connection, answer)
    except PeerLostError:
        return
    finally:
        if rank is not None:
            rank.close()
    m.send_message(connection, m.Ok())


def _story(error: Exception) -> str:
    """Our errors say what is wrong; others need their traceback."""
    if isinstance(error, KVConnectorError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
