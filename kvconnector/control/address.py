"""Addresses of control channels: `tcp://host:port`, IPv6 hosts in brackets."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from kvconnector.config import is_wildcard
from kvconnector.errors import ConfigError
from kvconnector.ids import MAX_PORT

_ADDRESS = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+)):(?P<port>[0-9]{1,5})"
)
_MAX_NAME = 253
"""Characters of a host name (RFC 1035)."""


class HostPort(NamedTuple):
    """The address of a listening control channel. `host` has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def parse_address(address: str) -> HostPort:
    """Split an address that a peer or a router named. Raises ConfigError: anything but `tcp://`, a host name or IP
    address that is no wildcard, and a port from 1 to 65535. ZMQ itself would accept wildcards, for which the kernel
    connects to this host, source addresses and other schemes.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ConfigError("a control address must have the form tcp://host:port", address=address)
    host, port = match["v6"] or match["name"], int(match["port"])
    if not 1 <= port <= MAX_PORT:
        raise ConfigError(f"port of a control address must be 1 to {MAX_PORT}", address=address)
    if match["v6"]:
        _parse_ip(host, address=address)
    else:
        _check_name(host)
    if is_wildcard(host):
        raise ConfigError("host of a control address is a wildcard", address=address)
    return HostPort(host, port)


def parse_bind(host: str, port: int, advertise_host: str | None) -> tuple[HostPort, str]:
    """Check where to listen. Returns it, and the host to which peers connect.

    `host` is an IP address of this machine or `localhost`; port 0 is any free one. `advertise_host` is `host` if None.
    Raises ConfigError: a malformed host, or a wildcard (`0.0.0.0`, `::`) without `advertise_host`.
    """
    literal = "127.0.0.1" if host == "localhost" else host
    ip = _parse_ip(literal, bind_host=host)
    if advertise_host is None:
        if ip.is_unspecified:
            raise ConfigError(
                "a channel that is bound to every interface needs advertise_host, the host that peers connect to",
                bind_host=host,
            )
        advertise_host = literal
    parse_address(str(HostPort(advertise_host, 1)))
    return HostPort(literal, port), advertise_host


def _check_name(host: str) -> None:
    """Refuse names for which no name server would be asked; otherwise they would fail only when the connection times
    out.
    """
    if len(host.removesuffix(".")) > _MAX_NAME:
        raise ConfigError(
            f"host of a control address has more than {_MAX_NAME} characters",
            characters=len(host),
            begins_with=host[:40],
        )
    try:
        host.encode("idna")
    except UnicodeError as exc:
        raise ConfigError(
            "host of a control address has a label that is empty, longer than 63 characters, or not permitted",
            host=host,
        ) from exc


def _parse_ip(host: str, **context: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(host)
    except ValueError as exc:
        raise ConfigError("host is not an IP address", **context) from exc
