"""Tables that are shown whole at any width."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement, measure_renderables
from rich.table import Column, Table
from rich.text import Text

UNCUT_WIDTH = 10_000
"""Columns where no terminal has an edge: wider than any line."""


class Fitted:
    """A table that is shown whole at any width.

    Columns are as wide as their words at least, and figures are never wrapped. If that is too wide, each row becomes a
    block with a line for each cell that has text, where long words are folded. Nothing is cut.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        for column in table.columns:
            column.no_wrap = column.justify == "right"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        for column in columns:
            column.width = None
        wide = options.update_width(UNCUT_WIDTH)
        sizes = [
            measure_renderables(console, wide, [column.header, *column.cells]) for column in columns
        ]
        widths = [
            size.maximum if column.no_wrap else size.minimum
            for column, size in zip(columns, sizes, strict=True)
        ]
        whole = Measurement.get(console, wide, self.table).maximum
        borders = whole - sum(size.maximum for size in sizes)
        spare = options.max_width - borders - sum(widths)
        if spare < 0:
            yield from self._rows()
            return
        # rich would take from the widest column, whatever it holds: here the narrow ones get their wish first
        for index in sorted(range(len(sizes)), key=lambda each: sizes[each].maximum):
            more = min(spare, sizes[index].maximum - widths[index])
            columns[index].width = widths[index] + more
            spare -= more
        yield self.table

    def _rows(self) -> Iterator[RenderableType]:
        table = self.table
        if table.title:
            yield Text(str(table.title), style="bold")
        for row in zip(*(column.cells for column in table.columns), strict=True):
            block = Table.grid(padding=(0, 1, 0, 0))
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            for column, cell in zip(table.columns, row, strict=True):
                if cell != "":
                    block.add_row(" ".join(str(column.header).split()), cell)
            yield block
            yield ""


def right_aligned(*names: str) -> list[Column]:
    """Return right-aligned columns for figures."""
    return [Column(name, justify="right") for name in names]
