"""`kvconnector bench`: run a benchmark of the registry and report it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvconnector.bench import gil
from kvconnector.bench.contract import BenchOptions, Gpus, Peer, Staging, Ways
from kvconnector.bench.environment import record_environment
from kvconnector.bench.peers import PEER_SETTINGS, peer_named
from kvconnector.bench.plot import plot_bandwidth
from kvconnector.bench.registry import BENCHMARKS, benchmark_named
from kvconnector.bench.report import Report, print_report
from kvconnector.bench.shapes import MODELS, EngineShape, model_named, parse_numbers, parse_tokens
from kvconnector.bench.units import parse_bytes
from kvconnector.cli.console import print_json, terminal
from kvconnector.errors import ConfigError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LIST = "; ".join(f"{each.name}: {each.description}" for each in BENCHMARKS.values())


def bench(
    benchmark: Annotated[str, typer.Argument(help=f"Which one. {_LIST}.")],
    *,
    model: Annotated[str, typer.Option(help=f"Cache shape: {', '.join(MODELS)}.")] = "llama-3.1-8b",
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the model's.")] = None,
    tokens: Annotated[str, typer.Option(help="Request sizes: 2048 or 16,128,2048.")] = "",
    scattered: Annotated[
        bool, typer.Option("--scattered/--contiguous", help="Blocks at random, or in one run.")
    ] = True,
    prefill: Annotated[str, typer.Option(help="Producer: tp=2,dcp=2,block=16,layout=HND.")] = "",
    decode: Annotated[str, typer.Option(help="Consumer: tp=1,pp=2,block=64,layout=NHD.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    gpus: Annotated[str, typer.Option(help="The ranks' GPUs, producer:consumer: 0,1:2,3.")] = "",
    tls: Annotated[str, typer.Option(help="UCX_TLS, ours and the peer's.")] = "",
    direct: Annotated[str, typer.Option(help="Read pools directly: auto, always, never.")] = "",
    chunk: Annotated[str, typer.Option(help="Longest message, as in 2MiB.")] = "",
    budget: Annotated[str, typer.Option(help="Staging memory of a worker, as in 256MiB.")] = "",
    window: Annotated[int, typer.Option(help="Chunks in flight for a read.", min=0)] = 0,
    peer: Annotated[str, typer.Option(help=f"Compare with: {' or '.join(PEER_SETTINGS)}.")] = "",
    peer_site: Annotated[str, typer.Option(help="Directory to import the peer from.")] = "",
    decode_load: Annotated[
        bool, typer.Option("--decode-load", help="gil: let the consumer's GPU decode meanwhile.")
    ] = False,
    caps: Annotated[str, typer.Option(help="Caps on copy programs for it; 0 is none.")] = "",
    iterations: Annotated[int, typer.Option(help="Timed repetitions.", min=0)] = 0,
    warmup: Annotated[int, typer.Option(help="Untimed repetitions.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of contents and block ids.", min=0)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one operation.", min=1)] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write the report here; - prints it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of bandwidth here.")] = None,
) -> None:
    """Measure, beside the limit of this machine. A wrong result gives no figure and exit status 1."""
    options = BenchOptions(
        model=model_named(model, layers),
        tokens=parse_tokens(tokens) if tokens else (),
        scattered=scattered,
        prefill=EngineShape.parse(prefill) if prefill else None,
        decode=EngineShape.parse(decode) if decode else None,
        device=device,
        gpus=_gpus(gpus),
        ways=Ways(tls, direct),  # type: ignore[arg-type]  # checked there
        staging=Staging(
            chunk_bytes=parse_bytes(chunk) if chunk else 0,
            budget_bytes=parse_bytes(budget) if budget else 0,
            window=window,
        ),
        peer=Peer(peer_named(peer), peer_site),
        decode_caps=_decode_caps(benchmark, decode_load=decode_load, caps=caps),
        iterations=iterations,
        warmup=warmup,
        seed=seed,
        timeout_s=timeout,
    )
    _publish(run_benchmark(benchmark, options), json, plot)


def _gpus(text: str) -> Gpus:
    """From "0,1:2,3", either side left out."""
    prefill, _, decode = text.partition(":")
    return Gpus(parse_numbers(prefill), parse_numbers(decode))


def _decode_caps(benchmark: str, *, decode_load: bool, caps: str) -> tuple[int, ...] | None:
    """The caps, empty for the default ones; None without a decode load."""
    if ((decode_load or caps) and benchmark != gil.BENCHMARK.name) or (caps and not decode_load):
        raise ConfigError(
            "--caps is for --decode-load, and that for gil",
            benchmark=benchmark,
            decode_load=decode_load,
            caps=caps,
        )
    return parse_numbers(caps) if decode_load else None


def run_benchmark(name: str, options: BenchOptions) -> Report:
    """Run one, with a single thread for the libraries' pools, and say on stderr what is under way.

    Raises:
        ResultMismatchError: a result was wrong.
        KVConnectorError: it could not run.
    """
    for variable in _THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    chosen = benchmark_named(name)
    if options.peer.name and not chosen.has_peers:
        raise ConfigError("no peer does this", benchmark=name, peer=options.peer.name)
    environment = record_environment()
    cases = chosen.run(options, lambda text: typer.echo(text, err=True))
    return Report(
        benchmark=name,
        command=shlex.join(["kvconnector", *sys.argv[1:]]),
        options=options,
        environment=environment,
        cases=tuple(cases),
        headline=chosen.headline(cases) if chosen.headline else "",
    )


def _publish(report: Report, json: Path | None, plot: Path | None) -> None:
    if plot is not None:
        plot_bandwidth(report, plot)
    if json is not None and str(json) == "-":
        print_json(report.to_json())
        return
    if json is not None:
        _write(report, json)
    print_report(report, terminal())


def _write(report: Report, path: Path) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report.to_json()), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}", path=str(path)) from error
