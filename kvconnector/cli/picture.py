"""Pictures with matplotlib, which is imported only where one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvconnector.errors import ConfigError


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty figure.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: install kvconnector[bench]") from error
    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure; the path's ending (.svg, .png, .pdf) says the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture: {error}", path=str(path)) from error
