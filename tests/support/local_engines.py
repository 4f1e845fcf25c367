"""Minillm engines of one rank in this process: scheduler, rank and connector, without servers."""

import functools
import random
from contextlib import closing
from pathlib import Path

import msgspec

from minillm.config import CacheConfig, EngineConfig
from minillm.engine import create_scheduler
from minillm.messages import Step, encoder, to_worker_decoder
from minillm.request import Request
from minillm.transfer import create_scheduler_transfer
from minillm.worker import RankWorker
from tests.support.waiting import until


class LocalEngine:
    """An `Engine` and its rank, one step at a time. Messages are encoded and decoded."""

    def __init__(self, config, run_dir):
        self.scheduler = create_scheduler(config)
        self.rank = RankWorker(config, 0, run_dir)
        try:
            self.transfer = create_scheduler_transfer(config, [self.rank.ready().connector])
        except BaseException:
            self.rank.close()
            raise
        self.scheduler.transfer = self.transfer
        self.answers = {}
        self.params = {}
        self.steps = 0

    def close(self):
        """Close the rank first, as the engine does."""
        self.rank.close()
        self.transfer.close()

    def step(self):
        step = self.scheduler.schedule()
        self.steps += 1
        step.step_id, step.connector = self.steps, self.transfer.build_step()
        step.idle_wait_s = 0.0 if step.inputs else 0.005
        received = to_worker_decoder.decode(encoder.encode(step))
        assert isinstance(received, Step)
        result = self.rank.run(received)
        events = self.transfer.update([result.connector])
        for update in self.scheduler.update(step.inputs, result.tokens, events):
            assert update.token is not None, update.error
            tokens = self.answers.setdefault((update.request_id, update.answer), [])
            tokens.append(update.token)
            if update.finish_reason and update.answer == 0:
                self.params[update.request_id] = update.kv_transfer_params

    def run(self, *requests):
        """Run requests together. Returns the tokens of all their answers."""
        wanted = [(each.request_id, i) for each in requests for i in range(each.num_answers)]
        lengths = {each.request_id: each.max_tokens for each in requests}
        for each in requests:
            self.scheduler.add(each)
        until(
            lambda: all(len(self.answers.get(key, ())) >= lengths[key[0]] for key in wanted),
            self.step,
        )
        return [self.answers[key] for key in wanted]


def prompt_of(length, seed=0):
    """Return reproducible tokens from a small vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def encoder_prompt_of(model, prompt):
    """Return an encoder input of another length than the prompt, or [] for a model without encoder."""
    return [*prompt[::-1], *prompt[: len(prompt) // 3]] if model.is_encoder_decoder else []


def generate(
    model,
    prompt,
    max_tokens,
    *,
    after_prefill=lambda engine: None,
    max_batched_tokens=1 << 14,
    block_size=16,
    **cache,
):
    """Return the tokens that one rank without a connector generates after a prompt."""
    encoder_prompt = encoder_prompt_of(model, prompt)
    num_tokens = len(prompt) + max_tokens + len(encoder_prompt)
    pool = {"block_size": block_size, "num_blocks": num_tokens // block_size + 5}
    config = EngineConfig(
        role="mono",
        engine_id="reference",
        model=model,
        cache=msgspec.convert({**pool, **cache}, CacheConfig),
        max_batched_tokens=max_batched_tokens,
    )
    with closing(LocalEngine(config, Path())) as engine:
        request = Request("r", list(prompt), max_tokens, encoder_prompt=encoder_prompt)
        engine.scheduler.add(request)
        while not engine.answers:
            engine.step()
        after_prefill(engine)
        while engine.scheduler.has_requests:
            engine.step()
        return engine.answers["r", 0]


@functools.cache
def generated(model, prompt, max_tokens):
    """Return what `generate` does in caches of the default shape, once for each `prompt`, a tuple of tokens."""
    return generate(model, prompt, max_tokens)


def token_ids(sampled):
    return [item.token_id for item in sampled]
