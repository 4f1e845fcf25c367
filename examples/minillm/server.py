"""The HTTP server of one engine: completions, health, metrics. `prefill_server` and `decode_server` choose the role."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_args

import msgspec
from aiohttp import web

from kvconnector.errors import KVConnectorError
from minillm.config import (
    Architecture,
    BlockTables,
    EngineConfig,
    FailurePolicy,
    ModelConfig,
    Role,
    engine_shape,
    parse_engine_options,
)
from minillm.engine import Engine, EngineDeadError
from minillm.http_api import (
    MAX_BODY_BYTES,
    SSE_DONE,
    ApiError,
    CompletionRequest,
    completion_body,
    completion_choice,
    error_middleware,
    read_completion_request,
    sse,
    usage,
)
from minillm.http_serving import add_server_arguments, run_app
from minillm.messages import SampledToken
from minillm.processes import (
    ChildFailedError,
    die_with_parent,
    log_to_stderr,
    run_until_signal,
)
from minillm.request import Request, RequestUpdate

logger = logging.getLogger(__name__)


class CompletionHandler:
    """POST /v1/completions of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def completions(self, http_request: web.Request) -> web.StreamResponse:
        """Serve one completion, as one JSON body or as a stream. A client that goes away aborts it."""
        body = await read_completion_request(http_request)
        prompt, encoder_prompt = body.token_ids(self.engine.config.model.vocab_size)
        request = Request(
            request_id=f"cmpl-{uuid.uuid4().hex}",
            prompt=prompt,
            encoder_prompt=encoder_prompt,
            max_tokens=body.max_tokens,
            stop_token_ids=frozenset(body.stop_token_ids),
            cache_salt=body.cache_salt,
            kv_transfer_params=body.kv_transfer_params,
            num_answers=body.n,
        )
        try:
            if body.stream:
                return await self._stream(http_request, body, request)
            return await self._respond(body, request)
        except KVConnectorError as error:
            # raised before the request is queued: its sizes or its params cannot be used
            raise ApiError(400, str(error)) from error
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from error

    async def _respond(self, body: CompletionRequest, request: Request) -> web.Response:
        tokens: list[list[SampledToken]] = [[] for _ in range(body.n)]
        reasons: dict[int, str | None] = {}
        extra: dict[str, Any] = {}
        cached_tokens = 0
        async with aclosing(self.engine.generate(request)) as updates:
            async for update in updates:
                if update.finish_reason == "error":
                    raise ApiError.of_load(update.error)
                if update.token is not None:
                    tokens[update.answer].append(update.token)
                reasons[update.answer] = update.finish_reason
                if update.answer == 0 and update.finish_reason:
                    extra, cached_tokens = self._transfer_fields(update), update.cached_tokens
        choices = [
            completion_choice(body, index, each, reasons.get(index))
            for index, each in enumerate(tokens)
        ]
        payload = completion_body(body, request.request_id, choices)
        counts = usage(len(request.prompt), sum(map(len, tokens)), cached_tokens)
        return web.json_response({**payload, "usage": counts, **extra})

    async def _stream(
        self, http_request: web.Request, body: CompletionRequest, request: Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        sent = 0
        async with aclosing(self.engine.generate(request)) as updates:
            async for update in updates:
                if update.finish_reason == "error":
                    failed = ApiError.of_load(update.error)
                    if not response.prepared:
                        raise failed
                    await response.write(sse(failed.body))
                    break
                if not response.prepared:
                    # only now: before the first token an error can still have its own status
                    await response.prepare(http_request)
                tokens = [update.token] if update.token else []
                sent += len(tokens)
                choice = completion_choice(body, update.answer, tokens, update.finish_reason)
                payload = completion_body(body, request.request_id, [choice])
                if update.finish_reason and update.answer == 0:
                    payload["usage"] = usage(len(request.prompt), sent, update.cached_tokens)
                    payload.update(self._transfer_fields(update))
                await response.write(sse(payload))
        await response.write(SSE_DONE)
        await response.write_eof()
        return response

    def _transfer_fields(self, update: RequestUpdate) -> dict[str, Any]:
        """Return the last response's fields about its KV: params for the next engine, and figures of its own load."""
        if update.finish_reason is None:
            return {}
        fields: dict[str, Any] = {"kv_transfer_params": update.kv_transfer_params}
        if stats := self.engine.scheduler.transfer.stats.get(update.request_id):
            fields["kv_transfer_stats"] = msgspec.to_builtins(stats)
        return fields


class StatusHandlers:
    """GET /health, GET /metrics, GET /transfers and POST /reset_prefix_cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def health(self, request: web.Request) -> web.Response:
        """200 while the engine serves; 503 with the reason once it cannot."""
        if self.engine.failure is not None:
            raise ApiError(503, self.engine.failure_summary)
        return web.json_response({"status": "ok", "engine_id": self.engine.config.engine_id})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget all cached prefixes. Requests that run keep their blocks."""
        self.engine.scheduler.blocks.reset_prefix_cache()
        return web.json_response({"status": "ok"})

    async def transfers(self, request: web.Request) -> web.Response:
        """Return the loads under way, as `kvconnector top` reads them."""
        return web.json_response(
            msgspec.to_builtins(self.engine.scheduler.transfer.loads_in_flight)
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Counters and gauges in Prometheus' text format."""
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        engine = self.engine
        values = {
            "minillm_steps": engine.steps_total,
            "minillm_computed_tokens": engine.tokens_total,
            "minillm_free_blocks": engine.scheduler.blocks.get_num_free_gpu_blocks(),
            "minillm_blocks": engine.scheduler.blocks.num_blocks,
            "minillm_swapped_blocks": engine.scheduler.blocks.swapped_blocks,
            "minillm_prefix_hit_rate": engine.scheduler.blocks.get_prefix_cache_hit_rate(),
        }
        for name, value in values.items():
            Gauge(name, name.replace("_", " "), registry=registry).set(value)
        body = generate_latest(registry) + generate_latest(engine.scheduler.transfer.registry)
        return web.Response(body=body, content_type="text/plain")


def create_app(engine: Engine) -> web.Application:
    """Return the engine's HTTP application."""
    app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY_BYTES)
    status = StatusHandlers(engine)
    app.add_routes(
        [
            web.post("/v1/completions", CompletionHandler(engine).completions),
            web.get("/health", status.health),
            web.get("/metrics", status.metrics),
            web.get("/transfers", status.transfers),
            web.post("/reset_prefix_cache", status.reset_prefix_cache),
        ]
    )
    return app


async def serve(config: EngineConfig, arguments: argparse.Namespace) -> None:
    """Start the engine, then serve it."""
    arguments.log_dir.mkdir(parents=True, exist_ok=True)
    async with Engine(config, arguments.log_dir) as engine:
        await run_app(create_app(engine), arguments.host, arguments.port, arguments.port_file)


def parse_config(role: Role, argv: list[str]) -> tuple[EngineConfig, argparse.Namespace]:
    """Return the engine's configuration from a command line."""
    parser = argparse.ArgumentParser(prog=f"minillm {role} server")
    add_server_arguments(parser)
    parser.add_argument("--log-dir", type=Path, default=Path("build/minillm-logs"))
    parser.add_argument("--engine-id", default=f"{role}-{os.getpid()}")
    parser.add_argument("--engine", default="", help="e.g. tp=2,pp=1,block=16,layout=HND")
    parser.add_argument("--model", choices=get_args(Architecture), default="llama")
    parser.add_argument("--model-config", type=Path, help="JSON file with ModelConfig's fields")
    parser.add_argument("--weights", default="", help="safetensors file; default: random weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--device-offset", type=int, default=0)
    parser.add_argument("--block-tables", choices=get_args(BlockTables), help="default: by device")
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="of one step")
    parser.add_argument("--failure-policy", choices=get_args(FailurePolicy), default="recompute")
    parser.add_argument("--connector", default="{}", help="JSON for ConnectorConfig.from_mapping")
    arguments = parser.parse_args(argv)
    fields: dict[str, Any] = {"architecture": arguments.model, "weights": arguments.weights}
    if arguments.model_config:
        fields.update(msgspec.json.decode(arguments.model_config.read_bytes()))
    parallel, cache = engine_shape(parse_engine_options(arguments.engine))
    config = EngineConfig(
        role=role,
        engine_id=arguments.engine_id,
        model=msgspec.convert(fields, ModelConfig),
        parallel=parallel,
        cache=cache,
        device=arguments.device,
        device_offset=arguments.device_offset,
        block_tables=arguments.block_tables,
        max_batched_tokens=arguments.max_batched_tokens,
        failure_policy=arguments.failure_policy,
        connector=msgspec.json.decode(arguments.connector, type=dict[str, Any]),
    )
    return config, arguments


def main(role: Role, argv: list[str] | None = None) -> int:
    """Entry point of an engine's server process."""
    die_with_parent(signal.SIGTERM)
    log_to_stderr()
    try:
        config, arguments = parse_config(role, sys.argv[1:] if argv is None else argv)
        run_until_signal(serve(config, arguments))
    except (ChildFailedError, KVConnectorError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("mono"))
