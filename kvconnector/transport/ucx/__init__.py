"""Tagged messages over UCX, through whichever Python binding is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvconnector.errors import ConfigError, TransportError
from kvconnector.transport.ucx.seam import UcxBinding
from kvconnector.transport.ucx.transport import UcxTransport
from kvconnector.transport.ucx.ucx_py_adapter import UcxPyBinding
from kvconnector.transport.ucx.ucxx_adapter import UcxxBinding

__all__ = ["AUTO", "BINDINGS", "UcxBinding", "UcxTransport", "load_binding", "open_ucx_transport"]

AUTO = "auto"
"""The first binding of `BINDINGS` that imports."""

BINDINGS: Mapping[str, Callable[[], UcxBinding]] = MappingProxyType(
    {"ucxx": UcxxBinding, "ucx-py": UcxPyBinding}
)
"""Every supported binding by the name that selects it, the preferred one first."""


def load_binding(name: str = AUTO) -> UcxBinding:
    """Import a binding of UCX.

    Raises:
        ConfigError: there is no binding of that name.
        TransportError: that binding, or with `AUTO` none of them, can be imported.
    """
    if name != AUTO and name not in BINDINGS:
        raise ConfigError("no such UCX binding", binding=name, known=[AUTO, *BINDINGS])
    reasons: dict[str, str] = {}
    for candidate in BINDINGS if name == AUTO else [name]:
        try:
            return BINDINGS[candidate]()
        except (ImportError, OSError) as exc:
            reasons[candidate] = str(exc)
    raise TransportError("no UCX binding can be imported", reasons=reasons)


def open_ucx_transport(
    binding: str = AUTO,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
    tcp_segment_bytes: int = 0,
    wakeup: bool = True,
    peer_error_handling: bool | None = None,
    liveness_interval_s: float = 0.25,
    close_timeout_s: float = 2.0,
) -> UcxTransport:
    """A UCX transport with the settings that suit most; see `UcxTransport` for their meaning.

    Raises:
        ConfigError, TransportError: see `load_binding` and `UcxTransport`.
    """
    return UcxTransport(
        load_binding(binding),
        options=options,
        tcp_segment_bytes=tcp_segment_bytes,
        wakeup=wakeup,
        peer_error_handling=peer_error_handling,
        liveness_interval_s=liveness_interval_s,
        close_timeout_s=close_timeout_s,
    )
