"""`kvconnector simulate`: the messages of clusters of many engines, and the times of requests, in virtual time."""

from __future__ import annotations

import random
from math import inf, nan
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.table import Table

from kvconnector.bench import file_errors, read_file
from kvconnector.bench.results import fewest_samples
from kvconnector.bench.shapes import MODELS, EngineShape, ModelShape, check_exchange, with_types
from kvconnector.bench.simulated_ranks import Costs
from kvconnector.bench.simulation import Cluster, Outcome, Request, Simulation
from kvconnector.bench.sizes import MAX_TOKENS, parse_numbers
from kvconnector.bench.tables import Fitted, right_aligned
from kvconnector.cli.console import (
    PATH,
    FiniteRange,
    draw_loglog,
    json_flag,
    picture,
    picture_option,
    print_json,
    progress_bar,
    terminal,
)
from kvconnector.cli.model_config import named_model
from kvconnector.config import PeerConfig
from kvconnector.errors import ConfigError

PEER = PeerConfig()
MAX_ENGINES = 100_000
MAX_REQUESTS = 10_000_000


class Report(Cluster, frozen=True, kw_only=True):
    """The simulated clusters, one a row, and the seed of their requests."""

    seed: int
    rows: list[Outcome]


SHAPE: dict[str, Any] = {"type": EngineShape.parse, "metavar": "SHAPE"}


