"""A plan drawn: prefill ranks on the left, decode ranks on the right, and between them a ribbon for each read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvconnector.bench.shapes import format_bytes
from kvconnector.cli.console import new_figure, save_figure

if TYPE_CHECKING:
    from kvconnector.cli.plan import PlanReport, RankRow, ReadRow

WIDTH_INCHES = 12.0
ROW_INCHES = 0.27
"""The least height of a rank, so that its label can be read at 64 ranks a side."""
MAX_RANKS_INCHES = 64 * ROW_INCHES
"""What all bytes are drawn in at most, so that a small read beside large ones makes no endless picture."""
GAP_INCHES = 0.06
STAGE_GAP_INCHES = 0.3
LEFT, RIGHT, BAR_WIDTH = 3.5, 8.3, 0.2


class Box(NamedTuple):
    """A rank's place in the picture, in inches from the top left; `scale` is inches a byte."""

    rank: RankRow
    x: float
    top: float
    height: float
    scale: float


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write the picture of a plan to `path`; its ending (.svg, .png, .pdf) says the format.

    A rank's height is the larger of a line and its bytes; a ribbon is as thick as the bytes of its read and has the
    colour of the prefill rank's pipeline stage. A hatched rank holds what another rank holds too, and is not read.
    Raises ConfigError: matplotlib is missing, or the file cannot be written.
    """
    scale = ROW_INCHES / min(
        row.bytes for row in (*report.producers, *report.consumers) if row.bytes
    )
    scale = min(scale, MAX_RANKS_INCHES / report.total_bytes)
    producers = _stack(report.producers, LEFT, scale)
    consumers = _stack(report.consumers, RIGHT, scale)
    bottom = max(_bottom(producers), _bottom(consumers))
    producers, consumers = _centred(producers, bottom), _centred(consumers, bottom)
    figure = new_figure(WIDTH_INCHES, bottom + 1.2)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH_INCHES)
    axes.set_ylim(bottom + 0.2, -1.0)
    axes.axis("off")
    colors = _stage_colors(report.prefill.pp)
    _draw_ribbons(axes, report.reads, producers, consumers, colors)
    _draw_ranks(axes, producers, colors)
    _draw_ranks(axes, consumers, None)
    _draw_titles(axes, report)
    save_figure(figure, path)


def _stack(ranks: Sequence[RankRow], x: float, scale: float) -> list[Box]:
    boxes: list[Box] = []
    top = 0.0
    for rank in ranks:
        if boxes:
            is_new_stage = boxes[-1].rank.stage != rank.stage
            top += STAGE_GAP_INCHES if is_new_stage else GAP_INCHES
        height = max(ROW_INCHES, rank.bytes * scale)
        boxes.append(Box(rank, x, top, height, scale))
        top += height
    return boxes


def _bottom(boxes: Sequence[Box]) -> float:
    return boxes[-1].top + boxes[-1].height


def _centred(boxes: Sequence[Box], bottom: float) -> list[Box]:
    shift = (bottom - _bottom(boxes)) / 2
    return [box._replace(top=box.top + shift) for box in boxes]


def _stage_colors(num_stages: int) -> list[Any]:
    from matplotlib import colormaps

    if num_stages <= 10:
        return [colormaps["tab10"](stage) for stage in range(num_stages)]
    return [
        colormaps["turbo"](0.05 + 0.9 * stage / (num_stages - 1)) for stage in range(num_stages)
    ]


def _draw_ribbons(
    axes: Any,
    reads: Sequence[ReadRow],
    producers: Sequence[Box],
    consumers: Sequence[Box],
    colors: Sequence[Any],
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    left = {box.rank.rank: box for box in producers}
    right = {box.rank.rank: box for box in consumers}
    # each rank's ribbons from top to bottom in the order of the ranks on the other side, so that few of them cross
    order_left = {name: index for index, name in enumerate(left)}
    order_right = {name: index for index, name in enumerate(right)}
    begin, end = _tops(producers), _tops(consumers)
    for read in sorted(
        reads, key=lambda read: (order_left[read.producer], order_right[read.consumer])
    ):
        producer = left[read.producer]
        thickness = read.bytes * producer.scale
        start, stop = begin[read.producer], end[read.consumer]
        begin[read.producer] += thickness
        end[read.consumer] += thickness
        x0, x1 = LEFT + BAR_WIDTH, RIGHT
        middle = (x0 + x1) / 2
        points = [
            (x0, start),
            (middle, start),
            (middle, stop),
            (x1, stop),
            (x1, stop + thickness),
            (middle, stop + thickness),
            (middle, start + thickness),
            (x0, start + thickness),
            (x0, start),
        ]
        curve = [Outline.CURVE4] * 3
        codes = [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY]
        color = colors[producer.rank.stage]
        axes.add_patch(
            PathPatch(
                Outline(points, codes), facecolor=color, alpha=0.4, edgecolor=color, linewidth=0.3
            )
        )


def _tops(boxes: Sequence[Box]) -> dict[str, float]:
    """Where the first ribbon of each rank begins: ribbons are centred in a bar that is higher than they are."""
    return {box.rank.rank: box.top + (box.height - box.rank.bytes * box.scale) / 2 for box in boxes}


def _draw_ranks(axes: Any, boxes: Sequence[Box], colors: Sequence[Any] | None) -> None:
    from matplotlib.patches import Rectangle

    for box in boxes:
        color = "0.35" if colors is None else colors[box.rank.stage]
        is_read = box.rank.bytes > 0
        axes.add_patch(
            Rectangle(
                (box.x, box.top),
                BAR_WIDTH,
                box.height,
                facecolor=color if is_read else "white",
                edgecolor=color,
                hatch=None if is_read else "////",
                linewidth=0.8,
            )
        )
        on_left = colors is not None
        axes.text(
            box.x - 0.1 if on_left else box.x + BAR_WIDTH + 0.1,
            box.top + box.height / 2,
            f"{box.rank.rank}   {box.rank.holds}   {format_bytes(box.rank.bytes) if is_read else 'not read'}",
            ha="right" if on_left else "left",
            va="center",
            fontsize=8,
        )


def _draw_titles(axes: Any, report: PlanReport) -> None:
    axes.text(
        WIDTH_INCHES / 2,
        -0.75,
        f"{report.model.name}, {report.tokens[1] - report.tokens[0]} tokens: {format_bytes(report.total_bytes)}"
        + (f", {report.prediction}" if report.prediction else ""),
        ha="center",
        fontsize=11,
        fontweight="bold",
    )
    for x, ha, text in (
        (LEFT + BAR_WIDTH, "right", f"prefill: {report.prefill}"),
        (RIGHT, "left", f"decode: {report.decode}"),
    ):
        axes.text(x, -0.35, text, ha=ha, fontsize=9)
