"""The Python bindings of UCX, ucxx and its predecessor ucx-py, as far as the transport needs them.

A binding loads libucp and makes the two long-lived objects; messages then go to that libucp by handle (`libucp`).
Endpoints are made there too, not by the binding: ucxx closes an endpoint without the force flag and waits for its peer
without a deadline in the destructor, ucx-py spins in a finalizer, and a peer that died must block neither.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvconnector.errors import ConfigError, TransportError

_MEMTYPE_CACHE = "UCX_MEMTYPE_CACHE"


class UcxBinding:
    """One of `BINDINGS`. Contexts and workers are its own objects, opaque to the transport but for `handle`: the
    `ucp_context_h` or `ucp_worker_h` behind them.

    Raises ImportError: the binding or the UCX library that it wants cannot be loaded.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        with ucx_environment_kept():
            self._api = importlib.import_module(BINDINGS[name])

    def open_context(self, options: Mapping[str, str]) -> Any:
        """A context with tagged messages and event descriptors. `options` are named without `UCX_`. Raises
        TransportError: UCX cannot start with these. Before 1.20 it only warns of those it does not know.
        """
        features = (self._api.Feature.TAG, self._api.Feature.WAKEUP)
        try:
            return self._api.UCXContext(dict(options), features)
        except (RuntimeError, self._api.UCXError) as exc:
            raise TransportError("UCX refused its configuration", options=dict(options)) from exc

    def open_worker(self, context: Any) -> Any:
        """A worker that is progressed by its owner's thread only. Raises TransportError: UCX cannot make one."""
        try:
            return self._api.UCXWorker(context)
        except (RuntimeError, self._api.UCXError) as exc:
            raise TransportError("UCX could not create a worker") from exc

    def worker_address(self, worker: Any) -> bytes:
        """The address that peers pass to `ucp_ep_create`."""
        if self.name == "ucxx":
            return bytes(worker.address)
        address = worker.get_address()
        try:
            return bytes(address)
        finally:
            address.close()

    def release(self, owners: list[Any]) -> None:
        """Destroy contexts and workers, the last first, and empty the list, which has the only references: a
        destructor is the only way to end one of ucxx's. Every endpoint and request of theirs is gone or abandoned.
        """
        while owners:
            owner = owners.pop()
            if self.name != "ucxx":
                owner.close()
            del owner
            gc.collect(0)


AUTO = "auto"
"""The first binding of `BINDINGS` that imports."""

BINDINGS = {"ucxx": "ucxx._lib.libucxx", "ucx-py": "ucp._libs.ucx_api"}
"""Bindings by the names that select them, the preferred one first, and the modules that share objects with libucp."""


def load_binding(name: str = AUTO) -> UcxBinding:
    """Import a binding of UCX. Raises ConfigError: none has that name. TransportError: it, or of all none, imports."""
    if name != AUTO and name not in BINDINGS:
        raise ConfigError("no such UCX binding", binding=name, known=[AUTO, *BINDINGS])
    reasons: dict[str, str] = {}
    for candidate in BINDINGS if name == AUTO else [name]:
        try:
            return UcxBinding(candidate)
        except (ImportError, OSError) as exc:
            reasons[candidate] = str(exc)
    raise TransportError("no UCX binding can be imported", reasons=reasons)


@contextmanager
def ucx_environment_kept() -> Iterator[None]:
    """Undo what the block adds to the UCX_* environment variables.

    Both bindings set UCX_* defaults when imported, which would reach this process's children and other users of UCX.
    Both also set UCX_MEMTYPE_CACHE after libucs has read its environment, which libucs reports on stderr as unused; set
    before the block it counts: UCX then asks the driver what a pointer is, as caching allocators need.
    """
    before = {name for name in os.environ if name.startswith("UCX_")}
    os.environ.setdefault(_MEMTYPE_CACHE, "n")
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UCX_")]:
            if name not in before:
                del os.environ[name]
