"""Draws docs/vllm-bench.svg from the table that it illustrates, so that both always say the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "docs" / "benchmarks" / "engines.md"
PICTURE = ROOT / "docs" / "vllm-bench.svg"
HEADING = "## Two vLLM 0.33 engines, two H100s"
LINES = {  # the column of each line, its colour, and how far its numbers are above it in points
    "NixlConnector": (6, "tab:red", -12),
    "best possible: from the decode engine's prefix cache": (4, "tab:gray", 5),
    "kvconnector": (2, "tab:blue", -12),
}


def first_tokens(text: str) -> dict[str, dict[int, float]]:
    """Read the first table below the heading: the decode engine's first token in ms, by line and prompt's tokens."""
    section = text.partition(f"{HEADING}\n")[2]
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in re.findall(r"^\| (?=\d+ \().*$", section.partition("\n![")[0], re.MULTILINE)
    ]
    return {
        name: {int(row[1].split()[0]): float(row[column + 1]) for row in rows}
        for name, (column, *_) in LINES.items()
    }


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    """Draw each line with its numbers."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    settings = {"svg.fonttype": "none", "svg.hashsalt": "kvconnector", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, points in found.items():
            _, color, above = LINES[name]
            axes.plot(list(points), list(points.values()), "o-", color=color, label=name)
            for tokens, ms in points.items():
                place = {"xytext": (5, above), "textcoords": "offset points"}
                axes.annotate(f"{ms:.1f}", (tokens, ms), size=8, **place)
        axes.set_xscale("log", base=2)
        ticks = sorted({tokens for points in found.values() for tokens in points})
        axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
        axes.set_xlabel("prompt, tokens")
        axes.set_ylabel("decode engine's first token, ms")
        axes.set_ylim(0, 85)
        axes.margins(x=0.1)
        axes.legend(loc="upper left")  # "best" takes seconds on a busy machine, and then warns
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main(path: Path = PICTURE) -> None:
    """Draw the picture of the table as it is."""
    draw(first_tokens(TABLES.read_text(encoding="utf-8")), path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
