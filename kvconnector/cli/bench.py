"""`kvconnector bench`: a command for each benchmark, with its options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from kvconnector.bench import file_errors
from kvconnector.bench.options import THREAD_VARIABLES, BenchOptions, Compute
from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape
from kvconnector.bench.sizes import parse_numbers, parse_tokens
from kvconnector.cli.console import (
    JSON_FILE,
    PICTURE_FILE,
    PICTURES,
    draw_loglog,
    host_and_port,
    picture,
    print_json,
    progress_bar,
    terminal,
)
from kvconnector.cli.statuses import EXIT_ERROR, EXIT_INTERRUPTED
from kvconnector.errors import ConfigError

if TYPE_CHECKING:
    from kvconnector.bench.results import BenchReport, CaseResult, Measurement, ShowProgress


def _parse_device(text: str) -> tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the kind and both engines' GPUs of "cpu", "cuda" or "cuda:0,1:2,3". Raises ConfigError: something else."""
    if not re.fullmatch(r"cpu|cuda(:\d+(,\d+)*){0,2}", text):
        raise ConfigError(
            "a device must be cpu, cuda, or cuda:0,1:2,3, which names the producers' GPUs first",
            given=text,
        )
    kind, _, gpus = text.partition(":")
    producers, _, consumers = gpus.partition(":")
    return kind, (parse_numbers(producers), parse_numbers(consumers))


number_list = partial(click.Option, type=parse_tokens, metavar="N,N,...")
_shape = partial(click.Option, type=EngineShape.parse, metavar="SHAPE", default="block=16")
_OPTIONS = (
    click.Option(
        ["--model"],
        type=ModelShape.parse,
        metavar="MODEL",
        default="llama-3.1-8b",
        help=f"{', '.join(MODELS)}. MODEL,layers=4 uses only 4 layers.",
    ),
    number_list(["--tokens"], default="2048", help="Request sizes, in tokens."),
    click.Option(["--iterations"], type=click.IntRange(1), default=10, help="Timed repetitions."),
    click.Option(
        ["--scattered/--contiguous"], default=True, help="Blocks in random order, or in one run."
    ),
    _shape(["--prefill"], help="Producer: tp=2,dcp=2,block=16,layout=HND."),
    _shape(["--decode"], help="Consumer: tp=1,pp=2,block=64,layout=NHD."),
    click.Option(
        ["--device"],
        type=_parse_device,
        metavar="DEVICE",
        default="cpu",
        help="cpu, cuda, or cuda:0,1:2,3 with the producers' and the consumers' GPUs.",
    ),
    click.Option(["--tls"], help="UCX_TLS for kvconnector and for --peer."),
    click.Option(["--peer"], help="Compare with nixl, mooncake, or both, separated by a comma."),
    click.Option(
        ["--connect"],
        type=host_and_port,
        metavar="HOST:PORT[,KEY]",
        help="Use a producer on another host: the address that `bench serve` printed there.",
    ),
    click.Option(
        ["--compute"],
        type=Compute.parse,
        metavar="RATE,STEP,N,...",
        default="8000,2048,1",
        help="The producer's tokens per second, tokens per step, and number of prompts at once.",
    ),
    click.Option(
        ["--svg"], type=PICTURE_FILE, help=f"Draw it into this file: {', '.join(PICTURES)}."
    ),
    click.Option(["--output"], type=JSON_FILE, help="Write the report here, as JSON."),
    click.Option(["--json"], is_flag=True, help="Print JSON."),
)
"""Options that several benchmarks have. Each benchmark names those that it has, and may have other defaults."""
CUTS = ("prefill", "decode", "device", "tls")
PAIR = ("model", "tokens", "iterations", "scattered", *CUTS)
_REPORT = ("output", "json")


class Benchmark(NamedTuple):
    """A benchmark: its module, the names of its options, and their `defaults` if they differ.

    `own` are options that no other benchmark has, and `make` makes one value of all options. `drawings` are what is
    drawn of a report into the file that an option names.
    """

    module: str
    text: str
    example: str
    options: Sequence[str]
    defaults: Mapping[str, object] = MappingProxyType({})
    own: Sequence[click.Option] = ()
    make: Callable[..., BenchOptions] = BenchOptions
    drawings: Mapping[str, Callable[[BenchReport, Path], None]] = MappingProxyType({})

    def run(self, options: BenchOptions, progress: ShowProgress) -> Iterable[CaseResult]:
        """Yield each case as soon as it is measured."""
        found: Iterable[CaseResult] = import_module(self.module).run(options, progress)
        return found


def draw_handover(report: BenchReport, path: Path, what: str = "last step to loaded") -> None:
    """Draw a handover's times by the prompt's length: a dot for each, and a line of medians. Raises as `picture`."""
    lines: dict[str, dict[int, Measurement]] = {}
    for each in (each for case in report.cases for each in case.measurements):
        prompts, tokens = (int(each.figures[name]) for name in ("prompts", "prompt_tokens"))
        label = each.contender + (f", {prompts} at once" if prompts > 1 else "")
        lines.setdefault(label, {})[tokens] = each
    with picture(path, 6.4, 3.6) as figure:
        axes = figure.add_subplot()
        medians_ms = {
            label: {tokens: each.percentile_s(50) * 1e3 for tokens, each in line.items()}
            for label, line in lines.items()
        }
        draw_loglog(axes, medians_ms, xlabel="prompt, tokens", ylabel=f"{what}, ms")
        for number, line in enumerate(lines.values()):
            for tokens, each in line.items():
                times_ms = [seconds * 1e3 for seconds in each.samples_s]
                axes.plot([tokens] * len(times_ms), times_ms, ".", color=f"C{number}", alpha=0.3)
        figure.tight_layout()


