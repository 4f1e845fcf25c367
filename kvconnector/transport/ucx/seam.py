"""What the transport needs of a Python binding of UCX: five calls.

A binding loads libucp and makes the two long-lived objects; messages then go to that libucp by handle
(`libucp`). Endpoints are made there too, not by the binding: ucxx closes an endpoint without the force flag and
waits for its peer without a deadline in the destructor, ucx-py spins in a finalizer, and a peer that died must
block neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class UcxBinding(Protocol):
    """One Python binding of UCX. The objects it makes are opaque to the transport."""

    name: str

    def open_context(self, options: Mapping[str, str], *, wakeup: bool) -> object:
        """A context with tagged messages, with event descriptors if `wakeup`. `options` are named without `UCX_`."""

    def open_worker(self, context: object) -> object:
        """A worker that is progressed by its owner's thread only."""

    def worker_address(self, worker: object) -> bytes:
        """The address that peers pass to `ucp_ep_create`."""

    def handle(self, owner: object) -> int:
        """The `ucp_context_h` or `ucp_worker_h` behind a context or a worker, as an integer."""

    def release(self, worker: object, context: object) -> None:
        """Destroy both, the worker first. Every endpoint and request of theirs is gone or abandoned."""


def features_of(feature: Any, *, wakeup: bool) -> tuple[Any, ...]:
    """What a context is opened for, see `UcxBinding.open_context`, of a binding's own enumeration."""
    return (feature.TAG, *((feature.WAKEUP,) if wakeup else ()))
