"""vLLM engines in forked children, driven through pipes."""

import multiprocessing
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engine_process import STOP_TIMEOUT_S, EngineProcess
from tests.vllm.harness.report import NoAnswerError, becomes

START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine's options. `transfer`: its `kv_transfer_config`; `arguments`: further options of vLLM."""

    model: str
    transfer: dict[str, Any]
    log: Path
    dtype: str = "float32"
    tp_size: int = 1
    pp_size: int = 1
    block_size: int = 64
    cache_bytes: int = 256 << 20
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def options(self):
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "kv_cache_memory_bytes": self.cache_bytes,
            "block_size": self.block_size,
            "kv_transfer_config": self.transfer,
            "seed": 0,
            **self.arguments,
        }


@dataclass(frozen=True)
class Answer:
    """A finished request. `least_gap`: the smallest gap in log probability between the two likeliest tokens of a
    position. `computed_tokens`: how many of its prompt were computed; None before the first step. Where they were
    asked for, `scores` are the log probabilities of its tokens, `gaps` those gaps, and `prompt_scores` the log
    probabilities of the prompt's tokens but the first.
    """

    tokens: list[int]
    reason: str
    params: dict[str, Any] | None
    cached_tokens: int
    least_gap: float
    computed_tokens: int | None
    block_ids: list[list[int]]
    scores: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_scores: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, output, computed_tokens=None, block_ids=(), **more):
        (answer,) = output.outputs
        tokens, gaps = list(answer.token_ids), []
        for position in answer.logprobs or []:
            best = sorted((each.logprob for each in position.values()), reverse=True)
            gaps.append(best[0] - best[1])
        return cls(
            tokens=tokens,
            scores=_scores(answer.logprobs, tokens),
            gaps=gaps,
            prompt_scores=_scores(output.prompt_logprobs, output.prompt_token_ids)[1:],
            reason=answer.finish_reason,
            params=output.kv_transfer_params,
            cached_tokens=output.num_cached_tokens or 0,
            least_gap=min(gaps, default=0.0),
            computed_tokens=computed_tokens,
            block_ids=list(block_ids),
            **more,
        )


def _scores(positions, tokens):
    """Return the log probability of each token; none of the first of a prompt, and [] if none were asked for."""
    pairs = zip(positions, tokens, strict=True) if positions else ()
    return [position[token].logprob if position else 0.0 for position, token in pairs]


class Engine(EngineProcess):
    """The parent's end of a child engine. The child calls `run(pipe, spec)`, which sends "ready" and then answers
    commands. Requests are answered in the order in which they end.
    """

    def __init__(self, spec, run):
        self._pipe, child = multiprocessing.Pipe()
        super().__init__(spec, _serve, child, spec, run)
        child.close()
        self._answers = {}
        self._count = 0

    def wait_until_ready(self):
        self._event(time.monotonic() + START_TIMEOUT_S, "start")

    def submit(self, prompt, params=None, max_tokens=16, logprobs=None, prompt_logprobs=None):
        self._count += 1
        request_id = f"request-{self._count}"
        self._send("submit", request_id, prompt, params, max_tokens, logprobs, prompt_logprobs)
        return request_id

    def answer(self, request_id, timeout_s=ANSWER_TIMEOUT_S):
        deadline = time.monotonic() + timeout_s
        while request_id not in self._answers:
            self._event(deadline, f"answer to {request_id}")
        return self._answers.pop(request_id)

    def ask(self, *arguments, **options):
        return self.answer(self.submit(*arguments, **options))

    def call(self, command, *arguments):
        self._send(command, *arguments)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            kind, value = self._event(deadline, command)
            if kind == command:
                return value

    def forget(self, *, has_tier=False):
        """Empty the engine's prefix cache once its last request's blocks are free, and with `has_tier` its tier."""
        if not becomes(lambda: self.call("reset_cache", has_tier), poll_s=POLL_S):
            raise NoAnswerError("an engine's prefix cache cannot be emptied")

    def stop(self):
        """End the engine in order, or kill it after `STOP_TIMEOUT_S`."""
        self.note_shared_memory()
        with suppress(OSError, ValueError):
            self._send("stop")
            self._process.join(STOP_TIMEOUT_S)
        self.kill()

    def _send(self, command, *arguments):
        self._pipe.send((command, arguments))

    def _event(self, deadline, awaited):
        try:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise NoAnswerError(f"no {awaited} in time")
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise NoAnswerError("the engine is gone; see its log") from error
        if kind == "failed":
            raise NoAnswerError(f"the engine is gone: {value}")
        if kind == "finished":
            self._answers.update(value)
        return kind, value


def _serve(pipe, spec, run):
    try:
        run(pipe, spec)
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise


