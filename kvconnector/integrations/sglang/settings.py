"""kvconnector's settings from SGLang's arguments, and the deployments that are refused at start."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from kvconnector.allowed_producers import AllowedProducers
from kvconnector.config import ENV_PREFIX, ConnectorConfig, is_loopback
from kvconnector.control.address import HostPort
from kvconnector.control.lookup import host_address
from kvconnector.control.security import read_key_file
from kvconnector.errors import AuthenticationError, ConfigError, ProducerNotAllowedError
from kvconnector.ids import EngineAddress, EngineId
from kvconnector.integrations.sglang.fields import bootstrap_address, named_engine
from kvconnector.integrations.sglang.registry import Found
from kvconnector.runtime.channels import security_of

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - named to be replaced by an address
WAITING = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
"""SGLang's limit for requests that wait for the other engine, in seconds."""
MAX_WAIT_S = 1e6
KEY_FILES = ("CONTROL_SECRET_KEY_FILE", "CONTROL_AUTHORIZED_CLIENTS_FILE")


def prefill_engine_id(bootstrap_port: int, dp_rank: int = 0, dp_size: int = 1) -> str:
    """Return a prefill engine's id, which a decode engine can derive: it knows the host and the port, and which
    data-parallel rank has a request. Each of these is an engine.
    """
    return f"sglang-prefill-{bootstrap_port}{_suffix(dp_rank, dp_size)}"


def _suffix(dp_rank: int, dp_size: int) -> str:
    return f"-dp{dp_rank}" if dp_size > 1 else ""


def connector_config(
    *,
    is_prefill: bool,
    host: str,
    bootstrap_port: int,
    unique_name: str,
    own_address: str,
    environ: Mapping[str, str],
    dp_rank: int = 0,
    dp_size: int = 1,
    num_nodes: int = 1,
) -> ConnectorConfig:
    """Return one engine's settings: those that SGLang's arguments imply, overridden by `KVCONNECTOR_*` variables.

    Args:
        is_prefill: True for a prefill engine, False for a decode engine.
        host: SGLang's `--host`. The control channel binds its address unless `control.host` names another.
        bootstrap_port: SGLang's `--disaggregation-bootstrap-port`, from which a prefill engine's id follows.
        unique_name: The id of a decode server, the same in all of its ranks.
        own_address: This node's address: to advertise to peers if the bound one is a wildcard, and to bind if the
            server has several nodes.
        environ: Environment variables.
        dp_rank: The engine's data-parallel rank in its server, of attention or of whole replicas.
        dp_size: How many there are.
        num_nodes: Hosts of the server.

    Raises:
        ConfigError: a setting is malformed or contradicts SGLang's arguments, `host` has no address, or one of several
            nodes has none that the others can reach.
    """
    bound = environ.get(f"{ENV_PREFIX}CONTROL_HOST") or _address(host)
    if num_nodes > 1 and bound not in WILDCARDS and f"{ENV_PREFIX}CONTROL_HOST" not in environ:
        if is_loopback(bound):
            raise ConfigError(
                "an engine on several nodes cannot be reached at --host: use --host 0.0.0.0",
                host=host,
                nodes=num_nodes,
            )
        bound = own_address  # --host is an address of the first node
    control: dict[str, Any] = {"host": bound}
    if bound in WILDCARDS:
        control["advertise_host"] = own_address
    variable = "CONTROL_ADVERTISE_HOST" if bound in WILDCARDS else "CONTROL_HOST"
    is_named = environ.get(f"{ENV_PREFIX}{variable}")
    if num_nodes > 1 and not is_named and is_loopback(own_address):
        raise ConfigError(
            "an engine on several nodes needs an address of each node, and SGLang found none here: set"
            " SGLANG_HOST_IP",
            host=host,
            found=own_address,
            nodes=num_nodes,
        )
    has_keys = any(environ.get(ENV_PREFIX + name) for name in KEY_FILES)
    if is_loopback(bound) and not has_keys:
        control["insecure"] = True
    name = unique_name + _suffix(dp_rank, dp_size)
    if is_prefill:
        name = prefill_engine_id(bootstrap_port, dp_rank, dp_size)
    role = "producer" if is_prefill else "consumer"
    base = {"engine_id": name, "role": role, "control": control, **_patience(environ)}
    config = ConnectorConfig.from_env(environ, base)
    implied: dict[str, object] = {"role": role}
    if is_prefill:
        implied |= {"engine_id": name}
    for setting, value in implied.items():
        found = attrgetter(setting)(config)
        if found != value:
            raise ConfigError(
                f"{setting} follows from SGLang's arguments: remove the variable that sets it",
                found=found,
                implied=value,
            )
    return config


