"""`python -m minillm.demo`: prefill on one engine, decode on another, every token compared with a third that does both.

Starts a prefill engine, two decode engines of another shape with a router each, and a monolithic engine without a
connector as the reference, all as processes of their own. One decode engine reads the prefill engine's pools directly,
the other has the blocks packed and sent over UCX. Exit status 1 on any difference.

Each path is measured alike: after a prompt that warms it up, and with a cache salt of its own, so that the prefill
engine computes every prompt for each of them. A transfer's time is its own, without the prompt's computation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minillm.client import Completion, CompletionError, complete
from minillm.cluster import Cluster, Server
from minillm.config import (
    Architecture,
    ModelConfig,
    engine_shape,
    parse_engine_options,
)
from minillm.demo_picture import draw_picture
from minillm.processes import ChildFailedError, die_with_parent, run_until_signal

PATHS = {"direct": "auto", "packed": "never"}
"""The paths by which a decode engine gets blocks, and the value of `paths.direct` for each."""
WARM_UP_TOKENS = 64
LOGPROB_TOLERANCE = 1e-3
"""Rounding from another tensor-parallel split stays far below; one lost block of one layer exceeds it."""


class PromptResult(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt through both paths."""

    prompt_tokens: int
    decoded_tokens: int
    bytes: int
    transfer_s: float
    path: str
    first_token_s: float
    largest_logprob_difference: float
    identical: bool

    @property
    def gigabytes_per_s(self) -> float:
        """Payload over the transfer's time; 0 without a transfer."""
        return self.bytes / self.transfer_s / 1e9 if self.transfer_s > 0 else 0.0


def compare(num_prompt: int, remote: Completion, reference: Completion) -> PromptResult:
    """Compare the two engines' completions of one prompt of `num_prompt` tokens.

    A prompt of several tokens must have been transferred: one that was computed again proves nothing.
    """
    stats = remote.kv_transfer_stats or {}
    difference = remote.largest_logprob_difference(reference)
    was_moved = num_prompt == 1 or stats.get("bytes", 0) > 0
    same_tokens = remote.token_ids == reference.token_ids
    return PromptResult(
        prompt_tokens=num_prompt,
        decoded_tokens=len(remote.token_ids),
        bytes=int(stats.get("bytes", 0)),
        transfer_s=float(stats.get("seconds", 0.0)),
        path=str(stats.get("path", "")),
        first_token_s=remote.first_token_s,
        largest_logprob_difference=difference,
        identical=same_tokens and was_moved and difference <= LOGPROB_TOLERANCE,
    )


