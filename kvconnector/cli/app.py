"""All commands, each in a module that is imported when it is called. What they raise becomes a line and a status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvconnector import __version__
from kvconnector.cli import EXIT_ERROR, EXIT_FAULT, EXIT_INTERRUPTED, PLAIN
from kvconnector.errors import KVConnectorError

COMMANDS = {
    "plan": "Print which rank reads what from which, and draw it.",
    "simulate": "Simulate growing clusters in virtual time.",
    "doctor": "Say what this host, or this host and a running engine, can do.",
    "bench": "Measure transfers, beside the limits of this machine.",
    "top": "Show engines' transfers as they happen.",
    "keygen": "Make a CURVE key pair for the control channel.",
}
"""Each is the function, or the `typer.Typer`, of its name in the module of its name."""
STATUSES = (
    "Exit status: 0 well; 1 a fault was found, or a result was wrong; 2 wrong usage, or an error that the text names;"
    " 130 interrupted."
)


class _Commands(TyperGroup):
    """Knows every command's name, and imports the one that is called: `plan` needs no torch, and help nothing."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in COMMANDS:
            self.commands[name] = _load(name)
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    found = getattr(import_module(f"kvconnector.cli.{name}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, **PLAIN)
    alone.command(name)(found)
    return typer.main.get_command(alone)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"kvconnector {__version__}")
        raise typer.Exit


def _main(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """KV-cache transfer between prefill and decode engines that are cut differently."""


def make_app() -> typer.Typer:
    """The command line, whose commands are not imported yet."""
    app = typer.Typer(
        name="kvconnector",
        cls=_Commands,
        no_args_is_help=True,
        **PLAIN,
    )
    app.callback(epilog=STATUSES)(_main)
    for name, text in COMMANDS.items():
        app.command(name, help=text)(lambda: None)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status, see `STATUSES`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        make_app()(args=arguments, prog_name="kvconnector")
    except KVConnectorError as error:
        is_wrong = type(error).__name__ == "ResultMismatchError"
        prefix = "wrong result, so no figures: " if is_wrong else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        typer.echo(f"kvconnector: {prefix}{text}", err=True)
        return EXIT_FAULT if is_wrong else EXIT_ERROR
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:
            typer.echo("kvconnector: interrupted", err=True)
        if not isinstance(ended.code, int):
            return EXIT_ERROR if ended.code else 0
        return ended.code
    return 0
