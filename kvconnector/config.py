"""All settings, and the only place that has defaults.

Settings come from a mapping (`from_mapping`, e.g. vLLM's `kv_connector_extra_config`) or from the environment
(`from_env`): `KVCONNECTOR_<FIELD>` for the top level, `KVCONNECTOR_<SECTION>_<FIELD>` for a section, as in
`KVCONNECTOR_LEASE_DURATION_S=60`.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from kvconnector.allowed_producers import AllowedProducers
from kvconnector.errors import ConfigError
from kvconnector.ids import MAX_PORT, Id

logger = logging.getLogger(__name__)
Role = Literal["producer", "consumer", "both"]
# The upper bound refuses infinity: every wait ends.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Port = Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)]
KIB = 1 << 10
MIB = 1 << 20
# UCX's default segments of 8 KiB cost a system call each, and a copy on the sending side that longer segments avoid.
TCP_SEGMENT_BYTES = 512 * KIB
TcpSegment = Annotated[int, msgspec.Meta(ge=0, le=16 * MIB, multiple_of=4 * KIB)]

ENV_PREFIX = "KVCONNECTOR_"


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The control channel: ZMQ, and UCX between workers that have greeted each other."""

    host: str = "127.0.0.1"
    """IP address, or localhost, that this process binds."""
    advertise_host: str = ""
    """Host that peers connect to; empty means `host`. Required if `host` is a wildcard."""
    port: Port = 0
    """Port of the scheduler's directory service; 0 picks a free one."""
    insecure: bool = False
    """Run without CURVE keys. Accepted only for loopback addresses."""
    insecure_network: bool = False
    """Run without CURVE keys on any address: anybody who reaches this engine's ports can read and forge its messages.
    Use it only on a network that nobody else can reach.
    """
    secret_key_file: str = ""
    """File with this engine's CURVE secret key, as `kvconnector keygen` writes it."""
    authorized_clients_file: str = ""
    """File with the public keys of the engines that this one talks to, one per line."""
    allowed_producers: str = ""
    """The producers that requests may name, separated by commas: networks (`10.2.0.0/16`), hosts, or hosts with the
    port of the directory service (`10.2.0.7:5557`, `*.prefill.svc:5557`). A request that names another one is refused
    before anything connects. Empty allows all. The workers that a listed producer names are trusted with it.
    """
    max_message_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=1 << 30)] = 16 * MIB
    """Longest control message accepted or sent."""
    over_ucx: bool = True
    """Once two workers have greeted each other, send their messages over UCX if both have this set."""


class LeaseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a producer keeps a finished request's blocks for its consumer."""

    duration_s: Positive = 30.0
    """The lease ends this long after it was granted or last renewed by a heartbeat."""
    early_read_s: Positive = 5.0
    """How long a read may wait for its lease: a router can be faster than the producer's next engine step."""
    early_follow_s: Positive = 120.0
    """How long a consumer may wait for a prompt that this engine has not received yet: a router asks both engines at
    once, and the request may still be queued in front of this engine. After that the consumer is refused.
    """
    reclaim_above: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """While more than this share of a cache group's blocks is held for consumers, the producer withdraws the oldest
    requests that no consumer has asked for within `peer.heartbeat_interval_s`. Consumers that ask later get
    `OfferReclaimedError`. The default of 1 means never, because only the operator knows how late a router asks decode
    engines.
    """


class PeerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Liveness of peers. Each wait for a peer is bounded by one of these."""

    hello_timeout_s: Positive = 10.0
    """Time limit from the first connection attempt to a usable session; three times as long for an engine that this one
    has never met.
    """
    max_unknown_engines: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64
    """How many engines that it has never met a consumer rank greets at once; others wait for their turn. Requests may
    name any number of addresses, and each takes a few descriptors until it has answered or timed out.
    """
    heartbeat_interval_s: Positive = 5.0
    """A consumer sends heartbeats this often to every producer rank that it waits for or reads from."""
    timeout_s: Positive = 15.0
    """A peer that has sent nothing for this long counts as lost, and so does a host that does not answer a greeting."""
    idle_timeout_s: Positive = 300.0
    """A consumer disconnects from a producer engine after this long without a request; the next one greets it again."""
    transfer_timeout_s: Positive = 60.0
    """A read that makes no progress for this long fails."""
    progress_timeout_s: Positive = 600.0
    """A load that reads a prompt while it is being computed fails after this long without a new token; the time in the
    producer's queue counts too.
    """
    backoff_initial_s: Positive = 1.0
    """Pause before the first attempt to reach a lost peer again; each further pause is twice as long."""
    backoff_max_s: Positive = 60.0
    """Longest pause between such attempts."""


class StagingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Staging memory of a worker, bounded by `budget_bytes` however large the requests are."""

    budget_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=1 << 40)] = 256 * MIB
    """Total size of all send and receive slots of one worker."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    """Size of one slot, and of the longest message; 0 means `CPU_CHUNK_BYTES` (2 MiB) or `CUDA_CHUNK_BYTES` (40 MiB),
    or the size of the caches' largest row if that is more.
    """
    window: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Chunks in flight for one read from one rank."""
    max_programs: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    """Upper limit on the programs (thread blocks) of a copy kernel, which leaves multiprocessors to the model; 0: no
    limit, -1: half of the GPU's multiprocessors.
    """
    spin_s: Annotated[float, msgspec.Meta(ge=-1, le=1)] = -1.0
    """How long the driver's thread, and an engine's thread in `wait`, spin without the GIL after the last event before
    they sleep; a negative value means `CPU_SPIN_S` (50 us) or `CUDA_SPIN_S` (5 ms).
    """


class PathsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How blocks may reach the consumer. Packed messages always work."""

    direct: Literal["auto", "always", "never"] = "auto"
    """`auto`: a consumer reads the producer's pools itself wherever it can, which requires both to be on one host.
    `always`: the same, with a warning where it cannot. `never`: it never does, and this worker does not share its pools
    either.
    """
    shared_folder: str = ""
    """A folder that engines in other containers of this node also mount, such as a volume of both pods, so that
    consumers there can read caches directly. Set it in both engines to the path of the mount; both must run as the same
    user.
    """
    copy_threads: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Most threads that copy one direct read of 4 MiB or more between caches in CPU memory; only idle cores are used.
    0: half of the cores that the worker may use, at most 4.
    """


class UcxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The UCX library: which one is used, and how."""

    library: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    """The libucp to use: `wheel` (the libucx package), `nixl` (the one in NIXL's wheel, with InfiniBand), or a path,
    such as that of the system's `libucp.so.0`. `auto`: the one already loaded, else `nixl` if it is installed and can
    use an active RDMA port, else `wheel`.
    """
    tls: str = ""
    """UCX_TLS for this worker's context; empty leaves the choice to UCX and its environment variables."""
    net_devices: str = ""
    """UCX_NET_DEVICES for this worker's context: names such as `eth0` or `mlx5_0:1`, separated by commas. Empty leaves
    the choice to UCX, which takes the ports nearest to a message's memory.
    """
    require_rdma: bool = False
    """Refuse peers on other hosts that UCX does not reach over RDMA. By default a host with active RDMA ports only logs
    a warning.
    """
    tcp_segment_bytes: TcpSegment = TCP_SEGMENT_BYTES
    """Bytes that UCX's TCP transport passes to a socket at once (UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE); 0 leaves
    both to UCX. Engines that read from each other need the same value.
    """


# CPU: slots are small enough to stay in the last-level cache between pack, socket and unpack. GPU: they are
# large enough that a launch and a rendezvous take little time compared with the copy.
CPU_CHUNK_BYTES = 2 * MIB
CUDA_CHUNK_BYTES = 40 * MIB
# Waking a thread took 0.2 ms on a GPU host, longer than a small transfer; on hosts without a GPU, cores are scarce.
CPU_SPIN_S = 50e-6
CUDA_SPIN_S = 5e-3


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one engine. Every rank of an engine and its scheduler get the same settings."""

    engine_id: Id
    """This engine's name, by which peers address it. Unique among the engines that talk to each other."""
    role: Role = "both"
    """`producer`: offers blocks. `consumer`: loads them. `both`: does both."""
    stream: bool = True
    """Move a prompt's cache while the producer is still computing it, if a router asks both engines at once. If this is
    off at the consumer, it loads the cache when the producer is done. If it is off at the producer, the router asks one
    engine after the other.
    """
    control: ControlConfig = ControlConfig()
    lease: LeaseConfig = LeaseConfig()
    peer: PeerConfig = PeerConfig()
    staging: StagingConfig = StagingConfig()
    paths: PathsConfig = PathsConfig()
    ucx: UcxConfig = UcxConfig()
    slow_load_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 5.0
    """If a load makes its blocks wait for longer than this, the log says what it waited for; 0 turns this off."""
    stuck_after_s: Positive = 60.0
    """If a call, such as one of the CUDA driver, has not returned to the worker for this long, the worker transfers
    nothing more: requests that have no blocks yet fail, and so do new ones. Requests that have blocks end once the call
    has returned.
    """
    verify: Literal["none", "checksum"] = "none"
    """`checksum`: producers send an XXH3 digest after each chunk, and consumers check it before they unpack. All reads
    are then packed, and chunks on GPUs are copied to the host to be hashed, which is slow: use it to find out what
    damages bytes. Engines that read from each other need the same value. Needs the extra `checksum`.
    """
    convert: Literal["auto", "never"] = "auto"
    """`auto`: if the two engines' caches have different types or scales, as with bf16 and fp8, elements are converted
    on the way. `never`: such engines refuse each other.
    """
    engine_versions: Literal["known", "checked", "any"] = "checked"
    """Which releases of vLLM and SGLang may run. `known`: only those that were tested. `checked`: others too, with a
    warning, if a check at startup finds that their sources have everything that kvconnector uses. `any`: all. This is
    read before all other settings, so set it by the environment variable `KVCONNECTOR_ENGINE_VERSIONS`.
    """

    def __post_init__(self) -> None:
        self._check_values()
        peer = self.peer
        for name, value, other in (
            ("peer.timeout_s", peer.timeout_s, "heartbeat_interval_s"),
            ("peer.idle_timeout_s", peer.idle_timeout_s, "timeout_s"),
            ("lease.duration_s", self.lease.duration_s, "heartbeat_interval_s"),
        ):
            bound = getattr(peer, other)
            if value <= bound:
                context = {name.partition(".")[2]: value, other: bound}
                raise ConfigError(f"{name} must be longer than peer.{other}", **context)
        if peer.backoff_initial_s > peer.backoff_max_s:
            raise ConfigError(
                "peer.backoff_initial_s must not exceed peer.backoff_max_s", peer=peer
            )
        if self.staging.chunk_bytes > self.staging.budget_bytes // 2:
            raise ConfigError(
                "staging.budget_bytes must hold at least one send and one receive slot",
                chunk_bytes=self.staging.chunk_bytes,
                budget_bytes=self.staging.budget_bytes,
            )
        self._check_security()
        self._check_addresses()

    def _check_values(self) -> None:
        """Check types and ranges, since struct constructors check neither."""
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, msgspec.Struct):
                value = msgspec.structs.asdict(value)
            elif field.name in SECTIONS:
                raise ConfigError(
                    f"{field.name} must be a {SECTIONS[field.name].__name__}", got=value
                )
            _check_texts({field.name: value})
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise _worded(error, {field.name: value}, field.name) from error

    def _check_addresses(self) -> None:
        control = self.control
        AllowedProducers(control.allowed_producers)
        if is_wildcard(control.advertise_host):
            raise ConfigError(
                "control.advertise_host must be the host that peers connect to, not a wildcard",
                advertise_host=control.advertise_host,
            )
        if is_wildcard(control.host) and not control.advertise_host:
            raise ConfigError(
                "if control.host is a wildcard, control.advertise_host must be the host that peers connect to",
                host=control.host,
            )

    def _check_security(self) -> None:
        control = self.control
        keys = (control.secret_key_file, control.authorized_clients_file)
        if (control.insecure or control.insecure_network) and any(keys):
            raise ConfigError("control.insecure cannot be combined with CURVE key files")
        if any(keys) and not all(keys):
            raise ConfigError(
                "set both control.secret_key_file and control.authorized_clients_file, or neither",
                keys=keys,
            )
        if any(keys) or control.insecure_network:
            return
        if not is_loopback(control.host):
            raise ConfigError(
                "a control channel on an address other than loopback needs CURVE keys: make them with"
                " `kvconnector keygen` and set control.secret_key_file and control.authorized_clients_file",
                host=control.host,
            )
        if not control.insecure:
            raise ConfigError(
                "set control.insecure=true for use on one host, or set the CURVE key files",
                host=control.host,
            )

    def chunk_bytes(self, device: str, largest_row_bytes: int = 0) -> int:
        """Return the size of a staging slot, within the staging budget.

        Args:
            device: Where the caches are, "cpu" or "cuda:N".
            largest_row_bytes: The largest number of bytes that any part has for one token or one state, which is
                several MiB for some recurrent states. The default size holds them.

        Returns:
            The size in bytes.
        """
        default = CUDA_CHUNK_BYTES if device.startswith("cuda") else CPU_CHUNK_BYTES
        default = max(default, -(-largest_row_bytes // (64 * KIB)) * 64 * KIB)
        return min(self.staging.chunk_bytes or default, self.staging.budget_bytes // 2)

    def spin_s(self, device: str) -> float:
        """Return how long to spin before sleeping.

        Args:
            device: Where the caches are, "cpu" or "cuda:N".

        Returns:
            The time in seconds.
        """
        if self.staging.spin_s >= 0.0:
            return self.staging.spin_s
        return CUDA_SPIN_S if device.startswith("cuda") else CPU_SPIN_S

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> ConnectorConfig:
        """Make settings from nested mappings, such as parsed JSON or YAML.

        Args:
            settings: Values by name; those of a section in a mapping, as in `{"lease": {"duration_s": 60}}`.

        Returns:
            The settings, with defaults for what is not given.

        Raises:
            ConfigError: an unknown name (with the nearest known one), a wrong type, or a value out of range.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError("settings must be a mapping", got=type(settings).__name__)
        _refuse_unknown_names(settings)
        _check_texts(settings)
        try:
            # strict=False lets "30" from the environment or a command line be a number
            return msgspec.convert(dict(settings), cls, strict=False)
        except msgspec.ValidationError as error:
            raise _worded(error, settings) from error

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str], base: Mapping[str, Any] | None = None
    ) -> ConnectorConfig:
        """Make settings from environment variables, over those of a mapping.

        Args:
            environ: Variables by name, such as `os.environ`. Those that do not begin with `KVCONNECTOR_` are ignored.
            base: Settings as `from_mapping` takes them, which variables override.

        Returns:
            The settings, with defaults for what neither gives.

        Raises:
            ConfigError: as `from_mapping`; also for a `KVCONNECTOR_` variable that names no setting.
        """
        settings: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in (base or {}).items()
        }
        for variable, value in variables_of(environ).items():
            if variable not in VARIABLES:
                nearest = _nearest(variable.upper(), VARIABLES)
                raise ConfigError(f"unknown environment variable {variable}{nearest}")
            section, field = VARIABLES[variable]
            if not section:
                settings[field] = value
            elif isinstance(settings.setdefault(section, {}), dict):
                settings[section][field] = value
            # else: `from_mapping` refuses a section that is no mapping
        return cls.from_mapping(settings)


def checked_config(config: object) -> ConnectorConfig:
    """Return `config`. Raises ConfigError: it is something else, such as a mapping."""
    if not isinstance(config, ConnectorConfig):
        raise ConfigError(
            "config must be a Config: Config.from_mapping makes one from a mapping",
            got=type(config).__name__,
        )
    return config


SECTIONS: dict[str, type[msgspec.Struct]] = {
    field.name: type(field.default)
    for field in msgspec.structs.fields(ConnectorConfig)
    if isinstance(field.default, msgspec.Struct)
}


_ZEROS = re.compile(r"(?:0x)?0+(?:\.(?:0x)?0+){0,3}", re.IGNORECASE)
_MAPPED_IPV4 = 0xFFFF << 32
"""IPv4's 0.0.0.0 as an address of IPv6."""


def is_wildcard(host: str) -> bool:
    """Returns True if `host` stands for every interface, in any spelling that the system or libzmq takes: `*`,
    `0.0.0.0`, `0`, `0x0`, `::`, `[0:0::]`, `::ffff:0.0.0.0`, `::%eth0`.
    """
    address = host.strip("[]").partition("%")[0]
    try:
        number = int(ipaddress.IPv6Address(address))
    except ValueError:
        return address == "*" or _ZEROS.fullmatch(address) is not None
    return number in (0, _MAPPED_IPV4)


def is_loopback(host: str) -> bool:
    """Returns True if `host` names this machine's loopback interface. No resolver is asked."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


VARIABLES = {
    ENV_PREFIX + f"{section}_{field}".lstrip("_").upper(): (section, field)
    for section, struct in (SECTIONS | {"": ConnectorConfig}).items()
    for field in struct.__struct_fields__
    if field not in SECTIONS
}
"""Section (empty at the top level) and field that each environment variable sets."""


_SERVICE_LINKS = re.compile(
    r"_SERVICE_HOST|_SERVICE_PORT(?:_\w+)?|_PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+")


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that are meant for us.

    Kubernetes tells each container of the Services of its namespace by variables with their names. For Services named
    `kvconnector` and `kvconnector-...` these look like ours; they are left out, with one warning.
    """
    found, links = {}, []
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX.rstrip("_")).upper()
        is_address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value)
        is_link = is_address or any(
            _SERVICE_LINKS.fullmatch(name[at:]) for at in range(len(name)) if name[at] == "_"
        )
        if is_link and not (variable in VARIABLES and not is_address):
            links.append(variable)
        else:
            found[variable] = value
    if links and not _warned:
        _warned.append(True)
        logger.warning(
            "Kubernetes' variables of Services whose names begin with kvconnector are not settings and are"
            " ignored: %s"
            " (enableServiceLinks: false in the pod's spec leaves them out)",
            ", ".join(sorted(links)),
        )
    return found


_warned: list[bool] = []
"""Not empty once a process has warned of such variables."""


def _refuse_unknown_names(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        fields = ConnectorConfig.__struct_fields__
        if name not in fields:
            raise ConfigError(f"unknown setting {name!r}{_nearest(name, fields)}")
        if name in SECTIONS and isinstance(value, Mapping):
            for field in value:
                known = SECTIONS[name].__struct_fields__
                if field not in known:
                    raise ConfigError(f"unknown setting {name}.{field}{_nearest(field, known)}")


def _check_texts(settings: Mapping[str, Any], at: str = "") -> None:
    """Raise ConfigError: a text that no message and no file name can carry. A variable may have any bytes."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_texts(value, f"{name}.")
        elif isinstance(value, str) and (
            "\0" in value or value.encode(errors="ignore").decode() != value
        ):
            raise ConfigError(
                f"invalid setting {at}{name}: not UTF-8, or with a zero byte", got=value
            )


def _worded(
    error: msgspec.ValidationError, settings: Mapping[str, Any], at: str = ""
) -> ConfigError:
    """Return msgspec's error with the setting's whole name, what was given, and for a choice what it may be."""
    text, _, path = str(error).partition(" - at `$")
    names = [name for name in f"{at}{path.rstrip('`')}".split(".") if name]
    if not names:
        return ConfigError(f"invalid setting: {text[:1].lower()}{text[1:]}")
    value: Any = settings
    kind: Any = ConnectorConfig
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        kind = fields.get(name)
    if get_origin(kind) is Literal:
        text = f"expected one of {', '.join(map(str, get_args(kind)))}"
    elif "matching regex" in text:  # that of `Id`, the only one
        text = "expected a text without control characters"
    return ConfigError(
        f"invalid setting {'.'.join(names)}: {text[:1].lower()}{text[1:]}", got=value
    )


def _nearest(name: object, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