def split_prompt(model: str, tokens: list[int]) -> dict[str, list[int]]:
    """Return a prompt's fields in a request. Encoder-decoder models encode all of it, and decode from its end."""
    if model != "encoder-decoder":
        return {"prompt": tokens}
    return {"encoder_prompt": tokens, "prompt": tokens[-max(2, len(tokens) // 4) :]}


class Servers(NamedTuple):
    """The demo's servers: a decode engine and a router for each path, and the reference engine."""

    decodes: Mapping[str, Server]
    routers: Mapping[str, Server]
    reference: Server


def engine_arguments(arguments: argparse.Namespace, shape: str, offset: int) -> list[str]:
    """Arguments of one engine's server; `offset` is its first device."""
    # a failed transfer must fail the demo, not be recomputed silently
    common = ["--model", arguments.model, "--device", arguments.device, "--failure-policy", "fail"]
    return [*common, "--engine", shape, "--device-offset", str(offset)]


async def start_servers(cluster: Cluster, arguments: argparse.Namespace) -> Servers:
    """Start all servers, and wait until they are healthy."""
    prefill_ranks = engine_shape(parse_engine_options(arguments.prefill))[0].world_size
    decode_ranks = engine_shape(parse_engine_options(arguments.decode))[0].world_size

    async def engine(name: str, role: str, shape: str, offset: int, direct: str = "auto") -> Server:
        extra = engine_arguments(arguments, shape, offset)
        if role == "decode":
            extra += ["--connector", json.dumps({"paths": {"direct": direct}})]
        return await cluster.start_engine(name, role, extra)

    prefill = await engine("prefill-0", "prefill", arguments.prefill, 0)
    decodes = {
        path: await engine(f"decode-{path}", "decode", arguments.decode, prefill_ranks, direct)
        for path, direct in PATHS.items()
    }
    reference = await engine("reference", "mono", "block=16", prefill_ranks + decode_ranks)
    await cluster.wait_healthy(prefill, *decodes.values(), reference)
    routers = {
        path: await cluster.start_router(f"router-{path}", prefill, decode)
        for path, decode in decodes.items()
    }
    await cluster.wait_healthy(*routers.values())
    return Servers(decodes, routers, reference)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Every prompt on each path, and the blocks that the decode engines swapped to host memory meanwhile."""

    results: list[PromptResult]
    swapped_blocks: int


async def run(arguments: argparse.Namespace, console: Console, cluster: Cluster) -> Run:
    """Start the servers, send the prompts, `arguments.concurrent` at a time, stop the servers."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(arguments.vocab_size) for _ in range(length)] for length in arguments.prompts
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    async with cluster:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting the engines", total=len(prompts) * len(PATHS))
            servers = await start_servers(cluster, arguments)
            progress.update(task, description="prompts")
            places = asyncio.Semaphore(arguments.concurrent)

            async def ask(server: Server, tokens: list[int], salt: str) -> Completion:
                return await complete(
                    cluster.session,
                    server.url,
                    max_tokens=arguments.max_tokens,
                    n=arguments.answers,
                    cache_salt=salt,
                    **split_prompt(arguments.model, tokens),
                )

            async def one(tokens: list[int]) -> list[PromptResult]:
                found = []
                async with places:
                    expected = await ask(servers.reference, tokens, "")
                    for path, router in servers.routers.items():
                        remote = await ask(router, tokens, path + arguments.cache_salt)
                        num_prompt = len(split_prompt(arguments.model, tokens)["prompt"])
                        found.append(compare(num_prompt, remote, expected))
                        progress.advance(task)
                return found

            for router in servers.routers.values():
                await ask(router, prompts[0][:WARM_UP_TOKENS], "warm-up")
            results = [each for found in await asyncio.gather(*map(one, prompts)) for each in found]
            swapped = 0.0
            for decode in servers.decodes.values():
                gauges = await decode.metrics(cluster.session)
                swapped += gauges["minillm_swapped_blocks"]
            progress.update(task, description="stopping the engines")
            await cluster.stop(list(cluster.servers))
            progress.update(task, description="done")
    return Run(results=results, swapped_blocks=int(swapped))


def result_table(results: list[PromptResult]) -> Table:
    """Return a table with one row per prompt."""
    table = Table(
        title="prefill on one engine, decode on another", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in (
        "prompt\ntokens",
        "bytes",
        "transfer\nms",
        "GB/s",
        "path",
        "first\ntoken ms",
        "Δ\nlogprob",
        "identical",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            str(result.prompt_tokens),
            f"{result.bytes:,}",
            f"{result.transfer_s * 1e3:.2f}",
            f"{result.gigabytes_per_s:.2f}",
            result.path.partition(",")[0] or "-",
            f"{result.first_token_s * 1e3:.0f}",
            f"{result.largest_logprob_difference:.1e}",
            "yes" if result.identical else "NO",
        )
    return table


def _prompt_lengths(text: str) -> list[int]:
    lengths = [int(item) for item in text.split(",")]
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError("prompts need at least one token")
    return lengths


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _engine_text(text: str) -> str:
    try:
        engine_shape(parse_engine_options(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the demo's command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Prefill on one engine, decode on another; compare tokens."
    )
    shape = (
        "tp, pp, dcp, interleave, layers (e.g. 5+3), block, layout (HND, NHD, HDN, CROSS), blocks, host, prefix, "
        "states; default %(default)s"
    )
    parser.add_argument(
        "--prefill", type=_engine_text, default="tp=2,pp=1,block=16,layout=HND", help=shape
    )
    parser.add_argument(
        "--decode", type=_engine_text, default="tp=1,pp=2,block=64,layout=NHD", help=shape
    )
    parser.add_argument("--model", choices=get_args(Architecture), default="llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--prompts",
        type=_prompt_lengths,
        default=[7, 64, 130, 600, 2000],
        help="lengths, in tokens",
    )
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to decode per prompt")
    parser.add_argument(
        "--concurrent", type=_positive, default=1, help="prompts at a time; many fill small caches"
    )
    parser.add_argument(
        "--answers", type=_positive, default=1, help="to each prompt, which share its blocks"
    )
    parser.add_argument(
        "--cache-salt", default="", help="only requests with the same one find known prompts again"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("build/demo-plan.svg"),
        help="draw here who reads what from whom; default %(default)s",
    )
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="two hosts made of namespaces: the engine that reads directly beside the prefill engine, the other alone",
    )
    arguments = parser.parse_args(argv)
    arguments.vocab_size = ModelConfig().vocab_size
    return arguments


def main(cluster: Cluster | None = None) -> int:
    """Run the demo. 0: all tokens identical; 1: a difference or a failure; 130: interrupted."""
    die_with_parent(signal.SIGTERM)
    arguments = parse_arguments()
    console = Console()
    console.print(f"prefill  {arguments.prefill}\ndecode   {arguments.decode}", highlight=False)
    console.print(draw_picture(arguments), highlight=False, soft_wrap=True)
    started = time.perf_counter()
    try:
        finished = run_until_signal(run(arguments, console, cluster or Cluster()))
    except (ChildFailedError, CompletionError) as error:
        console.print(
            f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    if finished is None:
        console.print("interrupted; every process was stopped")
        return 130
    results = finished.results
    total_s = time.perf_counter() - started
    console.print(result_table(results))
    identical = sum(result.identical for result in results)
    megabytes = sum(result.bytes for result in results) / 1e6
    console.print(
        f"{identical} of {len(results)} runs ({len(arguments.prompts)} prompts, read directly and packed) decoded "
        f"identically on the other engine; "
        f"{megabytes:.1f} MB of KV cache moved; {finished.swapped_blocks} blocks swapped to host "
        f"memory; {total_s:.1f} s in all",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if identical == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
