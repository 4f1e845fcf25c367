"""Tables, JSON, `doctor`'s findings and pictures; matplotlib is imported only where one is drawn."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Column

from kvconnector.errors import ConfigError, KVConnectorError

MIN_WIDTH = 100


def terminal() -> Console:
    """A console for tables; wide enough for them where the output is no terminal."""
    width = None if sys.stdout.isatty() else max(MIN_WIDTH, shutil.get_terminal_size().columns)
    return Console(width=width, soft_wrap=False, highlight=False)


def right_aligned(*names: str) -> list[Column]:
    """Columns of figures."""
    return [Column(name, justify="right") for name in names]


def print_json(value: Any) -> None:
    """A value of builtins and structs as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


Verdict = Literal["ok", "note", "warn", "FAIL"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report. `figures` are its numbers, for programs."""

    subject: str
    verdict: Verdict
    text: str
    figures: dict[str, float] = {}


def attempt(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check whose failure is a finding."""
    try:
        yield from check()
    except KVConnectorError as error:
        yield Finding(subject, "FAIL", f"{type(error).__name__}: {error}")
    except ImportError as error:
        yield Finding(subject, "FAIL", f"a module is missing: {error}")


@contextmanager
def picture(path: Path, width_inches: float, height_inches: float) -> Iterator[Any]:
    """An empty figure that is written to `path`. Raises ConfigError: no matplotlib, or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: install kvconnector[bench]") from error
    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    yield figure
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture: {error}", path=str(path)) from error


def finish_loglog(axes: Any, ticks: Sequence[int], **labels: str) -> None:
    """Label double logarithmic axes, with a tick at each measured place."""
    axes.set(**labels)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