def run_steps(pipe, spec):
    """Make an engine and take its steps in this process until it is asked to stop."""
    from vllm import LLM

    options = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8}
    options["worker_extension_cls"] = "tests.vllm.harness.digests.CacheDigests"
    if spec.tp_size * spec.pp_size > 1:
        options["distributed_executor_backend"] = "mp"
    llm = LLM(
        **options | spec.options,
        tensor_parallel_size=spec.tp_size,
        pipeline_parallel_size=spec.pp_size,
        disable_log_stats=False,
    )
    pipe.send(("ready", None))
    _Loop(pipe, llm.llm_engine).run()


def sampling_of(params, max_tokens, logprobs, prompt_logprobs=None):
    """Greedy sampling that ignores stop tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        extra_args={"kv_transfer_params": params} if params else None,
    )


class _Loop:
    """Steps the engine until asked to stop, also when it is idle: otherwise a producer never frees its blocks. Sends
    back the results of `on_` methods.
    """

    def __init__(self, pipe, engine):
        self._pipe = pipe
        self._engine = engine
        self._submitted = set()
        self._blocks = {}
        self._lengths = {}
        self._computed = {}
        self._preemptions = {}
        self._loads = {"remote": [], "tier": []}
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._plan, self._scheduler.schedule = self._scheduler.schedule, self._schedule

    def run(self):
        while True:
            while self._pipe.poll(0):
                command, arguments = self._pipe.recv()
                if command == "stop":
                    self._engine.engine_core.shutdown()
                    return
                self._pipe.send((command, getattr(self, f"on_{command}")(*arguments)))
            outputs = self._engine.step()
            self._record_blocks()
            for output in outputs:
                request_id = output.request_id
                if output.finished and request_id in self._submitted:
                    self._pipe.send(
                        ("finished", {request_id: Answer.of(output, *self._end(request_id))})
                    )
            if not self._submitted:
                time.sleep(0.001)

    def _schedule(self, *arguments):
        """Plan a step, and count the tokens of prompts that it computes."""
        planned = self._plan(*arguments)
        for unique_id, count in planned.num_scheduled_tokens.items():
            request_id = unique_id.rpartition("-")[0]
            stop = self._scheduler.requests[unique_id].num_computed_tokens
            of_prompt = min(stop, self._lengths.get(request_id, 0)) - (stop - count)
            self._computed[request_id] = self._computed.get(request_id, 0) + max(0, of_prompt)
        for child in getattr(planned.kv_connector_metadata, "metadata", ()):
            if hasattr(child, "load_jobs"):
                jobs = child.load_jobs.values()
                self._loads["tier"] += [max(job.dst_spec.group_sizes) for job in jobs]
            else:
                ranges = [getattr(order, "token_ranges", None) for order in child.decode().orders]
                self._loads["remote"] += [min(each)[0] for each in ranges if each]
        return planned

    def _record_blocks(self):
        """Record each request's blocks, which the engine does not reveal after its end."""
        for unique_id, request in self._scheduler.requests.items():
            request_id = unique_id.rpartition("-")[0]  # vLLM adds a random part
            blocks = self._scheduler.kv_cache_manager.get_block_ids(unique_id)
            if request_id in self._submitted and any(map(any, blocks)):
                self._blocks[request_id] = [list(each) for each in blocks]
            self._preemptions[unique_id] = request.num_preemptions

    def _end(self, request_id):
        self._submitted.discard(request_id)
        self._lengths.pop(request_id, None)
        return self._computed.pop(request_id, None), self._blocks.pop(request_id, [])

    def on_submit(self, request_id, prompt, *arguments):
        self._submitted.add(request_id)
        self._lengths[request_id] = len(prompt)
        prompt = {"prompt_token_ids": prompt}
        self._engine.add_request(request_id, prompt, sampling_of(*arguments))

    def on_abort(self, request_id):
        self._engine.abort_request([request_id])
        self._end(request_id)

    def on_sleep(self):
        self._engine.sleep(1)
        self._engine.wake_up()

    def on_digests(self, *wanted):
        return self._engine.collective_rpc("cache_digests", args=wanted)

    def on_kinds(self):
        return self._engine.collective_rpc("kinds")[0]

    def on_spoil(self, *rows):
        return self._engine.collective_rpc("spoil", args=rows)

    def on_reset_cache(self, has_tier=False):
        return self._engine.reset_prefix_cache(reset_connector=has_tier)

    def on_loads(self):
        """Orders to a `MultiConnector`'s children since the last call: the first token of each load from another
        engine, and the blocks of each load from the tier, in the group that has most.
        """
        loads, self._loads = self._loads, {"remote": [], "tier": []}
        return loads

    def on_report(self):
        pool = self._scheduler.kv_cache_manager.block_pool
        return {
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self._scheduler.requests),
            "preemptions": sum(self._preemptions.values()),
        }
