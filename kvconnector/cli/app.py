"""All commands, each in a module that is imported when it is called. An error becomes one line and an exit status."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from kvconnector import __version__
from kvconnector.cli.statuses import EXIT_ERROR, EXIT_FAULT, EXIT_INTERRUPTED
from kvconnector.errors import KVConnectorError

COMMANDS = {
    "plan": "Print which rank reads what from which, and draw it.",
    "simulate": "Simulate growing clusters in virtual time.",
    "doctor": "Check this host, or the connection from this host to a running engine.",
    "bench": "Measure transfers, and compare them with the limits of this machine.",
    "top": "Show engines' transfers as they happen.",
    "keygen": "Make a CURVE key pair for the control channel.",
}
"""Each is the command in the module of the same name."""
STATUSES = (
    "Exit status: 0 for success, 1 for a fault that was found or a wrong result, 2 for wrong usage or another error,"
    " 130 if interrupted."
)


class _Commands(click.Group):
    """Knows every command's name, and imports the one that is called: `top` needs no numpy, and help needs nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            found: click.Command = getattr(import_module(f"kvconnector.cli.{cmd_name}"), cmd_name)
            self.add_command(found)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=_Commands, epilog=STATUSES, context_settings=CONTEXT)
@click.version_option(__version__, message="%(prog)s %(version)s")
def app() -> None:
    """KV-cache transfer between prefill and decode engines with different parallelism and cache layouts."""


def run(
    arguments: Sequence[str] | None = None,
    program: click.Command = app,
    name: str = "kvconnector",
) -> int:
    """Run a command. Returns the exit status, see `STATUSES`."""
    try:
        status = program.main(arguments, name, standalone_mode=False)
    except KVConnectorError as error:
        is_wrong = type(error).__name__ == "ResultMismatchError"
        prefix = "wrong result, so no figures: " if is_wrong else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        click.echo(f"{name}: {prefix}{text}", err=True)
        return EXIT_FAULT if is_wrong else EXIT_ERROR
    except click.ClickException as error:
        error.show()
        return EXIT_ERROR
    except SystemExit:  # click's way with a broken pipe, with the status of a fault
        if not _nobody_reads():
            raise
        return 0  # as in `kvconnector plan | head -1`
    except OSError as error:  # mostly a full disk
        click.echo(f"{name}: {type(error).__name__}: {error}", err=True)
        return EXIT_ERROR
    except click.Abort:
        click.echo(f"{name}: interrupted", err=True)
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _nobody_reads() -> bool:
    """Returns True if standard output is a pipe without a reader. What is still to be written to it is then dropped."""
    output = sys.__stdout__
    if output is None:
        return False
    poll = select.poll()
    poll.register(output.fileno(), select.POLLOUT)
    is_over = any(events & select.POLLERR for _, events in poll.poll(0))
    if is_over:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return is_over
