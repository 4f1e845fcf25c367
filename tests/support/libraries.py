"""The UCX that all test processes use: the one that KVCONNECTOR_UCX_LIBRARY names, or any."""

import functools
import os

from kvconnector.errors import TransportError
from kvconnector.transport.ucx import AUTO, load_library


@functools.cache
def has_ucx():
    """Load UCX. Returns False if none is found; raises TransportError if the named one cannot be used."""
    named = os.environ.get("KVCONNECTOR_UCX_LIBRARY", AUTO)
    try:
        load_library(named)
    except TransportError:
        if named != AUTO:
            raise
        return False
    return True