def _patience(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the deadlines that SGLang's own variable for waiting requests implies."""
    text = environ.get(WAITING)
    if text is None:
        return {}
    try:
        seconds = min(max(float(text), 1.0), MAX_WAIT_S)
    except ValueError as error:
        raise ConfigError(f"{WAITING} is a number of seconds", found=text) from error
    return {"peer": {"progress_timeout_s": seconds}, "lease": {"early_follow_s": seconds}}


class PrefillEngines:
    """The addresses of prefill engines' directory services, and their public keys, from key files that are read once.

    Args:
        config: This engine's settings.

    Raises:
        ConfigError: a key file cannot be read, or is malformed.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self._allowed = AllowedProducers(config.control.allowed_producers)
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

    def registry_of(self, bootstrap_addr: str) -> HostPort:
        """Return where the registry of a prefill server is.

        Raises:
            ConfigError: `bootstrap_addr` is not a host and a port.
            ProducerNotAllowedError: `control.allowed_producers` does not list it.
        """
        address = bootstrap_address(bootstrap_addr)
        if not self._allowed.allows(address.host, address.port):
            raise ProducerNotAllowedError(
                "control.allowed_producers does not list the prefill engine that a request names",
                address=bootstrap_addr,
            )
        return address

    def address_of(self, bootstrap_addr: str, found: Found) -> EngineAddress:
        """Return the address of an engine's directory service, with its public key if keys are used.

        The key comes from the line of `control.authorized_clients_file` that has `bootstrap_addr` after its key. If
        there is no such line, it is the file's only key besides our own, or our own if all engines share one.

        Args:
            bootstrap_addr: `host:port`, as the router sends it.
            found: What the registry there says. It authenticates nobody: it says where to connect, but not to whom.

        Raises:
            ConfigError: `bootstrap_addr` is not a host and a port.
            AuthenticationError: the file has several other keys, and none with this address.
        """
        address = bootstrap_address(bootstrap_addr)
        name = prefill_engine_id(address.port, found.dp_rank, found.dp_size)
        return EngineAddress(EngineId(name), found.directory, self._key_of(bootstrap_addr))

    def named_by(self, bootstrap_addr: str) -> EngineAddress:
        """Return the address of an engine that a router names itself, as `ENGINE@host:port` of its directory service.

        Raises:
            ConfigError: this is no host and port.
            ProducerNotAllowedError: as `registry_of`.
            AuthenticationError: as `address_of`.
        """
        where = self.registry_of(bootstrap_addr)
        name = named_engine(bootstrap_addr)
        key = self._key_of(bootstrap_addr.removeprefix(f"{name}@"))
        return EngineAddress(EngineId(name), str(where), key)

    def _key_of(self, bootstrap_addr: str) -> str:
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
        return key


def _address(host: str) -> str:
    """Resolve a host name, because ZMQ binds addresses only."""
    try:
        return host_address(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError("--host has no address", host=host, reason=str(error)) from error


def cache_facts(
    *,
    is_prefill: bool,
    states: Sequence[object],
    page_size: int,
    has_host_cache: bool,
    has_radix_cache: bool,
    early_send: Callable[..., object] | None,
) -> dict[str, object]:
    """Return the facts for `refuse_unsupported` about caches that outlive a request: a prefix cache in the decode
    engine, and one in host memory.

    Args:
        is_prefill: True for a prefill engine, False for a decode engine.
        states: SGLang's kinds of states of the rank: "swa" for sliding windows, "mamba" for recurrent states.
        page_size: Tokens in a page.
        has_host_cache: `--enable-hierarchical-cache` is on.
        has_radix_cache: `--disaggregation-decode-enable-radix-cache` is on.
        early_send: SGLang's method that publishes a cached prefix before the step; None if that is switched off.
    """
    # one that asks whether host memory is still being copied to the prefix takes one argument more
    is_early = early_send is not None and (
        "allow_send" not in inspect.signature(early_send).parameters
    )
    return {
        # the prefix cache may keep slots of a window before the first token that was transferred, and nothing shows
        # that no later prompt attends to them. With longer pages SGLang has each prompt's whole window transferred
        "disaggregation_decode_enable_radix_cache with sliding windows in pages of one token": (
            has_radix_cache and "swa" in states and page_size == 1
        ),
        # a prefix that another request of the same step loads from host memory is published while the copy runs
        "enable_hierarchical_cache before SGLang 0.5.23, unless SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0": (
            is_prefill and has_host_cache and is_early
        ),
        # SGLang copies the state at the cached prefix's end into the slot that a load writes to, maybe after the load
        "enable_hierarchical_cache with disaggregation_decode_enable_radix_cache and recurrent states": (
            not is_prefill and has_host_cache and has_radix_cache and "mamba" in states
        ),
    }


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
