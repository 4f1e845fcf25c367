"""All commands. Each lives in a module of its own; what it raises becomes one line and an exit status here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kvconnector import __version__
from kvconnector.bench import ResultMismatchError
from kvconnector.cli import EXIT_ERROR
from kvconnector.control.security import (
    AUTHORIZED_CLIENTS_FILE,
    PUBLIC_KEY_FILE,
    SECRET_KEY_FILE,
    generate_keys,
)
from kvconnector.errors import KVConnectorError

EXIT_MISMATCH = 1
MODULES = ("plan", "simulate", "doctor", "bench", "top")
"""Commands in a module of their name. Only the one that is called is imported, so that `plan` needs no torch."""


def keygen(
    directory: Annotated[Path, typer.Argument(help="Where the key files go; made if need be.")],
) -> None:
    """Make a CURVE key pair for the control channel. Existing keys are never overwritten."""
    keys = generate_keys(directory)
    typer.echo(f"public key: {keys.public_key}")
    typer.echo(f"KVCONNECTOR_CONTROL_SECRET_KEY_FILE={directory / SECRET_KEY_FILE}")
    typer.echo(f"KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE={directory / AUTHORIZED_CLIENTS_FILE}")
    typer.echo(
        f"Give {PUBLIC_KEY_FILE} to the engines that talk to this one, and add theirs to"
        f" {AUTHORIZED_CLIENTS_FILE}, one a line."
    )


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _app(arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        name="kvconnector",
        help="KV-cache transfer between prefill and decode engines that are cut differently.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    called = arguments[0] if arguments else ""
    for name in MODULES:
        if called == name or called not in (*MODULES, "keygen", "version"):
            app.command()(getattr(import_module(f"kvconnector.cli.{name}"), name))
    app.command()(keygen)
    app.command()(version)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status, see `kvconnector.cli.main`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _app(arguments)(args=arguments, prog_name="kvconnector")
    except ResultMismatchError as error:
        typer.echo(f"kvconnector: wrong result, so no figures: {_one_line(error)}", err=True)
        return EXIT_MISMATCH
    except KVConnectorError as error:
        typer.echo(f"kvconnector: {_one_line(error)}", err=True)
        return EXIT_ERROR
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            return EXIT_ERROR if ended.code else 0
        return ended.code
    return 0


def _one_line(error: KVConnectorError) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
