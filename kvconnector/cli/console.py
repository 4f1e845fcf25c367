"""What the commands print with: tables on the terminal's width, JSON untouched by it."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import msgspec
import typer
from rich.console import Console

MIN_WIDTH = 100


def terminal() -> Console:
    """A console for tables; wide enough for them where the output is no terminal."""
    width = None if sys.stdout.isatty() else max(MIN_WIDTH, shutil.get_terminal_size().columns)
    return Console(width=width, soft_wrap=False, highlight=False)


def print_json(value: Any) -> None:
    """A value of builtins and structs as indented JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
