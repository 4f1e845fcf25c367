"""Bandwidth over request size."""

from __future__ import annotations

from pathlib import Path

from kvconnector.bench.contract import Part
from kvconnector.bench.report import Report, throughput_points
from kvconnector.errors import ConfigError

_LINES: tuple[tuple[Part, str, str], ...] = (
    ("ours", "kvconnector", "o-"),
    ("peer", "peer", "s-"),
    ("naive", "naive", "^-"),
    ("limit", "limit", "k--"),
)


def plot_bandwidth(report: Report, path: Path) -> None:
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
    for part, label, style in _LINES:
        sizes, throughputs = throughput_points(report.cases, part)
        if sizes:
            axes.plot([size / 2**20 for size in sizes], throughputs, style, label=label)
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
