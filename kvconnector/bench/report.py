"""A run's results as a table, as JSON, and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvconnector.bench.contract import BenchOptions, CaseResult, Measurement
from kvconnector.bench.environment import Environment

_RATIOS = {
    "peer_default": "{} x the peer's default speed",
    "peer": "{} x the peer's best speed",
    "naive": "{} x the naive speed",
    "limit": "{} of the limit's speed",
}
"""Names of `CaseResult.ratios`, and how a line tells them."""


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's run."""

    benchmark: str
    command: str
    options: BenchOptions
    environment: Environment
    cases: tuple[CaseResult, ...]
    headline: str = ""

    def to_json(self) -> dict[str, Any]:
        """With medians, tails, throughputs and ratios beside the samples they come from."""
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "summary": summary(self),
            "options": msgspec.to_builtins(self.options),
            "environment": msgspec.to_builtins(self.environment),
            "cases": [
                {
                    "case": case.case,
                    "notes": list(case.notes),
                    "ratios": case.ratios(),
                    "measurements": [_measurement_json(each) for each in case.measurements],
                }
                for case in self.cases
            ],
        }


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(measurement),
        "p50_s": measurement.p50_s,
        "p99_s": measurement.p99_s,
        "gigabytes_per_s": measurement.gigabytes_per_s,
    }


def print_report(report: BenchReport, console: Console) -> None:
    """Tables, where they were measured, and last the line of ratios."""
    for case in report.cases:
        console.print(f"{report.benchmark}: {case.case}", style="bold", soft_wrap=True)
        console.print(_table(case))
        if any(each.figures for each in case.measurements):
            console.print(_figures(case))
        for note in filter(None, (*case.notes, _told([case]))):
            console.print(f"  {note}", soft_wrap=True)
    environment = report.environment
    gpus = ", ".join(gpu.name for gpu in environment.gpus) or "no GPU"
    console.print(
        f"{environment.cpu}, {environment.usable_cores} cores, {gpus}; load {environment.load_average};"
        f" commit {_short(environment.commit) or 'unknown'}"
    )
    console.print(summary(report), soft_wrap=True)


def _short(commit: str) -> str:
    """Twelve digits, and the mark of a checkout with changes."""
    return commit[:12] + "+" * commit.endswith("+")


def _table(case: CaseResult) -> Table:
    table = Table()
    table.add_column("contender")
    for column in ("samples", "p50", "p99", "GB/s", "time / ours"):
        table.add_column(column, justify="right")
    for each in case.measurements:
        throughput = each.gigabytes_per_s
        table.add_row(
            each.contender,
            str(len(each.samples_s)),
            format_seconds(each.p50_s),
            format_seconds(each.p99_s),
            "" if throughput is None else f"{throughput:.2f}",
            f"{each.p50_s / case.ours.p50_s:.2f}",
            style="bold" if each.kind == "ours" else None,
        )
    return table


def _figures(case: CaseResult) -> Table:
    """What a contender's figures say, one a row."""
    with_figures = [each for each in case.measurements if each.figures]
    table = Table()
    table.add_column("figure")
    for each in with_figures:
        table.add_column(each.contender, justify="right")
    for name in dict.fromkeys(name for each in with_figures for name in each.figures):
        values = [each.figures.get(name) for each in with_figures]
        table.add_row(name, *("" if value is None else _figure(name, value) for value in values))
    return table


def _figure(name: str, value: float) -> str:
    return format_seconds(value) if name.endswith("_s") else f"{value:.3g}"


def summary(report: BenchReport) -> str:
    """The benchmark's headline, or the medians' ratios to each kind of contender over all cases, in one line."""
    if report.headline:
        return f"{report.benchmark}: {report.headline}"
    return f"{report.benchmark}: {_told(report.cases) or 'nothing to compare with'}"


def _told(cases: Sequence[CaseResult]) -> str:
    """Each kind of ratio, from its least to its greatest over the cases."""
    told = []
    for name, words in _RATIOS.items():
        found = [ratios[name] for case in cases if name in (ratios := case.ratios())]
        if found:
            texts = [f"{ratio:.2f}" for ratio in (min(found), max(found))]
            told.append(words.format(" to ".join(dict.fromkeys(texts))))
    return "; ".join(told)


def format_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
