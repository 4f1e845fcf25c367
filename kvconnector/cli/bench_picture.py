"""The plot of `kvconnector bench handover`."""

from __future__ import annotations

from pathlib import Path

from kvconnector.bench.results import BenchReport
from kvconnector.cli.console import new_figure, save_figure


def draw(report: BenchReport, path: Path) -> None:
    """Times by the prompt's length, each a dot, and their medians a line. Raises ConfigError: another benchmark's
    report, matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(6.4, 3.6)
    axes = figure.add_subplot()
    tokens = [int(case.ours.figures["prompt_tokens"]) for case in report.cases]
    ways = zip(*(case.measurements for case in report.cases), strict=True)
    for color, found in zip(("C0", "C1"), ways, strict=True):
        for length, each in zip(tokens, found, strict=True):
            times_ms = [seconds * 1e3 for seconds in each.samples_s]
            axes.plot([length] * len(times_ms), times_ms, ".", color=color, alpha=0.3)
        medians_ms = [each.percentile_s(50) * 1e3 for each in found]
        axes.loglog(tokens, medians_ms, "o-", color=color, label=found[0].contender)
    axes.set(xlabel="prompt, tokens", ylabel="last step to loaded cache, ms")
    axes.set_xticks(tokens, map(str, tokens))
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)
