"""Results of benchmarks: samples and their statistics, as tables and as JSON."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvconnector.bench.environment import Environment
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.tables import Fitted

ContenderKind = Literal["ours", "variant", "peer", "naive", "limit"]
PERCENTILES = (50, 90, 99)


class ShowProgress(Protocol):
    """Shows in a few words a benchmark's next step, and the share of all work that is done, if known."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


class Measurement(msgspec.Struct, frozen=True):
    """Times of one contender for one case, in seconds.

    `nbytes` is the payload that each time is for, the mean if lengths differ, or 0 if bytes do not count. `figures` are
    further results: seconds if a name ends in `_s`, else plain numbers and ratios.
    """

    contender: str
    kind: ContenderKind
    samples_s: tuple[float, ...]
    nbytes: int = 0
    figures: dict[str, float] = {}

    def percentile_s(self, percent: int) -> float:
        """Return a percentile, interpolated between samples; NaN without any."""
        return float(np.percentile(self.samples_s, percent)) if self.samples_s else math.nan

    def stated_s(self, percent: int) -> float:
        """Return a percentile, NaN if it would be the longest sample under another name: see `fewest_samples`."""
        is_known = len(self.samples_s) >= fewest_samples(percent)
        return self.percentile_s(percent) if is_known else math.nan

    @property
    def gigabytes_per_s(self) -> float | None:
        """Payload per median time, in 10^9 bytes per second."""
        return self.nbytes / self.percentile_s(50) / 1e9 if self.nbytes else None


def fewest_samples(percent: int) -> int:
    """Return how many samples a percentile takes: p90 takes 10, p99 takes 100, the median any."""
    return 1 if percent == 50 else -(-100 // (100 - percent))


class CaseResult(msgspec.Struct, frozen=True):
    """All contenders of one case. Exactly one is ours."""

    case: str
    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()

    @property
    def ours(self) -> Measurement:
        return next(each for each in self.measurements if each.kind == "ours")

    def print_to(self, console: Console) -> None:
        """Print tables of the times and of the other figures."""
        console.print(self.case, style="bold", soft_wrap=True)
        console.print(Fitted(_times(self)))
        fewest = min(
            (len(each.samples_s) for each in self.measurements if each.samples_s), default=0
        )
        left_out = [p for p in PERCENTILES if 0 < fewest < fewest_samples(p)]
        if left_out:
            text = ", ".join(f"p{p} takes {fewest_samples(p)} samples" for p in left_out)
            console.print(f"  {text}", soft_wrap=True)
        figures = _figures(self)
        if figures.row_count:
            console.print(Fitted(figures))
        for note in self.notes:
            console.print(f"  {note}", soft_wrap=True)

    def time_over_ours(self, contender: Measurement) -> float:
        """Return its median divided by ours. For a limit, this is the share of its speed that we reach."""
        return contender.percentile_s(50) / self.ours.percentile_s(50)


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's run."""

    benchmark: str
    command: str
    options: BenchOptions
    environment: Environment
    cases: tuple[CaseResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report with percentiles, throughputs and ratios beside their samples."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for case, stated in zip(self.cases, found["cases"], strict=True):
            for each, measured in zip(case.measurements, stated["measurements"], strict=True):
                measured |= {f"p{p}_s": each.stated_s(p) for p in PERCENTILES}
                measured["gigabytes_per_s"] = each.gigabytes_per_s
                measured["time_over_ours"] = case.time_over_ours(each)
        return found


def _times(case: CaseResult) -> Table:
    table = Table("contender")
    for column in ("samples", *(f"p{p}" for p in PERCENTILES), "GB/s", "time / ours"):
        table.add_column(column, justify="right")
    for each in case.measurements:
        throughput, ratio = each.gigabytes_per_s, case.time_over_ours(each)
        table.add_row(
            each.contender,
            str(len(each.samples_s)),
            *(format_seconds(each.stated_s(p)) for p in PERCENTILES),
            "" if throughput is None else f"{throughput:.2f}",
            "" if math.isnan(ratio) else f"{ratio:.2f}",
            style="bold" if each.kind == "ours" else None,
        )
    return table


def _figures(case: CaseResult) -> Table:
    """Return a row for each figure, except for those that are the same for several contenders."""
    with_figures = [each for each in case.measurements if each.figures]
    table = Table("figure")
    for each in with_figures:
        table.add_column(each.contender, justify="right")
    for name in dict.fromkeys(name for each in with_figures for name in each.figures):
        values = [each.figures.get(name) for each in with_figures]
        if len(values) > 1 and len({*values}) == 1:
            continue
        table.add_row(name, *("" if value is None else _figure(name, value) for value in values))
    return table


def _figure(name: str, value: float) -> str:
    if name.endswith("_s"):
        return format_seconds(value)
    return str(int(value)) if value == int(value) else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return three digits and a unit; nothing for NaN."""
    if math.isnan(seconds):
        return ""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
