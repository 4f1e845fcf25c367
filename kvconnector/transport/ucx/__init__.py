"""Tagged messages over UCX, through any supported libucp."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvconnector.transport.ucx.library import AUTO, SOURCES, UcxLibrary, load_library
from kvconnector.transport.ucx.rdma import RdmaChoice
from kvconnector.transport.ucx.transport import UcxTransport

__all__ = ["AUTO", "SOURCES", "UcxLibrary", "UcxTransport", "load_library", "open_ucx_transport"]


def open_ucx_transport(
    library: str = AUTO,
    *,
    device: str = "cpu",
    options: Mapping[str, str] = MappingProxyType({}),
    staging_bytes: int = 0,
    require_rdma: bool = False,
    **settings: Any,
) -> UcxTransport:
    """Open a UCX transport for caches on `device` ("cpu" or "cuda:N").

    `staging_bytes`: see `RdmaChoice`. `settings` are those of `UcxTransport`.

    Raises:
        ConfigError, TransportError: see `load_library`, `RdmaChoice` and `UcxTransport`.
    """
    loaded = load_library(library)
    choice = RdmaChoice(loaded, device, staging_bytes=staging_bytes)
    choice.check_devices(options)
    settled = choice.without_unlockable(options, require_rdma=require_rdma)
    return UcxTransport(loaded, options=settled, rdma=choice, require_rdma=require_rdma, **settings)
