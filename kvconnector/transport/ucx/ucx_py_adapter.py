"""UCX through ucx-py, the predecessor of ucxx, for installations that still have it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvconnector.errors import TransportError
from kvconnector.transport.ucx.environment import ucx_environment_kept
from kvconnector.transport.ucx.seam import features_of


class UcxPyBinding:
    """ucx-py's core objects, without its event loop and its endpoints.

    Raises:
        ImportError: ucx-py or the UCX library that it wants cannot be loaded.
    """

    name = "ucx-py"

    def __init__(self) -> None:
        with ucx_environment_kept():
            self._api = importlib.import_module("ucp._libs.ucx_api")

    def open_context(self, options: Mapping[str, str], *, wakeup: bool) -> object:
        """See `UcxBinding`."""
        features = features_of(self._api.Feature, wakeup=wakeup)
        try:
            return self._api.UCXContext(dict(options), features)
        except self._api.UCXError as exc:
            raise TransportError("UCX refused its configuration", options=dict(options)) from exc

    def open_worker(self, context: object) -> object:
        """See `UcxBinding`."""
        try:
            return self._api.UCXWorker(context)
        except self._api.UCXError as exc:
            raise TransportError("UCX could not create a worker") from exc

    def worker_address(self, worker: Any) -> bytes:
        """See `UcxBinding`."""
        address = worker.get_address()
        try:
            return bytes(address)
        finally:
            address.close()

    def handle(self, owner: Any) -> int:
        """See `UcxBinding`."""
        return int(owner.handle)

    def release(self, worker: Any, context: Any) -> None:
        """See `UcxBinding`."""
        worker.close()
        context.close()
