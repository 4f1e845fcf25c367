"""The command line: `kvconnector plan`, `doctor`, `bench`, `keygen` and `version`. It needs the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. 0: well; 1: a benchmark's result was wrong, or doctor found a fault; 2: an error
    that the text names.
    """
    try:
        from kvconnector.cli.app import run

        return run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("rich", "typer"):
            raise
        sys.stderr.write(
            f"kvconnector: the command line needs {package}: pip install kvconnector[cli]\n"
        )
        return EXIT_ERROR
