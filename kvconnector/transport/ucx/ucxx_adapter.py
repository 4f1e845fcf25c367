"""UCX through ucxx, the maintained binding."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import Any

from kvconnector.errors import TransportError
from kvconnector.transport.ucx.environment import ucx_environment_kept
from kvconnector.transport.ucx.seam import features_of


class _Handles:
    """A ucxx object that can be let go of: its destructor is the only way to end it."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped


class UcxxBinding:
    """ucxx without its progress thread, its event loop and its endpoints.

    Raises:
        ImportError: ucxx or the UCX library that it wants cannot be loaded.
    """

    name = "ucxx"

    def __init__(self) -> None:
        with ucx_environment_kept():
            self._api = importlib.import_module("ucxx._lib.libucxx")

    def open_context(self, options: Mapping[str, str], *, wakeup: bool) -> object:
        """See `UcxBinding`."""
        features = features_of(self._api.Feature, wakeup=wakeup)
        try:
            return _Handles(self._api.UCXContext(dict(options), features))
        except (RuntimeError, self._api.UCXError) as exc:
            raise TransportError("UCX refused its configuration", options=dict(options)) from exc

    def open_worker(self, context: object) -> object:
        """See `UcxBinding`."""
        try:
            return _Handles(self._api.UCXWorker(_unwrap(context)))
        except (RuntimeError, self._api.UCXError) as exc:
            raise TransportError("UCX could not create a worker") from exc

    def worker_address(self, worker: object) -> bytes:
        """See `UcxBinding`."""
        return bytes(_unwrap(worker).address)

    def handle(self, owner: object) -> int:
        """See `UcxBinding`."""
        return int(_unwrap(owner).handle)

    def release(self, worker: object, context: object) -> None:
        """See `UcxBinding`."""
        for owner in (worker, context):
            if isinstance(owner, _Handles):
                owner.wrapped = None
        gc.collect(0)


def _unwrap(owner: object) -> Any:
    if not isinstance(owner, _Handles) or owner.wrapped is None:
        raise TransportError("this UCX object was released", owner=repr(owner))
    return owner.wrapped
