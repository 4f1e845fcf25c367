"""A benchmark's report as a picture, or as one page that needs nothing from elsewhere."""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console

from kvconnector.bench.results import BenchReport, Measurement
from kvconnector.cli.console import MIN_WIDTH, draw_loglog, picture
from kvconnector.errors import ConfigError


def draw(report: BenchReport, path: Path) -> None:
    """Draw a handover's times by the prompt's length: each a dot, and their medians a line. Raises as `picture`."""
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
        draw_loglog(axes, medians_ms, xlabel="prompt, tokens", ylabel="last step to loaded, ms")
        for number, line in enumerate(lines.values()):
            for tokens, each in line.items():
                times_ms = [seconds * 1e3 for seconds in each.samples_s]
                axes.plot([tokens] * len(times_ms), times_ms, ".", color=f"C{number}", alpha=0.3)
        figure.tight_layout()


def write_page(report: BenchReport, path: Path) -> None:
    """Write the throughput of bursts as pictures, all tables, and where it was measured. Raises as `picture`."""
    console = Console(record=True, width=MIN_WIDTH, file=StringIO(), highlight=False)
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
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the page: {error}", path=str(path)) from error


def _draw_bursts(report: BenchReport, target: StringIO) -> None:
    """A panel for each prompt's length and page size: each contender's GB/s by requests at once."""
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
