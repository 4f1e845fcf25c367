"""The engine's side of its rank processes: start them, give each step to all of them, notice when one dies."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from minillm.config import EngineConfig, save_engine_config
from minillm.messages import (
    Failed,
    FromWorker,
    Ready,
    Shutdown,
    Step,
    StepResult,
    encoder,
    from_worker_decoder,
)
from minillm.processes import Child, ChildFailedError

STOP_TIMEOUT_S = 6.0
SEND_TIMEOUT_S = 0.5
DEATH_NOTICE_S = 0.5


class RankGroup:
    """All rank processes of one engine, one PAIR socket each in a private folder."""

    def __init__(self, config: EngineConfig, log_dir: Path) -> None:
        self.config = config
        self.log_dir = log_dir
        self._run_dir: Path | None = None
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._children: list[Child] = []
        self._deaths: list[asyncio.Task[int]] = []

    async def start(self) -> list[Ready]:
        """Start every rank and wait until all are ready. Returns their greetings in rank order.

        Raises:
            ChildFailedError: one ended, failed, or was not ready within the configured time.
        """
        # ipc paths are limited to about 100 bytes, so not below log_dir
        run_dir = self._run_dir = Path(tempfile.mkdtemp(prefix="minillm-"))
        config_path = run_dir / "engine.json"
        save_engine_config(self.config, config_path)
        for rank in range(self.config.parallel.world_size):
            socket = self._context.socket(zmq.PAIR)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"ipc://{run_dir}/rank{rank}")
            self._sockets.append(socket)
            name = f"{self.config.engine_id}-rank{rank}"
            arguments = ["--config", str(config_path), "--rank", str(rank)]
            child = await Child.start(
                name, "minillm.worker", arguments, self.log_dir / f"{name}.log"
            )
            self._children.append(child)
            self._deaths.append(asyncio.create_task(child.process.wait()))
        messages = await self._receive_all(self.config.start_timeout_s, "was not ready in time")
        return [message for message in messages if isinstance(message, Ready)]

    async def step(self, step: Step) -> list[StepResult]:
        """Run one step on every rank. Returns the results in rank order.

        Raises:
            ChildFailedError: a rank ended, failed, or did not answer within the configured time.
        """
        messages = await self._receive_all(
            self.config.step_timeout_s + step.idle_wait_s,
            "did not finish a step in time",
            encoder.encode(step),
        )
        results = [message for message in messages if isinstance(message, StepResult)]
        if any(result.step_id != step.step_id for result in results):
            raise ChildFailedError(f"a rank answered another step than {step.step_id}")
        return results

    async def _receive_all(
        self, timeout_s: float, late: str, payload: bytes = b""
    ) -> list[FromWorker]:
        """Send every rank `payload`, unless it is empty, and receive one message from each. Returns them in rank order;
        the first failure ends the wait for the others.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        tasks = [loop.create_task(_receive(socket, payload)) for socket in self._sockets]
        try:
            while pending := {task for task in tasks if not task.done()}:
                await asyncio.wait(
                    {*pending, *self._deaths},
                    timeout=max(0.0, deadline - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task, child in zip(tasks, self._children, strict=True):
                    if task.done() and isinstance(message := task.result(), Failed):
                        await self._raise_if_another_died(child)
                        raise child.failure(f"failed: {message.error}")
                    if not task.done() and not child.is_running:
                        raise child.failure("ended unexpectedly")
                    if not task.done() and loop.time() >= deadline:
                        raise child.failure(late)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _raise_if_another_died(self, failed: Child) -> None:
        """A rank whose peer died fails too, and may report that before the death is known: raise the cause instead."""
        others = [
            (child, death)
            for child, death in zip(self._children, self._deaths, strict=True)
            if child is not failed
        ]
        if others:
            await asyncio.wait(
                [death for _, death in others],
                timeout=DEATH_NOTICE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        for child, _ in others:
            if not child.is_running:
                raise child.failure("ended unexpectedly")

    async def close(self) -> None:
        """Ask every rank to end, kill by pid those that do not, remove the folder. Idempotent, also when cancelled."""
        try:
            await asyncio.gather(*(self._ask_to_end(rank) for rank in range(len(self._children))))
            await asyncio.gather(
                *(child.wait_or_kill(timeout_s=STOP_TIMEOUT_S) for child in self._children)
            )
        finally:
            for task in self._deaths:
                task.cancel()
            self._context.destroy(linger=0)
            if self._run_dir is not None:
                shutil.rmtree(self._run_dir, ignore_errors=True)

    async def _ask_to_end(self, rank: int) -> None:
        if self._children[rank].is_running:
            # a rank that hangs may not take the message; it is killed later
            with suppress(asyncio.TimeoutError, zmq.ZMQError):
                shutdown = encoder.encode(Shutdown())
                await asyncio.wait_for(self._sockets[rank].send(shutdown), SEND_TIMEOUT_S)


async def _receive(socket: zmq.asyncio.Socket, payload: bytes) -> FromWorker:
    if payload:
        await socket.send(payload)  # never ends if the rank has ended: the caller watches for that
    return from_worker_decoder.decode(await socket.recv())
