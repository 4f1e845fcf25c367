"""A child process with vLLM's asynchronous engine: its core is another process, and requests run side by side."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from tests.vllm.harness.engine import least_gap, sampling_of

ANSWER_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Ask:
    """A request: prompt, tokens to generate, `kv_transfer_params`."""

    prompt: list[int]
    max_tokens: int
    params: dict[str, Any] | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Told:
    """An answer. When it was asked for and its first token came: seconds of a clock that all processes share."""

    tokens: list[int]
    reason: str
    params: dict[str, Any] | None
    least_gap: float
    asked: float
    first: float

    @property
    def first_token_s(self):
        """From the request to the first token."""
        return self.first - self.asked


def serve(pipe, spec):
    """`Run` of an engine; it answers "ask", "reset_cache" and "stats"."""
    asyncio.run(_serve(pipe, spec))


async def _serve(pipe, spec):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    transfers = []

    class Transfers(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
        """Durations of loads, as the connector reports them."""

        def __init__(self, *_):
            pass

        def record(self, scheduler_stats, *_, **__):
            stats = scheduler_stats and scheduler_stats.kv_connector_stats
            if stats:
                transfers.extend(stats.get("transfer_duration", []))

        def log_engine_initialized(self):
            pass

    transfer = KVTransferConfig(**spec.transfer) if spec.transfer else None
    options = AsyncEngineArgs(**spec.options | {"kv_transfer_config": transfer})
    engine = AsyncLLM.from_engine_args(options, stat_loggers=[Transfers])
    pipe.send(("ready", None))
    loop, count = asyncio.get_running_loop(), 0
    while True:
        command, arguments = await loop.run_in_executor(None, pipe.recv)
        if command == "stop":
            break
        if command == "ask":
            answers = [_one(engine, f"{count + n}", ask) for n, ask in enumerate(arguments[0])]
            count += len(answers)
            pipe.send(("told", await asyncio.gather(*answers)))
        elif command == "reset_cache":
            pipe.send(("reset", await engine.reset_prefix_cache()))
        else:
            pipe.send(("stats", transfers.copy()))
            transfers.clear()
    engine.shutdown()


async def _one(engine, request_id, ask):
    sampling = sampling_of(ask.max_tokens, ask.params, ask.logprobs)
    first, output = 0.0, None
    asked = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            prompt = {"prompt_token_ids": ask.prompt}
            async for output in engine.generate(prompt, sampling, request_id):
                if not first and output.outputs[0].token_ids:
                    first = time.perf_counter()
    except TimeoutError:
        output = None
    if output is None:
        return Told([], "no answer in time", None, 0.0, asked, first)
    answer = output.outputs[0]
    return Told(
        tokens=list(answer.token_ids),
        reason=str(answer.finish_reason),
        params=output.kv_transfer_params,
        least_gap=least_gap(answer.logprobs),
        asked=asked,
        first=first,
    )
