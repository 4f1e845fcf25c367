"""Requests of every kind in vLLM's real scheduler, in random order: none ends the engine, waits for ever or stays."""

import random
from collections import deque
from contextlib import suppress

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.session.orders import HoldRequest
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import attention

pytestmark = pytest.mark.vllm

MOST_STEPS = 400
MODELS = {
    "one group": lambda: [attention()],
    "windows": lambda: [attention(), attention(SlidingWindowSpec, sliding_window=24)],
    "states": lambda: [attention(), w.state_spec()],
}


class Workers:
    """Workers that end each transfer some steps after they were told of it, well or not. Some reports repeat. If
    `is_partly`, they name the blocks that a failed load has not filled, some of them before all ranks have ended it.
    """

    def __init__(self, draw, *, is_partly):
        self._draw, self._is_partly = draw, is_partly
        self.loading, self.held, self.followed = {}, set(), set()
        self._unfilled, self._last = set[str](), set[str]()

    def take(self, news):
        for want in news.wants:
            if want.is_followed:
                self.followed.add(want.request_id)
        for load in news.loads:
            self.loading[load.request_id] = load.local_blocks[0].block_ids.tolist()
        for name in news.dropped:
            self.followed.discard(name)
            if name in self.loading:
                self.loading[name] = []
        self.held |= {hold.request_id for hold in news.holds if isinstance(hold, HoldRequest)}

    def report(self, share):
        """Return what the workers report of this share of what is under way."""
        draw = self._draw
        sent = {name for name in sorted(self.held) if draw.random() < share}
        ended = {name for name in sorted(self.loading) if draw.random() < share}
        begun = {name for name in sorted(self.followed) if draw.random() < share}
        failed = {name for name in ended if not self.loading[name] or draw.random() < 0.2}
        invalid = set()
        for name in sorted(self.loading) if self._is_partly else ():
            if self.loading[name] and draw.random() < 0.15:
                invalid |= {*self.loading[name][draw.randrange(len(self.loading[name])) :]}
                self._unfilled.add(name)
        lost = failed | ended & self._unfilled
        failed -= self._unfilled
        report = WorkerReport(begun, failed=dict.fromkeys(lost, "PeerLostError: lost"))
        self.held -= sent
        self.followed -= begun
        for name in ended:
            del self.loading[name]
        again, self._last = self._last if draw.random() < 0.1 else set(), sent
        return KVConnectorOutput(
            finished_sending=sent | again,
            finished_recving=ended,
            failed_recving=failed,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=report,
        )


class Life:
    """An engine whose steps are planned `ahead` of their results."""

    def __init__(self, engine, draw, ahead, *, is_partly):
        self.engine, self.scheduler = engine, engine.scheduler
        self.draw, self.ahead = draw, ahead
        self.workers = Workers(draw, is_partly=is_partly)
        self.steps = deque()
        self.number = 0

    def params(self, num_tokens):
        draw = self.draw
        self.number += draw.random() < 0.8
        name = f"n{self.number}"
        offer = w.offer(
            num_tokens, remote_request_id=f"{name}|{w.SECRET}", **self.blocks(num_tokens)
        )
        followed = {**w.FOLLOWED, "transfer_id": name}
        decode = {**w.REMOTE_DECODE, "transfer_id": name, "transfer_secret": w.SECRET}
        return draw.choice([None, offer, offer, followed, decode, w.REMOTE_DECODE, decode | offer])

    def blocks(self, num_tokens):
        groups = self.engine.connector._scheduler_half._groups
        ids = list(range(1, 1 + -(-num_tokens // w.BLOCK_SIZE)))
        of_state = [group.keeps == "state" for group in groups]
        return {
            "remote_block_ids": [[1] if is_state else ids for is_state in of_state],
            # a state is the one before the prompt's last token
            "remote_first_blocks": [max(0, num_tokens - 2) * is_state for is_state in of_state],
        }

    def act(self):
        draw, engine = self.draw, self.engine
        match draw.choice(["add", "add", "add", "abort", "reset", "preempt", "pause", "resume"]):
            case "add":
                length = draw.choice([1, 2, 15, 16, 17, 40, 64, 100, 160])
                options = draw.choice([{}, {}, {"prompt_logprobs": 1}, {"seed": 3}])
                params = self.params(length)
                if params is not None and draw.random() < 0.5:
                    params = {**params, "remote_first_token": [8, "no"]}
                engine.add(
                    length,
                    params,
                    prompt=draw.choice([None, 1, 2]),
                    max_tokens=draw.choice([1, 1, 5]),
                    **options,
                )
            case "abort" if self.scheduler.requests:
                engine.abort(draw.choice(sorted(self.scheduler.requests)))
            case "reset":
                self.scheduler.reset_prefix_cache(reset_connector=draw.random() < 0.5)
            case "preempt":
                with suppress(RuntimeError):  # vLLM's own: blocks are in use
                    self.scheduler.reset_prefix_cache(reset_running_requests=True)
            case "pause":
                kind = draw.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
                self.scheduler.set_pause_state(kind)
            case "resume":
                self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def step(self, share):
        planned = self.scheduler.schedule()
        self.workers.take(self.engine.news(planned))
        sampled = [
            [7] if not self.scheduler.requests[name].is_prefill_chunk else []
            for name in planned.num_scheduled_tokens
        ]
        self.steps.append((planned, sampled))
        while len(self.steps) > self.ahead:
            self.finish_step(share)

    def finish_step(self, share):
        planned, sampled = self.steps.popleft()
        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.workers.report(share),
        )
        self.scheduler.update_from_output(planned, output)

    def end(self):
        """Let everything end by itself."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_requests():
                return
            self.step(1.0)
        pytest.fail(f"these wait for ever: {self.scheduler.requests}")


def check_nothing_is_left(engine):
    half = engine.connector._scheduler_half
    assert engine.used_blocks == 0
    assert not engine.scheduler.requests
    left = [
        half._asked,
        half._shortened,
        half._streamed,
        half._identities,
        half._siblings._first,
        half._siblings._source,
        half._siblings._waiting,
        half.partly_filled._blocks,
        half.first_tokens._expected,
        half.first_tokens._loaded,
        half._scheduler._requests,
        half._scheduler.held,
        half._scheduler._offers._streams,
        half._scheduler._offers._names,
        half._sent._reasons,
        half._received._reasons,
    ]
    assert not any(left), left


def check_life(world, model_name, policy, is_async, seed):
    draw = random.Random(f"{model_name} {policy} {is_async} {seed}")
    engine = world(
        role="kv_both",
        bidirectional_kv_xfer=draw.random() < 0.5,
        policy=policy,
        specs=MODELS[model_name](),
        is_async=is_async,
        first_token=draw.choice(["auto", "never"]),
        engine={
            "max_num_batched_tokens": draw.choice([48, 256]),
            "scheduling_policy": draw.choice(["fcfs", "priority"]),
            # vLLM's own cache of states needs blocks of one size
            "enable_prefix_caching": model_name != "states",
        },
    )
    is_partly = policy == "recompute" and model_name == "one group"
    life = Life(engine, draw, ahead=2 if is_async else 0, is_partly=is_partly)
    for _ in range(draw.choice([10, 40, 120])):
        life.act()
        if draw.random() < 0.7:
            life.step(draw.choice([0.0, 0.3, 1.0]))
    life.end()
    while life.steps:
        life.finish_step(1.0)
    life.end()
    check_nothing_is_left(engine)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("model_name", MODELS)
def test_requests_of_every_kind_end(world, model_name, policy, is_async):
    for seed in range(4):
        check_life(world, model_name, policy, is_async, seed)
