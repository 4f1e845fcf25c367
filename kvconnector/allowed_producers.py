"""The producers that a consumer may connect to: `control.allowed_producers`. Pure: no name is looked up."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from kvconnector.errors import ConfigError
from kvconnector.ids import MAX_PORT

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ENTRY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>(?:\*\.)?[\w.-]+))(?::(?P<port>[0-9]{1,5}))?"
)


class _Entry(NamedTuple):
    """A network or a host's name, and the port, 0 for any. A name that begins with a dot stands for all that end so."""

    network: Network | None
    name: str
    port: int

    def covers(self, host: str, port: int) -> bool:
        if self.port not in (0, port):
            return False
        if self.network is None:
            return host == self.name or (self.name.startswith(".") and host.endswith(self.name))
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            return False
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return (mapped or ip) in self.network


class AllowedProducers:
    """Networks (`10.2.0.0/16`), hosts, and hosts with a port (`10.2.0.7:5557`, `[fd00::7]:5557`, `*.prefill:5557`),
    separated by commas; an empty list allows all. A host that is named by a request must be listed by that name.

    Raises:
        ConfigError: an entry is none of these.
    """

    def __init__(self, listed: str) -> None:
        self._entries = [_parsed(each.strip()) for each in listed.split(",") if each.strip()]

    def allows(self, host: str, port: int) -> bool:
        """Returns True if a directory service at this host, without brackets, and port may be connected to."""
        name = host.lower().rstrip(".")
        return not self._entries or any(entry.covers(name, port) for entry in self._entries)


def _parsed(entry: str) -> _Entry:
    if "/" in entry:
        try:
            return _Entry(ipaddress.ip_network(entry), "", 0)
        except ValueError as error:
            raise ConfigError(
                f"control.allowed_producers has a malformed network: {error}", entry=entry
            ) from error
    is_bare_v6 = entry.count(":") > 1 and not entry.startswith("[")
    match = _ENTRY.fullmatch(f"[{entry}]" if is_bare_v6 else entry)
    if match is None or int(match["port"] or 1) not in range(1, MAX_PORT + 1):
        raise ConfigError(
            "control.allowed_producers must list networks, hosts, or hosts with a port", entry=entry
        )
    host, port = match["v6"] or match["name"], int(match["port"] or 0)
    try:
        return _Entry(ipaddress.ip_network(host), "", port)
    except ValueError as error:
        if match["v6"]:
            raise ConfigError(
                f"control.allowed_producers has a malformed address: {error}", entry=entry
            ) from error
    return _Entry(None, host.lower().rstrip(".").removeprefix("*"), port)
