"""Engines of one rank in this process: scheduler, rank and connector, without servers."""

from __future__ import annotations

import random
import time
from pathlib import Path

from minillm.config import EngineConfig
from minillm.engine import create_scheduler
from minillm.messages import Step, encoder, to_worker_decoder
from minillm.request import Request
from minillm.transfer import create_scheduler_transfer
from minillm.worker import RankWorker

DEADLINE_S = 40.0


class LocalEngine:
    """What `Engine` and its rank do, a step at a time. Messages go through their encoding."""

    def __init__(self, config: EngineConfig, run_dir: Path) -> None:
        self.transfer = create_scheduler_transfer(config)
        self.scheduler = create_scheduler(config, self.transfer)
        self.rank = RankWorker(config, 0, run_dir)
        self.transfer.start([self.rank.ready().connector])
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.params: dict[str, dict[str, object] | None] = {}
        self.steps = 0

    def close(self) -> None:
        """The rank first, as in the engine."""
        self.rank.close()
        self.transfer.close()

    def step(self) -> None:
        """One step of all requests."""
        work = self.scheduler.schedule()
        self.steps += 1
        idle_wait_s = 0.0 if work.inputs else 0.005
        connector = self.transfer.build_step()
        step = Step(self.steps, work.inputs, work.tables, work.moves, connector, idle_wait_s)
        received = to_worker_decoder.decode(encoder.encode(step))
        assert isinstance(received, Step)
        result = self.rank.run(received)
        events = self.transfer.update([result.connector])
        for update in self.scheduler.update(work.inputs, result.tokens, events):
            assert update.token is not None, update.error
            tokens = self.answers.setdefault((update.request_id, update.answer), [])
            tokens.append(update.token.token_id)
            if update.finish_reason and update.answer == 0:
                self.params[update.request_id] = update.kv_transfer_params

    def run(self, *requests: Request) -> list[list[int]]:
        """Run requests side by side; returns the tokens of all their answers."""
        names = [each.request_id for each in requests]
        wanted = [(each.request_id, i) for each in requests for i in range(each.num_answers)]
        lengths = {each.request_id: each.max_tokens for each in requests}
        for each in requests:
            self.scheduler.add(each)
        deadline = time.monotonic() + DEADLINE_S
        while any(len(self.answers.get(key, ())) < lengths[key[0]] for key in wanted):
            assert time.monotonic() < deadline, f"{names} are not answered in time"
            self.step()
        return [self.answers[key] for key in wanted]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Reproducible tokens of a small vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]
