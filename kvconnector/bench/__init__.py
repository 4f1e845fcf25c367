"""Benchmarks, beside the limits of the same machine."""

from kvconnector.errors import KVConnectorError


class ResultMismatchError(KVConnectorError):
    """A benchmark's result is wrong, so it reports no time."""
