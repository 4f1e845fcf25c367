"""Tagged messages over UCX, by whichever libucp is here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvconnector.transport.ucx.library import AUTO, SOURCES, UcxLibrary, load_library
from kvconnector.transport.ucx.rdma import offers_of, settle_net_devices, without_unlockable
from kvconnector.transport.ucx.transport import UcxTransport

__all__ = ["AUTO", "SOURCES", "UcxLibrary", "UcxTransport", "load_library", "open_ucx_transport"]


def open_ucx_transport(
    library: str = AUTO,
    *,
    device: str = "cpu",
    options: Mapping[str, str] = MappingProxyType({}),
    require_rdma: bool = False,
    **settings: Any,
) -> UcxTransport:
    """A UCX transport for caches on `device` ("cpu" or "cuda:N"); see `UcxTransport` for the settings. Raises
    ConfigError, TransportError: see `load_library`, `settle_net_devices`, `without_unlockable` and `UcxTransport`.
    """
    loaded = load_library(library)
    offers = offers_of(loaded)
    settled = settle_net_devices(options, offers, device)
    settled = without_unlockable(settled, offers, require_rdma=require_rdma)
    return UcxTransport(loaded, options=settled, require_rdma=require_rdma, **settings)