BENCHMARKS = {
    "transfer": Benchmark(
        "kvconnector.bench.transfer",
        "Measure long requests between the processes of two engines, beside the machine's limits.",
        "kvconnector bench transfer --device cuda --tokens 512,2048 --decode tp=2,block=64",
        (*PAIR, "peer", "connect"),
    ),
    "request": Benchmark(
        "kvconnector.bench.transfer",
        "Measure short requests between the processes of two engines, beside the machine's limits.",
        "kvconnector bench request --tokens 16 --tls tcp",
        (*PAIR, "peer", "connect"),
        {"tokens": "16,128,512", "iterations": 100},
    ),
    "handover": Benchmark(
        "kvconnector.bench.handover",
        "Measure the time from a prompt's last step until its cache is loaded, streamed and not streamed.",
        "kvconnector bench handover --compute 8000,2048,1,8 --svg handover.svg",
        (*PAIR, "compute", "connect", "svg"),
        {"tokens": "1024,4096,16384,32768"},
        drawings={"svg": draw_handover},
    ),
}


def _run(name: str, benchmark: Benchmark, *, output: Path | None, json: bool, **given: Any) -> int:
    """Print each case as soon as it is measured, with one thread in libraries' pools. Returns the exit status."""
    from kvconnector.bench.environment import Environment
    from kvconnector.bench.results import BenchReport, CaseResult

    drawn = {option: given.pop(option) for option in benchmark.drawings}
    options = _options(given, benchmark.make)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    environment, cases = Environment(), list[CaseResult]()
    is_interrupted = False
    with progress_bar(name) as progress:
        try:
            for case in benchmark.run(options, progress):
                cases.append(case)
                if not json:
                    case.print_to(terminal())
        except KeyboardInterrupt:
            is_interrupted = True
    report = BenchReport(
        benchmark=name,
        command=shlex.join([str(click.get_current_context().find_root().info_name), *sys.argv[1:]]),
        options=options,
        environment=environment,
        cases=tuple(cases),
    )
    _publish(report.to_json(), output, as_json=json)
    if not json:
        terminal().print(str(environment), soft_wrap=True)
    for option, draw in benchmark.drawings.items():
        if drawn[option] is not None and cases:
            draw(report, drawn[option])
    if is_interrupted:
        kept = f"saved in {output}" if output else "printed"
        click.echo(f"interrupted: {len(cases)} finished cases are {kept}", err=True)
    return EXIT_INTERRUPTED if is_interrupted else 0


def _options(
    given: dict[str, Any], make: Callable[..., BenchOptions] = BenchOptions
) -> BenchOptions:
    given = {name: each for name, each in given.items() if each is not None}
    if "device" in given:
        given["device"], given["gpus"] = given["device"]
    return make(**given)


def _publish(report: object, output: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    if output is not None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
        with file_errors("cannot write the report", output):
            output.write_bytes(encoded + b"\n")


def _serve() -> None:
    from kvconnector.bench.server import serve

    with progress_bar("serve") as progress:
        serve(progress)


def _pairs(*, output: Path | None, json: bool, **given: Any) -> int:
    """Measure all pairs; rank 0 of the job reports. Returns the exit status."""
    from kvconnector.bench import pairs

    is_first = os.environ.get("RANK") == "0"
    with progress_bar("pairs") as progress:
        matrix = pairs.run(_options(given), progress)
    if is_first:
        _publish(matrix, output, as_json=json)
    if is_first and not json:
        matrix.print_to(terminal())
    failed = [each for each in matrix.pairs if each.error]
    for each in failed if is_first else ():
        click.echo(f"from rank {each.producer} to rank {each.consumer}: {each.error}", err=True)
    return EXIT_ERROR if failed else 0


_JOB = Benchmark(
    "pairs",
    "Measure all ordered pairs of a torchrun job's ranks, as a matrix.",
    "torchrun --nproc-per-node 8 -m kvconnector bench pairs --device cuda",
    ("model", "tokens", "iterations", "scattered", "decode", "device", "tls", *_REPORT),
    {"tokens": "512", "iterations": 5},
)
_SERVER = Benchmark(
    "serve",
    "Serve as the producer for `--connect` on another host, until interrupted.",
    "kvconnector bench serve",
    (),
)


def _command(
    name: str, benchmark: Benchmark, call: Callable[..., int | None], more: Sequence[str] = ()
) -> click.Command:
    named = {*benchmark.options, *more}
    return click.Command(
        name,
        callback=call,
        params=[*benchmark.own, *(each for each in _OPTIONS if each.name in named)],
        help=benchmark.text,
        short_help=benchmark.text,
        epilog=f"Example: {benchmark.example}",
        context_settings={"default_map": {**benchmark.defaults}},
    )


def commands_of(benchmarks: Mapping[str, Benchmark]) -> dict[str, click.Command]:
    """Return a command for each benchmark, which also has the options of reports."""
    return {
        name: _command(name, each, partial(_run, name, each), _REPORT)
        for name, each in benchmarks.items()
    }


@click.group(
    commands={
        **commands_of(BENCHMARKS),
        "serve": _command("serve", _SERVER, _serve),
        "pairs": _command("pairs", _JOB, _pairs),
    }
)
def bench() -> None:
    """Measure transfers, and compare them with the limits of this machine. If a result is wrong, no figure is printed
    and the exit status is 1.

    The connector's settings come from the environment, as in an engine, such as KVCONNECTOR_PATHS_DIRECT=never.
    """