@click.command(
    epilog="Example: kvconnector simulate --engines 2,10,100 --rate 2 --svg simulate.svg"
)
@click.option(
    "--engines",
    type=parse_numbers,
    metavar="N,N,...",
    default="2,10,100",
    help="Numbers of engines, half prefill and half decode.",
)
@click.option("--prefill", **SHAPE, default="tp=2", help="Producers' shape, as for `plan`.")
@click.option("--decode", **SHAPE, default="tp=2", help="Consumers' shape.")
@click.option(
    "--model",
    type=named_model,
    metavar="MODEL",
    default="llama-3.1-70b",
    help=f"{', '.join(MODELS)}, or the path of a Hugging Face config.json.",
)
@click.option("--rate", type=FiniteRange(1e-6), default=1.0, help="Requests/s per decode engine.")
@click.option("--seconds", type=FiniteRange(1e-6), default=20.0, help="How long requests arrive.")
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=4096,
    help="Median prompt length; lengths are lognormal.",
)
@click.option("--spread", type=FiniteRange(0, 10), default=0.8, help="Sigma of that distribution.")
@click.option(
    "--trace", type=PATH, help='Take requests from a file, with a line "seconds tokens" each.'
)
@click.option("--link", type=FiniteRange(1e-3), default=400.0, help="Gbit/s of a rank's link.")
@click.option("--latency-us", type=FiniteRange(0), default=20.0, help="Latency of a link.")
@click.option(
    "--idle-timeout",
    type=FiniteRange(PEER.timeout_s),
    default=PEER.idle_timeout_s,
    help="Seconds until idle engines disconnect.",
)
@click.option(
    "--seed", type=int, default=0, help="Seed of arrivals, lengths and the router's choices."
)
@picture_option
@json_flag
def simulate(
    *,
    engines: tuple[int, ...],
    prefill: EngineShape,
    decode: EngineShape,
    model: ModelShape,
    rate: float,
    seconds: float,
    tokens: int,
    spread: float,
    trace: Path | None,
    link: float,
    latency_us: float,
    idle_timeout: float,
    seed: int,
    svg: Path | None,
    json: bool,
) -> None:
    """Simulate growing clusters: greetings, control messages, staging slots, times to completion. Nothing is sent."""
    if not engines or min(engines) < 2 or max(engines) > MAX_ENGINES:
        raise ConfigError(f"a cluster has two engines to {MAX_ENGINES}", engines=engines)
    prefill, decode = with_types(model, prefill, decode)
    check_exchange(model, prefill, decode)
    report = Report(
        model=model,
        prefill=prefill,
        decode=decode,
        costs=Costs(latency_s=latency_us / 1e6, bytes_per_s=link * 1e9 / 8),
        idle_timeout_s=idle_timeout,
        seed=seed,
        rows=[],
    )
    traced = _read_trace(trace) if trace is not None else None
    if traced is None and (expected := rate * seconds * max(engines) / 2) > MAX_REQUESTS:
        raise ConfigError(
            f"a simulation has at most {MAX_REQUESTS} requests: give fewer --seconds, a lower --rate or fewer"
            f" engines",
            requests=f"{expected:.3g}",
        )
    rngs = [random.Random(seed) for _ in engines]
    runs = [
        traced or _poisson(rng, rate * (size - size // 2), seconds, tokens, spread)
        for rng, size in zip(rngs, engines, strict=True)
    ]
    if not all(runs):
        text = "no request arrives in this time: give more --seconds, a higher --rate or another --seed"
        raise ConfigError(text, engines=engines, seconds=seconds, rate=rate, seed=seed)
    with progress_bar("simulate") as show:
        for size, rng, arrivals in zip(engines, rngs, runs, strict=True):
            show(f"{size} engines, {len(arrivals)} requests", len(report.rows) / len(engines))
            report.rows.append(_run(report, size, rng, arrivals))
    if svg is not None:
        _draw(report, svg)
    if json:
        print_json(report)
    else:
        _print(report)


def _poisson(
    rng: random.Random, rate: float, seconds: float, tokens: int, spread: float
) -> list[tuple[float, int]]:
    arrivals = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        drawn = round(tokens * rng.lognormvariate(0, spread))
        arrivals.append((at_s, min(max(1, drawn), MAX_TOKENS)))
        at_s += rng.expovariate(rate)
    return arrivals


def _read_trace(path: Path) -> list[tuple[float, int]]:
    with file_errors("cannot read the trace", path):
        lines = read_file(path).decode().splitlines()
    arrivals = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at_s, tokens = line.split()
            arrival = float(at_s), int(tokens)
        except ValueError:
            arrival = nan, 0
        if not (0 <= arrival[0] < inf and 0 < arrival[1] <= MAX_TOKENS):
            raise ConfigError(
                f'a line of a trace is "seconds tokens", with 1 to {MAX_TOKENS} tokens',
                path=str(path),
                line=number,
                given=line[:100],
            )
        arrivals.append(arrival)
    if not arrivals:
        raise ConfigError("the trace names no request", path=str(path))
    return arrivals


def _run(
    cluster: Cluster, size: int, rng: random.Random, arrivals: list[tuple[float, int]]
) -> Outcome:
    """Simulate `size` engines, with a router that takes any two of them."""
    num_producers, num_consumers = size // 2, size - size // 2
    requests = [
        Request(
            at_s=at_s,
            num_tokens=tokens,
            producer=rng.randrange(num_producers),
            consumer=rng.randrange(num_consumers),
        )
        for at_s, tokens in arrivals
    ]
    return Simulation(
        cluster, requests, num_producers=num_producers, num_consumers=num_consumers
    ).run()


def _print(report: Report) -> None:
    title = f"{report.model.name}: prefill {report.prefill}, decode {report.decode}"
    names = "engines requests failed greetings messages/request messages/s kB/request links slots"
    columns = [*names.replace("/", "/\n").split(" "), "busiest\nthread", "p50 ms", "p99 ms"]
    table = Table(*right_aligned(*columns), title=title, box=SIMPLE, padding=0)
    for row in report.rows:
        table.add_row(
            str(row.engines),
            str(row.requests),
            str(sum(row.failures.values())),
            str(row.messages.get("Hello", 0)),
            f"{row.messages_per_request:.1f}",
            f"{row.messages_per_s:.0f}",
            f"{row.message_bytes / row.requests / 1e3:.1f}",
            str(row.peak_links),
            str(row.peak_slots),
            f"{row.busiest_s / row.elapsed_s:.1%}",
            *("" if time is None else f"{time:.1f}" for time in (row.p50_ms, row.p99_ms)),
        )
    terminal().print(Fitted(table))
    if any(row.p99_ms is None for row in report.rows):
        terminal().print(f"p99 takes {fewest_samples(99)} requests", soft_wrap=True)


def _draw(report: Report, path: Path) -> None:
    panels = (
        ("control messages", {"a request": "messages_per_request", "a second": "messages_per_s"}),
        ("completion, ms", {"p50": "p50_ms", "p99": "p99_ms"}),
    )
    with picture(path, 9, 3.5) as figure:
        for axes, (title, lines) in zip(figure.subplots(1, 2), panels, strict=True):
            figures = {
                label: {row.engines: getattr(row, name) or nan for row in report.rows}
                for label, name in lines.items()
            }
            draw_loglog(axes, figures, xlabel="engines", title=title)
            axes.yaxis.set_minor_formatter("{x:g}" if "ms" in title else "")
        figure.tight_layout()
