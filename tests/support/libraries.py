"""The UCX that tests use: the one that KVCONNECTOR_UCX_LIBRARY names, in every process of theirs."""

import functools
import os

from kvconnector.errors import TransportError
from kvconnector.transport.ucx import AUTO, load_library


@functools.cache
def has_ucx():
    """Load that library; is there one? A name that is set and cannot be used is an error."""
    named = os.environ.get("KVCONNECTOR_UCX_LIBRARY", AUTO)
    try:
        load_library(named)
    except TransportError:
        if named != AUTO:
            raise
        return False
    return True
