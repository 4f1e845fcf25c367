"""`scripts/bench`: the benchmarks of `kvconnector bench`, and those that only a developer of kvconnector needs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial
from html import escape
from io import StringIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from kvconnector.bench import file_errors
from kvconnector.bench.results import format_seconds
from kvconnector.bench.sizes import parse_tokens
from kvconnector.bench.tables import Fitted
from kvconnector.cli.app import CONTEXT, STATUSES, run
from kvconnector.cli.bench import CUTS, PAIR, Benchmark, bench, commands_of
from kvconnector.cli.console import (
    JSON_FILE,
    FiniteRange,
    OutputPath,
    draw_loglog,
    picture,
    progress_bar,
    terminal,
)
from scripts.benchmarks import turns as two_trees
from scripts.benchmarks.inferencex import BurstOptions
from scripts.benchmarks.pacing import PacingOptions
from scripts.benchmarks.soak import SoakOptions

if TYPE_CHECKING:
    from kvconnector.bench.results import BenchReport

PROGRAM = "scripts/bench"
PAGE_COLUMNS = 100


def write_page(report: BenchReport, path: Path) -> None:
    """Write pictures of the bursts' throughput, all tables, and the environment as a page. Raises as `picture`."""
    from rich.console import Console

    console = Console(record=True, width=PAGE_COLUMNS, file=StringIO(), highlight=False)
    for case in report.cases:
        case.print_to(console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    drawing = StringIO()
    _draw_bursts(report, drawing)
    svg = drawing.getvalue()
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{PROGRAM} {escape(report.benchmark)}</title>
<body style="font-family: sans-serif; max-width: 70em; margin: 2em auto">
<h1>{PROGRAM} {escape(report.benchmark)}</h1>
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


def _soak_options(*, hours: float = 0.0, state: Path | None = None, **given: Any) -> SoakOptions:
    if hours:
        given["minutes"] = hours * 60
    return SoakOptions(state=str(state or ""), **given)


_numbers = partial(click.Option, type=parse_tokens, metavar="N,N,...")
BENCHMARKS = {
    "relayout": Benchmark(
        "scripts.benchmarks.relayout",
        "One fused copy, from an engine's blocks to another's.",
        "scripts/bench relayout --prefill block=16,layout=HND --decode block=64,layout=NHD",
        ("model", "tokens", "iterations", "scattered", "prefill", "decode", "device"),
        {"iterations": 20, "prefill": "block=16,layout=HND", "decode": "block=64"},
    ),
    "gil": Benchmark(
        "scripts.benchmarks.gil",
        "Transfers beside engines at work, and what either takes from the other.",
        "scripts/bench gil --device cuda --tokens 8192",
        PAIR,
        {"iterations": 20},
    ),
    "pacing": Benchmark(
        "scripts.benchmarks.pacing",
        "Transfers beside engines at work, with each constant of the pacing switched off in turn.",
        "scripts/bench pacing --device cuda:0:1 --tokens 256 --seconds 200",
        PAIR,
        {"tokens": "256", "iterations": 12},
        own=(
            click.Option(
                ["--seconds"],
                type=FiniteRange(0),
                default=120.0,
                help="No round begins that would end later; the first always does.",
            ),
        ),
        make=PacingOptions,
    ),
    "soak": Benchmark(
        "scripts.benchmarks.soak",
        "Mixed load with aborts, faults and other releases, for days if need be: errors by cause, leaks, what grew.",
        "scripts/bench soak --hours 48 --state soak.json --other-release kvconnector-0.1.0-py3-none-any.whl",
        ("model", "tokens", *CUTS),
        {"tokens": "16,100,512"},
        own=(
            click.Option(
                ["--minutes"], type=FiniteRange(1e-3), default=1.0, help="How long it runs."
            ),
            click.Option(
                ["--hours"], type=FiniteRange(0), help="How long it runs, instead of --minutes."
            ),
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
        ),
        make=_soak_options,
    ),
    "inferencex": Benchmark(
        "scripts.benchmarks.inferencex",
        "Bursts of requests with DeepSeek-V4-Pro's caches, after InferenceX's kv-transfer, beside NIXL and Mooncake.",
        "scripts/bench inferencex --device cuda --tokens 8192,32768 --html report.html",
        ("tokens", "iterations", "device", "tls", "peer"),
        {"tokens": "8192", "peer": "nixl,mooncake"},
        own=(
            _numbers(["--pages"], default="16,64", help="Tokens of a page."),
            _numbers(["--bursts"], default="1,2,4,8,16,32,64", help="Requests at once."),
            click.Option(
                ["--html"],
                type=OutputPath(".html", ".htm"),
                help="Write tables and pictures here, as one page.",
            ),
        ),
        make=BurstOptions,
        drawings={"html": write_page},
    ),
    "sessions": Benchmark(
        "scripts.benchmarks.sessions",
        "What an event costs a worker while 100 to 100,000 requests are queued.",
        "scripts/bench sessions --model llama-3.1-8b",
        ("model", "iterations"),
        {"iterations": 200},
    ),
}


@click.group(
    commands={**bench.commands, **commands_of(BENCHMARKS)},
    epilog=STATUSES,
    context_settings=CONTEXT,
)
def app() -> None:
    """Measure kvconnector in a checkout: the benchmarks of `kvconnector bench`, and developers' own."""


@app.command(
    context_settings={"ignore_unknown_options": True}, short_help="Two checkouts in turns."
)
@click.argument("trees", nargs=2, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("benchmark", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Runs of each checkout.")
def turns(trees: tuple[Path, Path], benchmark: tuple[str, ...], rounds: int) -> None:
    """Run a benchmark of two checkouts in turns, as it is and with packed reads only.

    Example: scripts/bench turns --rounds 3 ../before . request --device cuda:0:1 --tokens 16,128 --iterations 60
    """
    ways = {"any way": {}, "packed": {"KVCONNECTOR_PATHS_DIRECT": "never"}}
    found: dict[two_trees.Key, tuple[list[float], list[float]]] = {}
    with progress_bar("turns") as progress:
        for number, way in product(range(rounds), ways):
            for index in two_trees.order(number):
                progress(f"round {number + 1} of {rounds}, {way}, {trees[index]}")
                report = two_trees.run(trees[index], benchmark, ways[way])
                for case, contender, median_s in two_trees.medians_of(report):
                    rows = found.setdefault((way, case, contender.partition(" (")[0]), ([], []))
                    rows[index].append(median_s)
    table = Table("way", "case", "contender", *map(str, trees), "ratio")
    for each in two_trees.compare(found):
        medians = [format_seconds(seconds) for seconds in each.medians_s]
        table.add_row(*each.key, *medians, f"{each.ratio:.3f}")
    terminal().print(Fitted(table))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark. Returns the exit status, as the command line of kvconnector does."""
    if arguments is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # which keeps the report
    return run(arguments, app, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
