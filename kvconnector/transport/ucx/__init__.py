"""Tagged messages over UCX, by whichever libucp is here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvconnector.transport.ucx.library import AUTO, SOURCES, UcxLibrary, load_library
from kvconnector.transport.ucx.rdma import offers_of, settle_net_devices
from kvconnector.transport.ucx.transport import UcxTransport

__all__ = ["AUTO", "SOURCES", "UcxLibrary", "UcxTransport", "load_library", "open_ucx_transport"]


def open_ucx_transport(
    library: str = AUTO,
    *,
    device: str = "cpu",
    options: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> UcxTransport:
    """A UCX transport for caches on `device` ("cpu" or "cuda:N"); see `UcxTransport` for the settings. Raises
    ConfigError, TransportError: see `load_library`, `settle_net_devices` and `UcxTransport`.
    """
    loaded = load_library(library)
    settled = settle_net_devices(options, offers_of(loaded), device)
    return UcxTransport(loaded, options=settled, **settings)
