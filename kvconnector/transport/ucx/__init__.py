"""Tagged messages over UCX, through whichever Python binding is installed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvconnector.transport.ucx.bindings import AUTO, BINDINGS, UcxBinding, load_binding
from kvconnector.transport.ucx.rdma import offers_of, settle_net_devices
from kvconnector.transport.ucx.transport import UcxTransport

__all__ = ["AUTO", "BINDINGS", "UcxBinding", "UcxTransport", "load_binding", "open_ucx_transport"]


def open_ucx_transport(
    binding: str = AUTO,
    *,
    device: str = "cpu",
    options: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> UcxTransport:
    """A UCX transport for caches on `device` ("cpu" or "cuda:N"); see `UcxTransport` for the settings. Raises
    ConfigError, TransportError: see `load_binding`, `settle_net_devices` and `UcxTransport`.
    """
    loaded = load_binding(binding)
    settled = settle_net_devices(options, offers_of(loaded), device)
    return UcxTransport(loaded, options=settled, **settings)
