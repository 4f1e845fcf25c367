"""`kvconnector bench`: a command for each benchmark, with its options."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from kvconnector.bench import file_errors
from kvconnector.bench.options import THREAD_VARIABLES, BenchOptions, Compute, SoakOptions
from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape
from kvconnector.bench.sizes import parse_numbers, parse_tokens
from kvconnector.cli import EXIT_ERROR, EXIT_INTERRUPTED
from kvconnector.cli.console import (
    JSON_FILE,
    PAGE_WIDTH,
    PICTURE_FILE,
    PICTURES,
    FiniteRange,
    OutputPath,
    draw_loglog,
    host_and_port,
    picture,
    print_json,
    progress_bar,
    terminal,
)

if TYPE_CHECKING:
    from kvconnector.bench.results import BenchReport, CaseResult, Measurement, ShowProgress


def _parse_device(text: str) -> tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the kind and both engines' GPUs of "cpu", "cuda" or "cuda:0,1:2,3"."""
    kind, _, gpus = text.partition(":")
    producers, _, consumers = gpus.partition(":")
    return kind, (parse_numbers(producers), parse_numbers(consumers))


_numbers = partial(click.Option, type=parse_tokens, metavar="N,N,...")
_shape = partial(click.Option, type=EngineShape.parse, metavar="SHAPE", default="block=16")
_OPTIONS = (
    click.Option(
        ["--model"],
        type=ModelShape.parse,
        metavar="MODEL",
        default="llama-3.1-8b",
        help=f"{', '.join(MODELS)}; also MODEL,layers=4.",
    ),
    _numbers(["--tokens"], default="2048", help="Request sizes."),
    click.Option(["--iterations"], type=click.IntRange(1), default=10, help="Timed repetitions."),
    click.Option(["--minutes"], type=FiniteRange(1e-3), default=1.0, help="How long it runs."),
    click.Option(["--hours"], type=FiniteRange(0), help="How long it runs, instead of --minutes."),
    click.Option(
        ["--state"],
        type=JSON_FILE,
        metavar="FILE",
        help="File of what was found: an interrupted run goes on from there.",
    ),
    click.Option(
        ["--other-release"],
        metavar="PATH",
        help="Wheel or folder of another release, which half of the engines' starts run.",
    ),
    click.Option(
        ["--scattered/--contiguous"], default=True, help="Blocks at random, or in one run."
    ),
    _shape(["--prefill"], help="Producer: tp=2,dcp=2,block=16,layout=HND."),
    _shape(["--decode"], help="Consumer: tp=1,pp=2,block=64,layout=NHD."),
    click.Option(
        ["--device"],
        type=_parse_device,
        metavar="DEVICE",
        default="cpu",
        help="cpu, cuda, or cuda:0,1:2,3: producers' and consumers' GPUs.",
    ),
    click.Option(["--tls"], help="UCX_TLS, ours and the peer's."),
    click.Option(["--peer"], help="Compare with: nixl, mooncake, or both with a comma."),
    click.Option(
        ["--connect"],
        type=host_and_port,
        metavar="HOST:PORT[,KEY]",
        help="Producer's host: the address of a `bench serve` there.",
    ),
    click.Option(
        ["--compute"],
        type=Compute.parse,
        metavar="RATE,STEP,N,...",
        default="8000,2048,1",
        help="P's tokens/s, tokens a step, prompts at once.",
    ),
    _numbers(["--pages"], default="16,64", help="Tokens of a page."),
    _numbers(["--bursts"], default="1,2,4,8,16,32,64", help="Requests at once."),
    click.Option(
        ["--html"],
        type=OutputPath(".html", ".htm"),
        help="Write tables and pictures here, as one page.",
    ),
    click.Option(
        ["--svg"], type=PICTURE_FILE, help=f"Draw it into this file: {', '.join(PICTURES)}."
    ),
    click.Option(["--output"], type=JSON_FILE, help="Write the report here, as JSON."),
    click.Option(["--json"], is_flag=True, help="Print JSON."),
)
"""Options of all benchmarks. Each benchmark names those that it has, and may have other defaults."""
_CUTS = ("prefill", "decode", "device", "tls")
_PAIR = ("model", "tokens", "iterations", "scattered", *_CUTS)
_REPORT = ("output", "json")


