"""`kvconnector keygen`: a CURVE key pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnector.cli.console import JsonFlag, print_json
from kvconnector.control.security import (
    AUTHORIZED_CLIENTS_FILE,
    PUBLIC_KEY_FILE,
    SECRET_KEY_FILE,
    generate_keys,
)


def keygen(
    directory: Annotated[Path, typer.Argument(help="Where the key files go; made if need be.")],
    json: JsonFlag = False,
) -> None:
    """Make a CURVE key pair for the control channel. Existing keys are never overwritten."""
    key = generate_keys(directory).public_key
    settings = {
        "KVCONNECTOR_CONTROL_SECRET_KEY_FILE": str(directory / SECRET_KEY_FILE),
        "KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE": str(directory / AUTHORIZED_CLIENTS_FILE),
    }
    if json:
        print_json({"public_key": key, "settings": settings})
        return
    typer.echo(f"public key: {key}")
    for name, value in settings.items():
        typer.echo(f"{name}={value}")
    typer.echo(
        f"Give {PUBLIC_KEY_FILE} to the engines that talk to this one, and add theirs to"
        f" {AUTHORIZED_CLIENTS_FILE}, one a line."
    )
