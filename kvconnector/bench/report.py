"""A run's results as a table, as JSON, and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvconnector.bench.contract import BenchOptions, CaseResult, Measurement, Part
from kvconnector.bench.environment import Environment

NAMES: dict[Part, str] = {"peer": "peer", "naive": "naive", "limit": "limit"}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's run."""

    benchmark: str
    command: str
    options: BenchOptions
    environment: Environment
    cases: tuple[CaseResult, ...]

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
                    "ratios": {part: case.ratio_to(part) for part in NAMES},
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


def print_report(report: Report, console: Console) -> None:
    """Tables, where they were measured, and last the line of ratios."""
    for case in report.cases:
        console.print(f"{report.benchmark}: {case.case}", style="bold", soft_wrap=True)
        console.print(_table(case))
        for note in case.notes:
            console.print(f"  {note}")
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
            style="bold" if each.part == "ours" else None,
        )
    return table


def summary(report: Report) -> str:
    """The medians' ratios to each kind of contender over all cases, in one line."""
    parts = []
    for part, name in NAMES.items():
        ratios = [ratio for case in report.cases if (ratio := case.ratio_to(part)) is not None]
        if not ratios:
            continue
        span = " to ".join(f"{ratio:.2f}" for ratio in sorted({min(ratios), max(ratios)}))
        parts.append(
            f"{span} of the limit's speed" if part == "limit" else f"{span} x the {name}'s speed"
        )
    return f"{report.benchmark}: {'; '.join(parts) or 'nothing to compare with'}"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def throughput_points(cases: Sequence[CaseResult], part: Part) -> tuple[list[int], list[float]]:
    """Request bytes and GB/s of a part's fastest contender, by rising size."""
    points = sorted(
        (found.nbytes, throughput)
        for case in cases
        if (found := case.fastest(part)) is not None
        and (throughput := found.gigabytes_per_s) is not None
    )
    return [nbytes for nbytes, _ in points], [throughput for _, throughput in points]
