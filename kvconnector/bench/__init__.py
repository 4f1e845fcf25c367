"""Benchmarks, measured beside the limits of the same machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnector.errors import ConfigError, KVConnectorError


class ResultMismatchError(KVConnectorError):
    """A benchmark's result is wrong, so it reports no time."""


MAX_FILE_BYTES = 64 << 20
"""The longest file that a command reads: a device such as /dev/zero has no end."""


@contextmanager
def file_errors(failure: str, path: Path) -> Iterator[None]:
    """Work on a file that the user named. Raises ConfigError: `failure`, with the reason and the file's name."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{failure}: {error}", path=str(path)) from error


def read_file(path: Path) -> bytes:
    """Return the contents of a file that the user named. Raises OSError; ValueError: it has no end that is near."""
    with path.open("rb") as opened:
        found = opened.read(MAX_FILE_BYTES + 1)
    if len(found) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    return found
