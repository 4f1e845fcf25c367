"""Importing a UCX binding without its traces in this process's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_MEMTYPE_CACHE = "UCX_MEMTYPE_CACHE"


@contextmanager
def ucx_environment_kept() -> Iterator[None]:
    """Undo what the block adds to the UCX_* environment variables.

    Both bindings set UCX_* defaults when imported, which would reach the children of this process and its other
    users of UCX. Both also set UCX_MEMTYPE_CACHE after libucs has read its environment, which libucs reports on
    stderr as unused; setting it before the block makes it count: UCX then asks the driver what a pointer is, as
    caching allocators need.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    os.environ.setdefault(_MEMTYPE_CACHE, "n")
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]
