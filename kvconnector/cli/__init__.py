"""The command line: `kvconnector plan`, `simulate`, `doctor`, `bench`, `top` and `keygen`. It needs the extra `cli`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from kvconnector.cli.statuses import EXIT_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0: success; 1: a benchmark's result was wrong, or a fault was found; 2: wrong usage, or an
    error that the text names; 130: interrupted.
    """
    if arguments is None:
        # a service manager ends a benchmark by SIGTERM, which keeps its report as Ctrl-C does
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from kvconnector.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "matplotlib", "rich"):
            raise
        sys.stderr.write(
            f'kvconnector: the command line needs {package}: pip install "kvconnector[cli]"\n'
        )
        return EXIT_ERROR
