"""One engine: its ranks in processes of their own, and its scheduler in this one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from kvconnector.bench.nixl import AgentOpened
from kvconnector.bench.processes import EngineProcesses
from kvconnector.bench.rank_process import EngineSpec, RankProcess, Started
from kvconnector.bench.sockets import serve_stream
from kvconnector.config import ConnectorConfig
from kvconnector.runtime import Scheduler, StepMetadata, WorkerOutput


class Engine(ExitStack):
    """An engine's processes, and its scheduler where it has a configuration. Leaving it, or `close`, ends them.

    `started` is what each rank said when its worker started.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: ConnectorConfig | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.spec = spec
        self.host = config.control.host if config else ""
        self.started: list[Started] = []
        try:
            self.ranks = self.enter_context(EngineProcesses(spec, environment))
            if config is not None:
                self.started = self.ranks.call(RankProcess.start_worker, config)
                self.scheduler = Scheduler(config, [each.metadata for each in self.started])
                self.callback(self.scheduler.close)
        except BaseException:
            self.close()
            raise

    def write(self, blocks: list[int], num_tokens: int) -> None:
        """Write the sequence into these blocks."""
        self.ranks.call(RankProcess.write, blocks, num_tokens)

    def offer(self, blocks: dict[str, list[int]], num_tokens: int) -> dict[str, dict[str, Any]]:
        """Hold requests for a consumer, each in these blocks: the `kv_transfer_params` of each."""
        params = {
            request_id: self.scheduler.offer(request_id, blocks=[ids], num_tokens=num_tokens)
            for request_id, ids in blocks.items()
        }
        self.ranks.call(RankProcess.step, self.scheduler.build_step(), "", [])
        return params

    def queue(self, request_id: str, params: dict[str, Any]) -> None:
        """A request comes from a router."""
        self.scheduler.on_new_request(request_id, params)

    def compute(
        self, blocks: dict[str, list[int]], num_tokens: int, share: int, rate: float
    ) -> float:
        """Run the steps that compute so many tokens of each of these requests, `share` of each in a step and `rate` of
        all in a second. The seconds that it took.
        """
        began_s = time.perf_counter()
        for start in range(0, num_tokens, share):
            for request_id, ids in blocks.items():
                self.scheduler.grow(request_id, blocks=[ids], num_tokens=start)
            seconds = min(share, num_tokens - start) * len(blocks) / rate
            self.ranks.call(RankProcess.compute, self.scheduler.build_step(), seconds)
        return time.perf_counter() - began_s

    def await_sent(self, request_ids: list[str]) -> None:
        """Until the consumer has confirmed."""
        self.ranks.call(RankProcess.step, StepMetadata(), "", request_ids)
        self.scheduler.update(WorkerOutput(finished_sending=frozenset(request_ids)))

    def pause(self) -> None:
        """Use no processor while others are timed."""
        self.ranks.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self.ranks.resume()

    def lanes(self) -> list[str]:
        """What UCX sends packed reads over, as the ranks' logs have it; empty where nothing was sent."""
        return sorted({text for texts in self.ranks.call(RankProcess.lanes) for text in texts})

    def open_agents(self, num_threads: int) -> list[AgentOpened]:
        """Register the pools with an agent of NIXL's on each rank."""
        return self.ranks.call(RankProcess.open_agent, num_threads)

    def serve_stream(self, nbytes: int) -> int:
        """Answer one client of a raw socket with up to `nbytes`: the port at `host`."""
        return serve_stream(self.host, nbytes)

    def want(
        self, request_id: str, params: dict[str, Any], blocks: list[int], num_tokens: int
    ) -> None:
        """Queue a request, and load it with the next step."""
        self.scheduler.on_new_request(request_id, params)
        self.ask(request_id, blocks, num_tokens)

    def ask(self, request_id: str, blocks: list[int], num_tokens: int) -> None:
        """Load a queued request with the next step."""
        external, _ = self.scheduler.matched_tokens(request_id, num_tokens + 1, 0)
        self.scheduler.load(request_id, blocks=[blocks], num_tokens=external)

    def load(self, request_id: str) -> tuple[float, set[str]]:
        """Seconds from asking the first rank until the last has reported the end, and the paths that it came by."""
        steps = self.ranks.call(RankProcess.step, self.scheduler.build_step(), request_id, [])
        self.loaded(request_id)
        seconds = max(each.ended_s for each in steps) - min(each.started_s for each in steps)
        return seconds, {each.path for each in steps if each.path}

    def loaded(self, request_id: str) -> None:
        """The scheduler hears that a load is over."""
        self.scheduler.update(WorkerOutput(finished_recving=frozenset([request_id])))
        self.scheduler.finish(request_id)
