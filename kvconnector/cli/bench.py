"""`kvconnector bench`: run a benchmark and report it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvconnector.bench import gil, handover, pairs, relayout, sessions, soak, transfer
from kvconnector.bench.environment import record_environment
from kvconnector.bench.options import BenchOptions, Compute
from kvconnector.bench.processes import THREAD_VARIABLES
from kvconnector.bench.remote import serve
from kvconnector.bench.results import BenchReport, CaseResult, Measurement, Progress
from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape, parse_numbers, parse_tokens
from kvconnector.cli import EXIT_ERROR
from kvconnector.cli.console import finish_loglog, picture, print_json, terminal
from kvconnector.errors import ConfigError

BENCHMARKS: dict[str, Callable[[BenchOptions, Progress], Iterable[CaseResult]]] = {
    "transfer": partial(transfer.run, tokens=(2048,), iterations=10),
    "request": partial(transfer.run, tokens=(16, 128, 512), iterations=100),
    "handover": handover.run,
    "relayout": relayout.run,
    "gil": gil.run,
    "soak": soak.run,
    "sessions": sessions.run,
}
HAVE_PEERS = ("transfer", "request")
_HELP = (
    "transfer: long requests between two engines' processes; request: short ones;"
    " handover: from a prompt's last step to its cache at the consumer; relayout: one fused copy;"
    " gil: transfers beside engines at work; soak: mixed load, aborts, restarts;"
    " sessions: an event while 100 to 100,000 requests are queued;"
    " serve: be the producer for another host's --connect; pairs: all pairs of a torchrun job."
)


def bench(
    benchmark: Annotated[str, typer.Argument(help=_HELP)],
    *,
    model: Annotated[
        str, typer.Option(help=f"Cache shape: {', '.join(MODELS)}; also MODEL,layers=4.")
    ] = "llama-3.1-8b",
    tokens: Annotated[str, typer.Option(help="Request sizes: 2048 or 16,128,2048.")] = "",
    scattered: Annotated[
        bool, typer.Option("--scattered/--contiguous", help="Blocks at random, or in one run.")
    ] = True,
    prefill: Annotated[str, typer.Option(help="Producer: tp=2,dcp=2,block=16,layout=HND.")] = "",
    decode: Annotated[str, typer.Option(help="Consumer: tp=1,pp=2,block=64,layout=NHD.")] = "",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or cuda:0,1:2,3: producers' and consumers' GPUs.")
    ] = "cpu",
    tls: Annotated[str, typer.Option(help="UCX_TLS, ours and the peer's.")] = "",
    peer: Annotated[str, typer.Option(help="Compare with: nixl.")] = "",
    iterations: Annotated[int, typer.Option(help="Timed repetitions.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="How long a soak runs.", min=1e-3)] = 1.0,
    compute: Annotated[
        str, typer.Option(help="handover: P's tokens/s, tokens a step, prompts at once (1,8).")
    ] = "8000,2048,1",
    connect: Annotated[
        str, typer.Option(help="Producer's host: HOST:PORT[,KEY] of a `bench serve` there.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write the report here; - prints it.")] = None,
    svg: Annotated[Path | None, typer.Option(help="handover: draw the times here.")] = None,
) -> None:
    """Measure, beside the limit of this machine. A wrong result gives no figure and exit status 1.

    The connector's own settings come from the environment, as in an engine: KVCONNECTOR_PATHS_DIRECT=never.
    """
    kind, _, gpus = device.partition(":")
    producers, _, consumers = gpus.partition(":")
    options = BenchOptions(
        model=ModelShape.parse(model),
        tokens=parse_tokens(tokens) if tokens else (),
        scattered=scattered,
        prefill=EngineShape.parse(prefill) if prefill else None,
        decode=EngineShape.parse(decode) if decode else None,
        device=kind,
        gpus=(parse_numbers(producers), parse_numbers(consumers)),
        tls=tls,
        peer=peer,
        iterations=iterations,
        minutes=minutes,
        compute=Compute.parse(compute),
        connect=connect,
    )
    if svg is not None and benchmark != "handover":
        raise ConfigError("only a handover is drawn", benchmark=benchmark)
    if benchmark == "serve":
        serve(_tell)
    elif benchmark == "pairs":
        _pairs(options, json)
    else:
        _run(benchmark, options, json, svg)


def _pairs(options: BenchOptions, json: Path | None) -> None:
    """Rank 0 of the job reports for all."""
    is_first = os.environ.get("RANK") == "0"
    matrix = pairs.run(options, _tell)
    found = {**msgspec.to_builtins(matrix), "gigabytes_per_s": matrix.gigabytes_per_s()}
    found["environment"] = msgspec.to_builtins(record_environment())
    if is_first and not _is_told(found, json):
        terminal().print(matrix.table())
        terminal().print(str(record_environment()), soft_wrap=True)
    for each in matrix.pairs if is_first else ():
        if each.error:
            _tell(f"from rank {each.producer} to rank {each.consumer}: {each.error}")
    if any(each.error for each in matrix.pairs):
        raise typer.Exit(EXIT_ERROR)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _run(name: str, options: BenchOptions, json: Path | None, svg: Path | None) -> None:
    """With a single thread for the libraries' pools; each case is printed when it is known."""
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    if name not in BENCHMARKS:
        raise ConfigError("no such benchmark", benchmark=name, known=list(BENCHMARKS))
    if options.peer and name not in HAVE_PEERS:
        raise ConfigError("no peer does this", benchmark=name, peer=options.peer)
    if options.connect and name not in (*HAVE_PEERS, "handover"):
        raise ConfigError("this is measured on one host", benchmark=name, connect=options.connect)
    environment = record_environment()
    cases = []
    for case in BENCHMARKS[name](options, lambda text: _tell(f"{name}: {text}")):
        cases.append(case)
        if str(json) != "-":
            case.print_to(terminal())
    report = BenchReport(
        benchmark=name,
        command=shlex.join(["kvconnector", *sys.argv[1:]]),
        options=options,
        environment=environment,
        cases=tuple(cases),
    )
    if not _is_told(report.to_json(), json):
        terminal().print(str(environment), soft_wrap=True)
    if svg is not None:
        draw(report, svg)


