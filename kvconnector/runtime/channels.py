"""Building a worker's or a scheduler's control channel and transport from the configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kvconnector.config import ConnectorConfig
from kvconnector.control.base import ControlLimits
from kvconnector.control.security import CurveKeys, Security
from kvconnector.control.zmq import ControlChannel
from kvconnector.session.engines import FIRST_GREETING_FACTOR

if TYPE_CHECKING:
    from kvconnector.transport.ucx import UcxTransport

logger = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 4096
MAX_QUEUED_ANSWERS = 16
"""Answers of a directory service that wait for one consumer, which asks once or twice. They are much longer than the
questions, so that one which does not read them would fill the memory with few bytes."""
MAX_MESSAGES_PER_TURN = 256
LINGER_S = 0.5


def security_of(config: ConnectorConfig) -> Security:
    """Return keys from the configured files, or None if these are not set.

    Raises:
        ConfigError: A key file is missing or malformed.
    """
    control = config.control
    if not control.secret_key_file:
        return None
    return CurveKeys.from_files(
        secret_key_file=Path(control.secret_key_file),
        authorized_clients_file=Path(control.authorized_clients_file),
    )


def control_limits(
    config: ConnectorConfig, max_queued_messages: int = MAX_QUEUED_MESSAGES
) -> ControlLimits:
    """Return the bounds of an engine's control channels.

    libzmq's own threads greet, and kernels answer probes, however busy the peer's Python is. So a host that does
    neither for `peer.timeout_s` is gone, also where greeting an engine may take longer.
    """
    control, peer = config.control, config.peer
    return ControlLimits(
        max_message_bytes=control.max_message_bytes,
        max_queued_messages=max_queued_messages,
        max_messages_per_turn=MAX_MESSAGES_PER_TURN,
        connect_timeout_s=min(FIRST_GREETING_FACTOR * peer.hello_timeout_s, peer.timeout_s),
        host_timeout_s=peer.timeout_s,
        linger_s=LINGER_S,
    )


def open_directory_control(config: ConnectorConfig, port: int) -> ControlChannel:
    """Open the control channel of a directory service, see `open_control`."""
    return open_control(config, port, MAX_QUEUED_ANSWERS)


def open_control(
    config: ConnectorConfig, port: int, max_queued_messages: int = MAX_QUEUED_MESSAGES
) -> ControlChannel:
    """Open a control channel that listens on `port` of the configured host.

    Raises:
        ConfigError: the keys or the address cannot be used.
        TransportError: no file may be opened.
    """
    control = config.control
    if control.insecure_network:
        logger.warning(
            "control.insecure_network is set: anybody who reaches %s can read and forge KV transfers of engine %s",
            control.host,
            config.engine_id,
        )
    return ControlChannel(
        bind_host=control.host,
        bind_port=port,
        advertise_host=control.advertise_host or None,
        security=security_of(config),
        limits=control_limits(config, max_queued_messages),
    )


def ucx_options(config: ConnectorConfig) -> dict[str, str]:
    """Return the configured UCX options, named without `UCX_`."""
    named = (("TLS", config.ucx.tls), ("NET_DEVICES", config.ucx.net_devices))
    return {name: value for name, value in named if value}


def open_transport(config: ConnectorConfig, device: str) -> UcxTransport:
    """Open a UCX transport for caches on `device` ("cpu" or "cuda:N").

    Raises:
        ConfigError: `ucx.net_devices` names a device that UCX cannot use.
        TransportError: no UCX is found, or it cannot start.
    """
    # a scheduler opens a control channel alone
    from kvconnector.transport.ucx import open_ucx_transport

    return open_ucx_transport(
        config.ucx.library,
        device=device,
        options=ucx_options(config),
        staging_bytes=config.staging.budget_bytes,
        require_rdma=config.ucx.require_rdma,
        tcp_segment_bytes=config.ucx.tcp_segment_bytes,
    )
