"""A child process with vLLM's asynchronous engine: its core is another process, and requests run side by side."""

import asyncio
import time
from dataclasses import dataclass

from tests.vllm.bench.report import BYTES, PATHS, TRANSFER
from tests.vllm.harness.engine import Answer, sampling_of


@dataclass(frozen=True, kw_only=True)
class Timed(Answer):
    """Times of a request and of its first two tokens, in seconds of a clock that all processes share."""

    asked: float
    first: float
    second: float

    @property
    def first_token_s(self):
        return self.first - self.asked


def serve(pipe, spec):
    """Run an engine that takes the commands "submit", "reset_cache", "sleep" and "stats"."""
    asyncio.run(_serve(pipe, spec))


async def _serve(pipe, spec):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    # of loads since they were last asked for
    loads = {TRANSFER: [], BYTES: [], PATHS: []}

    class Transfers(StatLoggerBase):  # type: ignore[misc]  # vLLM is not there when types are checked
        """Durations, bytes and paths of loads, as the connector reports them."""

        def __init__(self, *_):
            pass

        def record(self, scheduler_stats, *_, **__):
            stats = scheduler_stats and scheduler_stats.kv_connector_stats
            if stats:
                _add(loads, stats.get("KVConnector", stats))  # of a MultiConnector's child

        def log_engine_initialized(self):
            pass

    transfer = {"kv_transfer_config": KVTransferConfig(**spec.transfer)}
    options = AsyncEngineArgs(**spec.options | transfer)
    engine = AsyncLLM.from_engine_args(options, stat_loggers=[Transfers])
    pipe.send(("ready", None))
    loop, requests = asyncio.get_running_loop(), []
    while True:
        command, arguments = await loop.run_in_executor(None, pipe.recv)
        if command == "stop":
            break
        if command == "submit":
            requests.append(asyncio.create_task(_submit(pipe, engine, *arguments)))
        elif command == "reset_cache":
            pipe.send((command, await engine.reset_prefix_cache(reset_connector=arguments[0])))
        elif command == "sleep":
            await engine.sleep(1)
            await engine.wake_up()
            pipe.send((command, None))
        else:
            pipe.send((command, dict(loads)))
            loads |= {each: [] for each in loads}
    engine.shutdown()


def _add(loads, stats):
    from kvconnector.integrations.vllm.stats import PATH_PREFIX, counts

    loads[TRANSFER] += stats.get("transfer_duration", [])
    loads[BYTES] += stats.get("bytes_transferred", [])
    for path, count in counts(stats, PATH_PREFIX).items():
        loads[PATHS] += [path] * count


async def _submit(pipe, engine, request_id, prompt, *arguments):
    sampling = sampling_of(*arguments)
    came = []
    asked = time.perf_counter()
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request_id):
        came += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(came))
    first, second = [*came, 0.0, 0.0][:2]
    answer = Timed.of(output, asked=asked, first=first, second=second)
    pipe.send(("finished", {request_id: answer}))
