"""Bandwidth over request size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvconnector.bench.contract import CaseResult, Measurement
from kvconnector.bench.report import BenchReport
from kvconnector.errors import ConfigError

_LINES: tuple[tuple[str, str, Callable[[CaseResult], Measurement | None]], ...] = (
    ("kvconnector", "o-", lambda case: case.ours),
    ("peer, best", "s-", lambda case: case.fastest("peer")),
    ("peer, default", "s:", lambda case: case.first("peer")),
    ("naive", "^-", lambda case: case.fastest("naive")),
    ("limit", "k--", lambda case: case.fastest("limit")),
)


def plot_bandwidth(report: BenchReport, path: Path) -> None:
    """Write the picture to `path`, whose ending says the format.

    Raises:
        ConfigError: matplotlib is missing, nothing in the report has a bandwidth, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install kvconnector[bench]") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Long requests are measured in two ways; the first of them is drawn.
    cases = [case for case in report.cases if not case.case.endswith("back to back")]
    for label, style, chosen in _LINES:
        points = sorted(
            (each.nbytes / 2**20, throughput)
            for each in map(chosen, cases)
            if each is not None and (throughput := each.gigabytes_per_s) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if not axes.lines:
        raise ConfigError("this benchmark has no bandwidth to plot", benchmark=report.benchmark)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("request, MiB")
    axes.set_ylabel("GB/s (median)")
    axes.set_title(f"{report.benchmark}: {report.options.model.name} on {report.options.device}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}", path=str(path)) from error