def _is_told(report: dict[str, Any], path: Path | None) -> bool:
    """Print a report, or write it. Whether nothing else is to be printed."""
    if path is None:
        return False
    if str(path) == "-":
        print_json(report)
        return True
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}", path=str(path)) from error
    return False


def draw(report: BenchReport, path: Path) -> None:
    """Draw a handover's times by the prompt's length: each a dot, and their medians a line. Raises as `picture`."""
    lines: dict[str, dict[int, Measurement]] = {}
    for each in (each for case in report.cases for each in case.measurements):
        prompts, tokens = (int(each.figures[name]) for name in ("prompts", "prompt_tokens"))
        label = each.contender + (f", {prompts} at once" if prompts > 1 else "")
        lines.setdefault(label, {})[tokens] = each
    with picture(path, 6.4, 3.6) as figure:
        axes = figure.add_subplot()
        for number, (label, line) in enumerate(lines.items()):
            for tokens, each in line.items():
                times_ms = [seconds * 1e3 for seconds in each.samples_s]
                axes.plot([tokens] * len(times_ms), times_ms, ".", color=f"C{number}", alpha=0.3)
            medians_ms = [each.percentile_s(50) * 1e3 for each in line.values()]
            axes.loglog(list(line), medians_ms, "o-", color=f"C{number}", label=label)
        lengths = list(dict.fromkeys(tokens for line in lines.values() for tokens in line))
        finish_loglog(axes, lengths, xlabel="prompt, tokens", ylabel="last step to loaded, ms")
        figure.tight_layout()
