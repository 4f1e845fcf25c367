"""`python -m minillm.demo`: prefill on one engine, decode on another, every token compared with a third that does both.

Starts a prefill engine, a decode engine of another shape and a router, all as processes of their own, and a monolithic
engine without a connector as the reference. Exit status 1 on any difference.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minillm.client import Completion, CompletionError, complete
from minillm.cluster import Cluster, Server
from minillm.config import Architecture, ModelConfig, engine_shape, parse_engine_options
from minillm.processes import ChildFailedError, die_with_parent, run_until_signal

LOGPROB_TOLERANCE = 1e-3
"""Rounding of another tensor-parallel split stays orders below; one lost block of one layer goes beyond."""


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
    """What the two engines made of one prompt of `num_prompt` tokens.

    A prompt of several tokens must have been moved: one that was computed again proves nothing.
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


async def start_servers(cluster: Cluster, arguments: argparse.Namespace) -> tuple[Server, Server]:
    """Start everything. Returns the router and the reference engine, both healthy."""
    prefill_ranks = engine_shape(parse_engine_options(arguments.prefill))[0].world_size
    decode_ranks = engine_shape(parse_engine_options(arguments.decode))[0].world_size
    # a transfer that fails must fail the demo, not be computed again in silence
    common = ["--model", arguments.model, "--device", arguments.device, "--failure-policy", "fail"]

    async def engine(name: str, role: str, shape: str, offset: int) -> Server:
        extra = ["--engine", shape, "--device-offset", str(offset)]
        return await cluster.start_engine(name, role, [*common, *extra])

    prefill = await engine("prefill-0", "prefill", arguments.prefill, 0)
    decode = await engine("decode-0", "decode", arguments.decode, prefill_ranks)
    reference = await engine("reference", "mono", "block=16", prefill_ranks + decode_ranks)
    await cluster.wait_healthy(prefill, decode, reference)
    router = await cluster.start_router("router", prefill, decode)
    await cluster.wait_healthy(router)
    return router, reference


async def run(arguments: argparse.Namespace, console: Console) -> list[PromptResult]:
    """Start the servers, send the prompts one after the other, stop the servers."""
    results = []
    rng = random.Random(arguments.seed)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    async with Cluster() as cluster:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting the engines", total=len(arguments.prompts))
            router, reference = await start_servers(cluster, arguments)
            for length in arguments.prompts:
                progress.update(task, description=f"prompt of {length} tokens")
                prompt = [rng.randrange(arguments.vocab_size) for _ in range(length)]
                session, count = cluster.session, arguments.max_tokens
                remote = await complete(session, router.url, prompt, count)
                expected = await complete(session, reference.url, prompt, count)
                results.append(compare(length, remote, expected))
                progress.advance(task)
            progress.update(task, description="stopping the engines")
            await cluster.stop(list(cluster.servers))
            progress.update(task, description="done")
    return results


def result_table(results: list[PromptResult]) -> Table:
    """One row a prompt."""
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
            result.path.rpartition(", ")[2]
            or "-",  # "packed, pumped" would not fit a narrow terminal
            f"{result.first_token_s * 1e3:.0f}",
            f"{result.largest_logprob_difference:.1e}",
            "yes" if result.identical else "NO",
        )
    return table


def report(
    arguments: argparse.Namespace, results: list[PromptResult], total_s: float
) -> dict[str, Any]:
    """The run as data, for `--json`."""
    return {
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "model": arguments.model,
        "device": arguments.device,
        "cpu_count": os.cpu_count(),
        "total_s": total_s,
        "identical": all(result.identical for result in results),
        "prompts": [
            {**msgspec.to_builtins(result), "gigabytes_per_s": result.gigabytes_per_s}
            for result in results
        ],
    }


def _prompt_lengths(text: str) -> list[int]:
    lengths = [int(item) for item in text.split(",")]
    if min(lengths) < 1:
        raise argparse.ArgumentTypeError("prompts need at least one token")
    return lengths


def _engine_text(text: str) -> str:
    try:
        engine_shape(parse_engine_options(text))
    except (ValueError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The demo's command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Prefill on one engine, decode on another; compare tokens."
    )
    shape = (
        "tp, pp, layers (e.g. 5+3), block, layout (HND, NHD, HDN), blocks, host, prefix, states; "
        "default %(default)s"
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
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args(argv)
    arguments.vocab_size = ModelConfig().vocab_size
    return arguments


def main() -> int:
    """Run the demo. 0: all tokens identical; 1: a difference or a failure; 130: interrupted."""
    die_with_parent(signal.SIGTERM)
    arguments = parse_arguments()
    console = Console()
    console.print(f"prefill  {arguments.prefill}\ndecode   {arguments.decode}", highlight=False)
    started = time.perf_counter()
    try:
        results = run_until_signal(run(arguments, console))
    except (ChildFailedError, CompletionError) as error:
        console.print(
            f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    if results is None:
        console.print("interrupted; every process was stopped")
        return 130
    total_s = time.perf_counter() - started
    console.print(result_table(results))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(report(arguments, results, total_s)))
    identical = sum(result.identical for result in results)
    megabytes = sum(result.bytes for result in results) / 1e6
    console.print(
        f"{identical} of {len(results)} prompts decoded identically on the other engine; "
        f"{megabytes:.1f} MB of KV cache moved; {total_s:.1f} s in all",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if identical == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
