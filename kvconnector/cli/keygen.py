"""`kvconnector keygen`: a CURVE key pair."""

from __future__ import annotations

from pathlib import Path

import click

from kvconnector.cli.console import json_flag, print_json
from kvconnector.control.security import (
    AUTHORIZED_CLIENTS_FILE,
    PUBLIC_KEY_FILE,
    SECRET_KEY_FILE,
    generate_keys,
)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@json_flag
def keygen(directory: Path, json: bool) -> None:
    """Make a CURVE key pair for the control channel in DIRECTORY, which is created if needed. Existing keys are never
    overwritten.
    """
    directory = directory.absolute()  # an engine starts in another folder
    key = generate_keys(directory).public_key
    settings = {
        "KVCONNECTOR_CONTROL_SECRET_KEY_FILE": str(directory / SECRET_KEY_FILE),
        "KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE": str(directory / AUTHORIZED_CLIENTS_FILE),
    }
    if json:
        print_json({"public_key": key, "settings": settings})
        return
    click.echo(f"public key: {key}")
    for name, value in settings.items():
        click.echo(f"{name}={value}")
    click.echo(
        f"Give {PUBLIC_KEY_FILE} to the engines that talk to this one, and add theirs to"
        f" {AUTHORIZED_CLIENTS_FILE}, one per line."
    )
