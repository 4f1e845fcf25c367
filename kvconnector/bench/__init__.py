"""Benchmarks, measured beside the limits of the same machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnector.errors import ConfigError, KVConnectorError


class ResultMismatchError(KVConnectorError):
    """A benchmark's result is wrong, so it reports no time."""


@contextmanager
def file_errors(failure: str, path: Path) -> Iterator[None]:
    """Work on a file that the user named. Raises ConfigError: `failure`, with the reason and the file's name."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{failure}: {error}", path=str(path)) from error