class Benchmark(NamedTuple):
    """A benchmark: its module in `kvconnector.bench`, the names of its options, and their `defaults` if they differ."""

    module: str
    text: str
    example: str
    options: Sequence[str]
    defaults: dict[str, object]

    def run(self, options: BenchOptions, progress: ShowProgress) -> Iterable[CaseResult]:
        """Yield each case as soon as it is measured."""
        found: Iterable[CaseResult] = import_module(f"kvconnector.bench.{self.module}").run(
            options, progress
        )
        return found


BENCHMARKS = {
    "transfer": Benchmark(
        "transfer",
        "Long requests between the processes of two engines, beside the machine's limits.",
        "transfer --device cuda --tokens 512,2048 --decode tp=2,block=64",
        (*_PAIR, "peer", "connect"),
        {},
    ),
    "request": Benchmark(
        "transfer",
        "Short requests between the processes of two engines, beside the machine's limits.",
        "request --tokens 16 --tls tcp",
        (*_PAIR, "peer", "connect"),
        {"tokens": "16,128,512", "iterations": 100},
    ),
    "handover": Benchmark(
        "handover",
        "From a prompt's last step to its cache at the consumer: streamed, and one engine after the other.",
        "handover --compute 8000,2048,1,8 --svg handover.svg",
        (*_PAIR, "compute", "connect", "svg"),
        {"tokens": "1024,4096,16384,32768"},
    ),
    "relayout": Benchmark(
        "relayout",
        "One fused copy, from an engine's blocks to another's.",
        "relayout --prefill block=16,layout=HND --decode block=64,layout=NHD",
        ("model", "tokens", "iterations", "scattered", "prefill", "decode", "device"),
        {"iterations": 20, "prefill": "block=16,layout=HND", "decode": "block=64"},
    ),
    "gil": Benchmark(
        "gil",
        "Transfers beside engines at work, and what either takes from the other.",
        "gil --device cuda --tokens 8192",
        _PAIR,
        {"iterations": 20},
    ),
    "soak": Benchmark(
        "soak",
        "Mixed load with aborts, faults and other releases, for days if need be: errors by cause, leaks, what grew.",
        "soak --hours 48 --state soak.json --other-release kvconnector-0.1.0-py3-none-any.whl",
        ("model", "tokens", "minutes", "hours", "state", "other_release", *_CUTS),
        {"tokens": "16,100,512"},
    ),
    "inferencex": Benchmark(
        "inferencex",
        "Bursts of requests with DeepSeek-V4-Pro's caches, after InferenceX's kv-transfer, beside NIXL and Mooncake.",
        "inferencex --device cuda --tokens 8192,32768 --html report.html",
        ("tokens", "pages", "bursts", "iterations", "device", "tls", "peer", "html"),
        {"tokens": "8192", "peer": "nixl,mooncake"},
    ),
    "sessions": Benchmark(
        "sessions",
        "What an event costs a worker while 100 to 100,000 requests are queued.",
        "sessions --model llama-3.1-8b",
        ("model", "iterations"),
        {"iterations": 200},
    ),
}


def _run(
    name: str,
    *,
    output: Path | None,
    json: bool,
    svg: Path | None = None,
    html: Path | None = None,
    **given: Any,
) -> int:
    """Print each case as soon as it is measured, with one thread in libraries' pools. Returns the exit status."""
    from kvconnector.bench.environment import Environment
    from kvconnector.bench.results import BenchReport, CaseResult

    options = _options(given)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    environment, cases = Environment(), list[CaseResult]()
    is_interrupted = False
    with progress_bar(name) as progress:
        try:
            for case in BENCHMARKS[name].run(options, progress):
                cases.append(case)
                if not json:
                    case.print_to(terminal())
        except KeyboardInterrupt:
            is_interrupted = True
    report = BenchReport(
        benchmark=name,
        command=shlex.join(["kvconnector", *sys.argv[1:]]),
        options=options,
        environment=environment,
        cases=tuple(cases),
    )
    _publish(report.to_json(), output, as_json=json)
    if not json:
        terminal().print(str(environment), soft_wrap=True)
    if svg is not None and cases:
        draw_handover(report, svg)
    if html is not None and cases:
        write_page(report, html)
    if is_interrupted:
        kept = f"saved in {output}" if output else "printed"
        click.echo(f"interrupted: {len(cases)} finished cases are {kept}", err=True)
    return EXIT_INTERRUPTED if is_interrupted else 0


