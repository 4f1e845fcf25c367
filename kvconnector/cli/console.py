"""Tables, JSON, progress and `doctor`'s findings on a terminal; and pictures, whose libraries are imported late."""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from kvconnector.bench import file_errors
from kvconnector.errors import ConfigError, KVConnectorError

if TYPE_CHECKING:
    from rich.console import Console

    from kvconnector.bench.results import ShowProgress

REFRESH_S = 0.25
PATH = click.Path(path_type=Path)
json_flag = click.option("--json", is_flag=True, help="Print JSON.")


PICTURES = (".svg", ".png", ".pdf")
"""Endings of pictures that `picture` can draw."""


class OutputPath(click.Path):
    """A file that is written at the end. A wrong name is refused at the start, not after hours.

    A name without one of `suffixes` is refused: it is mostly another option's value in the wrong place, and would
    become a file. What is there already and is no regular file, such as /dev/stdout, may have any name.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        is_special = path.exists() and not (path.is_file() or path.is_dir())
        if path.suffix.lower() not in self._suffixes and not is_special:
            self.fail(f"{str(value)!r} does not end in {' or '.join(self._suffixes)}.", param, ctx)
        if not (path.exists() or os.access(path.parent, os.W_OK | os.X_OK)):
            self.fail(f"{path.parent} is no folder that can be written to.", param, ctx)
        return path


JSON_FILE = OutputPath(".json")
PICTURE_FILE = OutputPath(*PICTURES)
picture_option = click.option(
    "--svg", type=PICTURE_FILE, help=f"Draw it into this file: {', '.join(PICTURES)}."
)


class FiniteRange(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def host_and_port(text: str) -> str:
    """Return HOST:PORT or HOST:PORT,KEY unchanged. Raises ConfigError: it is something else."""
    host, _, port = text.partition(",")[0].rpartition(":")
    if not host or not port:
        raise ConfigError("give an engine or a server as HOST:PORT or HOST:PORT,KEY", given=text)
    return text


def terminal() -> Console:
    """Return a console for tables. It takes no text as markup, and cuts nothing where there is no terminal.

    Its `print` raises BrokenPipeError if nobody reads any more.
    """
    from rich.console import Console

    from kvconnector.bench.tables import UNCUT_WIDTH

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            # rich would end the process, after it has hidden what happened to standard output
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed by the shell
    width = None if is_terminal else UNCUT_WIDTH
    return Terminal(width=width, soft_wrap=False, highlight=False, markup=False)


@contextmanager
def progress_bar(subject: str = "") -> Iterator[ShowProgress]:
    """Show progress on stderr: on a terminal a bar with the time since its start, elsewhere a line for each text.

    The bar is drawn at most every `REFRESH_S`, within the call, so nothing disturbs measurements between two calls.
    """
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = bars.TimeElapsedColumn(), bars.BarColumn(20), bars.TextColumn("{task.description}")
    how: dict[str, Any] = {
        "auto_refresh": False,
        "transient": True,
        "disable": not console.is_terminal,
    }
    drawn_s, last = 0.0, ""
    with bars.Progress(*columns, console=console, **how) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, share: float | None = None, /) -> None:
            nonlocal drawn_s, last
            if bar.disable and text != last:
                click.echo(f"{subject}: {text}", err=True)
            elif text != last or time.monotonic() > drawn_s + REFRESH_S:
                bar.update(task, description=text, completed=share or 0.0, total=share and 1.0)
                bar.refresh()
                drawn_s = time.monotonic()
            last = text

        yield show


def print_json(value: Any) -> None:
    """Print a value of builtins and structs as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


Verdict = Literal["ok", "note", "warn", "FAIL"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report. `figures` are its numbers, for programs."""

    subject: str
    verdict: Verdict
    text: str
    figures: dict[str, float] = {}


def attempt(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Run a check, and report its failure as a finding."""
    try:
        yield from check()
    except KVConnectorError as error:
        # to run this very command helps nobody
        text = error.statement if "kvconnector doctor`" in error.remedy else str(error)
        yield Finding(subject, "FAIL", f"{type(error).__name__}: {text}")
    except ImportError as error:
        yield Finding(subject, "FAIL", f"a module is missing: {error}")


@contextmanager
def picture(path: Path | StringIO, width_inches: float, height_inches: float) -> Iterator[Any]:
    """Yield an empty figure, and write it to `path` afterwards, in the format of its ending; as SVG if it is no file.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    yield figure
    form = None if isinstance(path, Path) else "svg"
    with file_errors("cannot write the picture", Path(str(path))):
        # for labels of any length
        figure.savefig(path, dpi=110, bbox_inches="tight", format=form)


def draw_loglog(axes: Any, lines: Mapping[str, Mapping[int, float]], **labels: str) -> None:
    """Draw lines on double logarithmic axes, with a tick at each measured place."""
    for label, line in lines.items():
        axes.loglog(list(line), list(line.values()), "o-", label=label)
    ticks = list(dict.fromkeys(place for line in lines.values() for place in line))
    axes.set(**labels)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    # many names would hide the lines
    place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if len(lines) > 4 else {}
    axes.legend(frameon=False, **place)
