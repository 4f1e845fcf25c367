"""Draws a plan: prefill ranks on the left, decode ranks on the right, and between them a ribbon for each read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvconnector.bench.sizes import format_bytes
from kvconnector.cli.console import picture
from kvconnector.cli.plan_report import PlanReport, RankRow, ReadRow

WIDTH_INCHES = 12.0
ROW_INCHES = 0.27
"""The least height of a rank, so that its label can be read at 64 ranks a side."""
MAX_RANKS_INCHES = 64 * ROW_INCHES
"""Most height for all bytes, so that a small read beside large ones does not make the picture endless."""
GAP_INCHES = 0.06
STAGE_GAP_INCHES = 0.3
LEFT, RIGHT, BAR_WIDTH = 3.5, 8.3, 0.2
RIBBON_ALPHA = 0.4


class Box(NamedTuple):
    """A rank's place in the picture, in inches from the top. Its bytes take `ribbons`, in the middle of `height`."""

    rank: RankRow
    top: float
    height: float
    ribbons: float

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def draw_plan(report: PlanReport, path: Path) -> None:
    """Write the picture of a plan to `path`, in the format of its ending (.svg, .png, .pdf).

    A rank's height is the larger of a line and its bytes; a ribbon is as thick as the bytes of its read and has the
    colour of the prefill rank's pipeline stage, or of its layers' kind where a model has several. A hatched rank holds
    what another rank holds too, and is not read.
    Raises ConfigError: matplotlib is missing, or the file cannot be written.
    """
    from matplotlib import colormaps

    least = min(row.bytes for row in (*report.producers, *report.consumers) if row.bytes)
    scale = min(ROW_INCHES / least, MAX_RANKS_INCHES / report.total_bytes)
    producers, consumers = _stack(report.producers, scale), _stack(report.consumers, scale)
    bottoms = [boxes[-1].top + boxes[-1].height for boxes in (producers, consumers)]
    bottom = max(bottoms)
    producers, consumers = (
        [box._replace(top=box.top + (bottom - own) / 2) for box in boxes]
        for boxes, own in zip((producers, consumers), bottoms, strict=True)
    )
    if (num_stages := report.prefill.pp) <= 10:
        stages = [colormaps["tab10"](stage) for stage in range(num_stages)]
    else:
        stages = [colormaps["turbo"](share) for share in np.linspace(0.05, 0.95, num_stages)]
    kinds = {group.kind: colormaps["Dark2"](at) for at, group in enumerate(report.model.groups)}
    with picture(path, WIDTH_INCHES, bottom + 1.2) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, WIDTH_INCHES)
        axes.set_ylim(bottom + 0.2, -1.0)
        axes.axis("off")
        _draw_ribbons(axes, report.reads, producers, consumers, kinds or stages)
        for box in producers:
            _draw_rank(axes, box, LEFT, stages[box.rank.stage])
        for box in consumers:
            _draw_rank(axes, box, RIGHT, "0.35")
        _draw_titles(axes, report, kinds)


def _stack(ranks: Sequence[RankRow], scale: float) -> list[Box]:
    """Place the ranks below each other; `scale` is in inches per byte."""
    boxes: list[Box] = []
    top = 0.0
    for rank in ranks:
        if boxes:
            is_new_stage = boxes[-1].rank.stage != rank.stage
            top += STAGE_GAP_INCHES if is_new_stage else GAP_INCHES
        ribbons = rank.bytes * scale
        boxes.append(Box(rank, top, max(ROW_INCHES, ribbons), ribbons))
        top += boxes[-1].height
    return boxes


def _draw_ribbons(
    axes: Any, reads: Sequence[ReadRow], producers: list[Box], consumers: list[Box], colors: Any
) -> None:
    """Draw a ribbon for each read. `colors` are by the name of a kind, or by stage."""
    begin, end = (
        {box.rank.rank: box.middle - box.ribbons / 2 for box in boxes}
        for boxes in (producers, consumers)
    )
    # each rank's ribbons from top to bottom in the order of the ranks on the other side, so that few of them cross
    first, second = [*begin], [*end]
    share = np.linspace(0.0, 1.0, 50)
    bend = share * share * (3 - 2 * share)
    for read in sorted(
        reads, key=lambda read: (first.index(read.producer), second.index(read.consumer))
    ):
        source = producers[first.index(read.producer)]
        thickness = source.ribbons * read.bytes / source.rank.bytes
        edge = begin[read.producer] + (end[read.consumer] - begin[read.producer]) * bend
        begin[read.producer] += thickness
        end[read.consumer] += thickness
        axes.fill_between(
            LEFT + BAR_WIDTH + (RIGHT - LEFT - BAR_WIDTH) * share,
            edge,
            edge + thickness,
            color=colors[read.kind or source.rank.stage],
            alpha=RIBBON_ALPHA,
            linewidth=0.3,
            gid="_".join(("read", read.producer, read.consumer, *read.kind.split())),
        )


def _draw_rank(axes: Any, box: Box, x: float, color: Any) -> None:
    is_read, on_left = box.rank.bytes > 0, x == LEFT
    look = {"facecolor": color} if is_read else {"facecolor": "white", "hatch": "////"}
    axes.bar(
        x, box.height, BAR_WIDTH, box.top, align="edge", edgecolor=color, linewidth=0.8, **look
    )
    moved = format_bytes(box.rank.bytes) if is_read else "not read"
    axes.text(
        x - 0.1 if on_left else x + BAR_WIDTH + 0.1,
        box.middle,
        f"{box.rank.rank}   {box.rank.holds}   {moved}",
        ha="right" if on_left else "left",
        va="center",
        fontsize=8,
    )


def _draw_titles(axes: Any, report: PlanReport, kinds: Mapping[str, Any]) -> None:
    """Name the plan and its engines above the picture, and the kinds of a model's layers, if it has several, below."""
    from matplotlib.patches import Patch

    tokens = report.tokens[1] - report.tokens[0]
    title = f"{report.model.name}, {tokens} tokens: {format_bytes(report.total_bytes)}"
    if report.prediction:
        title += f", {report.prediction}"
    axes.text(WIDTH_INCHES / 2, -0.75, title, ha="center", fontsize=11, fontweight="bold")
    axes.text(LEFT + BAR_WIDTH, -0.35, f"prefill: {report.prefill}", ha="right", fontsize=9)
    axes.text(RIGHT, -0.35, f"decode: {report.decode}", ha="left", fontsize=9)
    nbytes = report.bytes_by_kind()
    patches = [
        Patch(color=color, alpha=RIBBON_ALPHA, label=f"{kind}, {format_bytes(nbytes[kind])}")
        for kind, color in kinds.items()
    ]
    if patches:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": len(patches)}
        axes.legend(handles=patches, frameon=False, fontsize=9, **place)