def _options(given: dict[str, Any]) -> BenchOptions:
    given = {name: each for name, each in given.items() if each is not None}
    if "device" in given:
        given["device"], given["gpus"] = given["device"]
    if hours := given.pop("hours", 0.0):
        given["minutes"] = hours * 60
    if "state" in given:
        given["state"] = str(given["state"])
    soak = {name: given.pop(name) for name in SoakOptions._fields if name in given}
    given["soak"] = SoakOptions(**soak)
    return BenchOptions(**given)


def _publish(report: object, output: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
    if output is not None:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
        with file_errors("cannot write the report", output):
            output.write_bytes(encoded + b"\n")


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


def write_page(report: BenchReport, path: Path) -> None:
    """Write pictures of the bursts' throughput, all tables, and the environment as a page. Raises as `picture`."""
    from rich.console import Console

    console = Console(record=True, width=PAGE_WIDTH, file=StringIO(), highlight=False)
    for case in report.cases:
        case.print_to(console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    drawing = StringIO()
    _draw_bursts(report, drawing)
    svg = drawing.getvalue()
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvconnector bench {escape(report.benchmark)}</title>
<body style="font-family: sans-serif; max-width: 70em; margin: 2em auto">
<h1>kvconnector bench {escape(report.benchmark)}</h1>
<p><code>{escape(report.command)}</code></p>
<p>{escape(str(report.environment))}</p>
{svg[svg.index("<svg") :]}
{tables}
</body></html>
"""
    with file_errors("cannot write the page", path):
        path.write_text(page, encoding="utf-8")


def _draw_bursts(report: BenchReport, target: StringIO) -> None:
    """Draw each contender's GB/s by requests at once, in a panel for each prompt length and page size."""
    panels: dict[tuple[int, int], dict[str, dict[int, float]]] = {}
    for each in (each for case in report.cases for each in case.measurements):
        tokens, page = (int(each.figures[name]) for name in ("prompt_tokens", "page_tokens"))
        line = panels.setdefault((tokens, page), {}).setdefault(each.contender, {})
        line[int(each.figures["requests"])] = each.gigabytes_per_s or 0.0
    with picture(target, 10, 3.4 * len(panels)) as figure:
        for axes, ((tokens, page), lines) in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True
        ):
            title = f"prompts of {tokens} tokens, pages of {page}"
            draw_loglog(axes, lines, title=title, xlabel="requests at once", ylabel="GB/s, median")
        figure.tight_layout()


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
    "All ordered pairs of a torchrun job's ranks, as a matrix.",
    "pairs --device cuda, by torchrun --nproc-per-node 8 -m kvconnector.cli",
    ("model", "tokens", "iterations", "scattered", "decode", "device", "tls", *_REPORT),
    {"tokens": "512", "iterations": 5},
)
_SERVER = Benchmark(
    "serve", "Be the producer for another host's --connect, until interrupted.", "serve", (), {}
)


def _command(name: str, benchmark: Benchmark, call: Callable[..., int | None]) -> click.Command:
    return click.Command(
        name,
        callback=call,
        params=[each for each in _OPTIONS if each.name in benchmark.options],
        help=benchmark.text,
        short_help=benchmark.text,
        epilog=f"Example: kvconnector bench {benchmark.example}",
        context_settings={"default_map": benchmark.defaults},
    )


@click.group()
def bench() -> None:
    """Measure, beside the limit of this machine. A wrong result gives no figure and exit status 1.

    The connector's own settings come from the environment, as in an engine: KVCONNECTOR_PATHS_DIRECT=never.
    """


for _name, _benchmark in BENCHMARKS.items():
    _with_report = _benchmark._replace(options=(*_benchmark.options, *_REPORT))
    bench.add_command(_command(_name, _with_report, partial(_run, _name)))
bench.add_command(_command("serve", _SERVER, _serve))
bench.add_command(_command("pairs", _JOB, _pairs))
