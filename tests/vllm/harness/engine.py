"""One in-process vLLM engine in a forked child, driven through a pipe."""

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 20.0
IDLE_S = 0.001
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine is started with. `transfer` is its `kv_transfer_config`, None for an engine alone; `arguments` are
    more of vLLM's.
    """

    model: str
    transfer: dict[str, Any] | None = None
    dtype: str = "float32"
    tp_size: int = 1
    pp_size: int = 1
    block_size: int = 64
    cache_bytes: int = 256 << 20
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    log: Path | None = None

    @property
    def options(self):
        """What vLLM's engines take, however they are run."""
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
    """A finished request. `computed_tokens`: of a prompt whose transfer was waited for, those that were computed."""

    tokens: list[int]
    reason: str
    params: dict[str, Any] | None
    cached_tokens: int
    computed_tokens: int | None
    block_ids: list[list[int]]
    least_gap: float


Run = Callable[[Connection, EngineSpec], None]
"""What a child does: says that it is ready, then answers commands."""


class Engine:
    """The parent's end of a child engine."""

    def __init__(self, spec, run=None):
        context = multiprocessing.get_context("fork")
        self.spec = spec
        self._pipe, child = context.Pipe()
        arguments = (child, spec, run or run_steps)
        self.process = context.Process(target=_main, args=arguments, daemon=False)
        self.process.start()
        with suppress(OSError):  # the child may have done it already, or be gone
            os.setpgid(self.pid, self.pid)
        child.close()

    def wait_until_ready(self, timeout_s=START_TIMEOUT_S):
        """Raises RuntimeError with the child's traceback if it could not start."""
        if not self._pipe.poll(timeout_s):
            raise RuntimeError("the engine did not start in time")
        kind, value = self.receive()
        if kind != "ready":
            raise RuntimeError(f"the engine did not start: {value}")

    def send(self, command, *arguments):
        """A command for the engine's loop."""
        self._pipe.send((command, arguments))

    def receive(self, timeout_s=0.0):
        """The next event, or ("nothing", None)."""
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            return "gone", self.process.exitcode
        return "nothing", None

    @property
    def pid(self):
        """The engine's process, and the group of its workers."""
        pid = self.process.pid
        assert pid is not None  # it was started in the constructor
        return pid

    def kill(self):
        """End the engine and its workers, also those that outlived it, without a goodbye."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join(STOP_TIMEOUT_S)

    def stop(self):
        """End the engine in order, or not, within a bound."""
        with suppress(OSError, ValueError):
            self.send("stop")
            self.process.join(STOP_TIMEOUT_S)
        self.kill()


def end_with_parent():
    """No process outlives the test run, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(pipe, spec, run):
    os.setpgid(0, 0)
    end_with_parent()
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "OMP_NUM_THREADS": "1",
            **spec.environment,
        }
    )
    if spec.log is not None:
        with spec.log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    try:
        run(pipe, spec)
    except BaseException:
        text = traceback.format_exc()
        traceback.print_exc()
        pipe.send(("failed", text))
    finally:
        # an engine's threads must not keep a test run alive
        os._exit(0)


def run_steps(pipe, spec):
    """An engine whose steps this process takes, until it is told to stop."""
    llm = _build(spec)
    pipe.send(("ready", None))
    _Loop(pipe, llm).run()


def _build(spec):
    from vllm import LLM

    options = {"enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8}
    if spec.tp_size * spec.pp_size > 1:
        options["distributed_executor_backend"] = "mp"
    return LLM(
        **options | spec.options,
        tensor_parallel_size=spec.tp_size,
        pipeline_parallel_size=spec.pp_size,
        worker_extension_cls="tests.vllm.harness.digests.CacheDigests",
        disable_log_stats=False,
    ).llm_engine


def sampling_of(max_tokens, params, logprobs):
    """Greedy, to the last token."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        extra_args={"kv_transfer_params": params} if params else None,
    )


class _Loop:
    """Steps the engine until told to stop: also when idle, or a producer never frees its blocks."""

    def __init__(self, pipe, engine):
        self._pipe = pipe
        self._engine = engine
        self._submitted = set()
        self._blocks = {}
        self._computed = {}
        self._preemptions = {}
        self._scheduler = engine.engine_core.engine_core.scheduler

    def run(self):
        while True:
            while self._pipe.poll(0):
                command, arguments = self._pipe.recv()
                if command == "stop":
                    self._engine.engine_core.shutdown()
                    return
                getattr(self, f"_on_{command}")(*arguments)
            outputs = self._engine.step()
            self._look()
            for output in outputs:
                self._on_output(output)
            if not self._submitted:
                time.sleep(IDLE_S)

    def _look(self):
        """Keep what nobody tells of a request after its end: its blocks, and how much of it is computed."""
        for unique_id, request in self._scheduler.requests.items():
            request_id = unique_id.rpartition("-")[0]  # vLLM adds a random part
            blocks = self._scheduler.kv_cache_manager.get_block_ids(unique_id)
            if request_id in self._submitted and any(map(any, blocks)):
                self._blocks[request_id] = [list(each) for each in blocks]
                if request.prefill_stats:  # until its first token
                    self._computed[request_id] = request.prefill_stats.num_computed_tokens
            self._preemptions[unique_id] = request.num_preemptions

    def _on_submit(self, request_id, prompt, max_tokens, params, logprobs):
        sampling = sampling_of(max_tokens, params, logprobs)
        self._submitted.add(request_id)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)

    def _on_abort(self, request_id):
        self._engine.abort_request([request_id])
        self._submitted.discard(request_id)
        self._blocks.pop(request_id, None)
        self._computed.pop(request_id, None)
        self._pipe.send(("aborted", request_id))

    def _on_sleep(self):
        self._engine.sleep(1)
        self._engine.wake_up()
        self._pipe.send(("awake", None))

    def _on_digest(self, wanted):
        self._pipe.send(("digests", self._engine.collective_rpc("cache_digests", args=(wanted,))))

    def _on_reset_cache(self):
        self._pipe.send(("reset", self._engine.reset_prefix_cache()))

    def _on_report(self):
        """Everything that a test may want to know of the engine's state."""
        pool = self._scheduler.kv_cache_manager.block_pool
        self._pipe.send(
            (
                "report",
                {
                    "free_blocks": pool.get_num_free_blocks(),
                    "total_blocks": pool.num_gpu_blocks,
                    "requests": sorted(self._scheduler.requests),
                    "preemptions": sum(self._preemptions.values()),
                },
            )
        )

    def _on_output(self, output):
        if output.finished and output.request_id in self._submitted:
            self._submitted.remove(output.request_id)
            answer = output.outputs[0]
            found = Answer(
                tokens=list(answer.token_ids),
                reason=answer.finish_reason,
                params=output.kv_transfer_params,
                cached_tokens=output.num_cached_tokens or 0,
                computed_tokens=self._computed.pop(output.request_id, None),
                block_ids=self._blocks.pop(output.request_id, []),
                least_gap=least_gap(answer.logprobs),
            )
            self._pipe.send(("finished", (output.request_id, found)))


def least_gap(logprobs):
    """Between the two likeliest tokens, over all positions."""
    gaps = []
    for position in logprobs or []:
        best = sorted((each.logprob for each in position.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return min(gaps, default=0.0)
