"""kvconnector's settings from SGLang's arguments, and the deployments that are refused at start."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvconnector.config import ENV_PREFIX, ConnectorConfig, is_loopback
from kvconnector.control.lookup import host_address
from kvconnector.control.security import read_key_file
from kvconnector.errors import AuthenticationError, ConfigError
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.integrations.sglang.fields import bootstrap_address
from kvconnector.runtime.channels import security_of

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - named to be replaced by an address
KEY_FILES = ("CONTROL_SECRET_KEY_FILE", "CONTROL_AUTHORIZED_CLIENTS_FILE")


def prefill_engine_id(bootstrap_port: int) -> str:
    """Return a prefill engine's id, which a decode engine can derive: it knows only the host and the port."""
    return f"sglang-prefill-{bootstrap_port}"


def connector_config(
    *,
    is_prefill: bool,
    host: str,
    bootstrap_port: int,
    unique_name: str,
    own_address: str,
    environ: Mapping[str, str],
) -> ConnectorConfig:
    """Return one engine's settings: those that SGLang's arguments imply, overridden by `KVCONNECTOR_*` variables.

    Args:
        is_prefill: True for a prefill engine, False for a decode engine.
        host: SGLang's `--host`. The control channel binds its address unless `control.host` names another.
        bootstrap_port: SGLang's `--disaggregation-bootstrap-port`, where a prefill engine's directory service listens.
        unique_name: The id of a decode engine, the same in all of its ranks.
        own_address: The address to advertise to peers if the bound one is a wildcard.
        environ: Environment variables.

    Raises:
        ConfigError: a setting is malformed or contradicts SGLang's arguments, or `host` has no address.
    """
    bound = environ.get(f"{ENV_PREFIX}CONTROL_HOST") or _address(host)
    control: dict[str, Any] = {"host": bound}
    if bound in WILDCARDS:
        control["advertise_host"] = own_address
    has_keys = any(environ.get(ENV_PREFIX + name) for name in KEY_FILES)
    if is_loopback(bound) and not has_keys:
        control["insecure"] = True
    if is_prefill:
        control["port"] = bootstrap_port
    name = prefill_engine_id(bootstrap_port) if is_prefill else unique_name
    role = "producer" if is_prefill else "consumer"
    base = {"engine_id": name, "role": role, "control": control}
    config = ConnectorConfig.from_env(environ, base)
    implied: dict[str, object] = {"role": role}
    if is_prefill:
        implied |= {"engine_id": name, "control.port": bootstrap_port}
    for setting, value in implied.items():
        found = attrgetter(setting)(config)
        if found != value:
            raise ConfigError(
                f"{setting} follows from SGLang's arguments: remove the variable that sets it",
                found=found,
                implied=value,
            )
    return config


class PrefillEngines:
    """The addresses of prefill engines' directory services, and their public keys, from key files that are read once.

    Args:
        config: This engine's settings.

    Raises:
        ConfigError: a key file cannot be read, or is malformed.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        security = security_of(config)
        self._others = frozenset({""})  # without keys
        self._listed: dict[str, str] = {}
        if security is not None:
            clients = security.authorized_clients
            self._others = clients - {security.public_key} or clients
            text = read_key_file(Path(config.control.authorized_clients_file))
            for key, *comment in filter(None, map(str.split, text.splitlines())):
                if comment and key in clients:
                    self._listed.setdefault(comment[0], key)

    def address_of(self, bootstrap_addr: str) -> EngineAddress:
        """Return the address of an engine's directory service, with its public key if keys are used.

        The key comes from the line of `control.authorized_clients_file` that has `bootstrap_addr` after its key. If
        there is no such line, it is the file's only key besides our own, or our own if all engines share one.

        Args:
            bootstrap_addr: `host:port`, as the router sends it.

        Raises:
            ConfigError: `bootstrap_addr` is not a host and a port.
            AuthenticationError: the file has several other keys, and none with this address.
        """
        address = bootstrap_address(bootstrap_addr)
        key = self._listed.get(bootstrap_addr)
        if key is None:
            if len(self._others) > 1:
                raise AuthenticationError(
                    "cannot tell which key is this prefill engine's: write its bootstrap address after its key in the"
                    " file that control.authorized_clients_file names",
                    address=bootstrap_addr,
                    keys=len(self._others),
                )
            (key,) = self._others
        return EngineAddress(EngineId(prefill_engine_id(address.port)), str(address), key)


def _address(host: str) -> str:
    """Resolve a host name, because ZMQ binds addresses only."""
    try:
        return host_address(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError("--host has no address", host=host, reason=str(error)) from error


def refuse_unsupported(facts: Mapping[str, object]) -> None:
    """Refuse a deployment whose caches kvconnector does not transfer, before anything is allocated.

    Args:
        facts: Values of SGLang's arguments by name. Supported values are False, None, 0, 1 and the empty string.

    Raises:
        ConfigError: an argument has another value. The error names all of these.
    """
    plain = ("None", "False", "0", "1", "")  # not by ==, for which True is 1
    found = {name: value for name, value in facts.items() if str(value) not in plain}
    if found:
        raise ConfigError("kvconnector does not transfer the caches of SGLang with", **found)
