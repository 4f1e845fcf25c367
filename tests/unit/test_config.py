import msgspec
import pytest

from kvconnector import config as config_module
from kvconnector.config import (
    CPU_CHUNK_BYTES,
    CUDA_CHUNK_BYTES,
    ConnectorConfig,
    ControlConfig,
    LeaseConfig,
    PeerConfig,
    UcxConfig,
    is_loopback,
)
from kvconnector.errors import ConfigError

KEYS = {"secret_key_file": "/keys/mine", "authorized_clients_file": "/keys/theirs"}
INSECURE = {"insecure": True}
EVERY_IPV4_INTERFACE = "0.0.0.0"  # noqa: S104  nothing is bound here


def settings(**changes):
    return {"engine_id": "e", "control": INSECURE} | changes


def config(**changes):
    return ConnectorConfig.from_mapping(settings(**changes))


REFUSED = [
    ({"staging": {"budget_bytes": 1 << 42}}, "staging.budget_bytes"),
    ({"leese": {}}, "unknown setting 'leese'; did you mean 'lease'"),
    ({"lease": {"duration": 1}}, r"unknown setting lease.duration; did you mean 'duration_s'"),
    ({"lease": {"xyzzy": 1}}, r"unknown setting lease.xyzzy$"),
    ({"lease": {5: 1}}, r"unknown setting lease.5"),
    ({5: 1}, r"unknown setting 5"),
    ({"engine_id": ""}, "engine_id"),
    ({"engine_id": "e" * 513}, "engine_id"),
    ({"engine_id": "\udcff"}, r"engine_id: not UTF-8"),
    ({"engine_id": None}, r"engine_id: expected `str`, got `null` \[got=None\]"),
    ({"role": "prod"}, r"role: expected one of producer, consumer, both \[got='prod'\]"),
    ({"verify": "md5"}, "verify: expected one of none, checksum"),
    ({"paths": {"direct": "no"}}, r"paths\.direct: expected one of auto, always, never"),
    ({"peer": {"timeout_s": 0}}, r"peer\.timeout_s: expected `float` > 0\.0 \[got=0\]"),
    ({"staging": {"window": 100}}, r"staging\.window: expected `int` <= 64 \[got=100\]"),
    ({"control": 5}, r"invalid setting control: expected `object`, got `int` \[got=5\]"),
    *(({"lease": section}, "lease") for section in (None, 5, "lease", [])),
    *(
        ({section: {**(INSECURE if section == "control" else {}), field: value}}, field)
        for section, field, *values in (
            ("lease", "duration_s", 0, -1, "soon", float("nan"), float("inf"), "Infinity"),
            ("lease", "early_read_s", True),
            ("peer", "hello_timeout_s", 0),
            ("peer", "transfer_timeout_s", None),
            ("staging", "budget_bytes", 1024, 65536.5),
            ("staging", "chunk_bytes", -1),
            ("staging", "max_programs", -2, 1 << 31),
            ("staging", "window", 0),
            ("control", "port", 65536, -1),
            ("control", "max_message_bytes", 100),
            ("ucx", "library", 1, ""),
            ("ucx", "tls", 3),
            # as Python reads variables with bytes that are not UTF-8
            ("peer", "timeout_s", "\udcff"),
            ("control", "secret_key_file", "\udcff", "\0"),
            ("ucx", "library", "\udcff", "\0"),
            ("ucx", "tcp_segment_bytes", -4096, 5000),
        )
        for value in values
    ),
    # more than a greeting can state
    (
        {"staging": {"chunk_bytes": 1 << 31, "budget_bytes": 1 << 33}},
        r"chunk_bytes: expected `int` <=",
    ),
    ({"engine_id": "a\nb"}, "engine_id: expected a text without control characters"),
    # the error names both of two contradicting settings
    ({"peer": {"timeout_s": 5.0}}, "timeout_s=.*heartbeat_interval_s="),
    ({"peer": {"idle_timeout_s": 15.0}}, "idle_timeout_s=.*timeout_s="),
    ({"lease": {"duration_s": 4}}, "duration_s=.*heartbeat_interval_s="),
    ({"peer": {"backoff_initial_s": 61}}, "backoff_initial_s=.*backoff_max_s="),
    (
        {"staging": {"budget_bytes": 1 << 20, "chunk_bytes": (1 << 19) + 1}},
        "budget_bytes=.*chunk_bytes=|chunk_bytes=.*budget_bytes=",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_wrong_settings_are_refused_by_name(number):
    changes, complaint = REFUSED[number]
    with pytest.raises(ConfigError, match=complaint):
        ConnectorConfig.from_mapping(settings() | changes)


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"engine_id": ""}, "engine_id"),
        ({"lease": LeaseConfig(duration_s=0)}, "lease"),
        ({"ucx": UcxConfig(tcp_segment_bytes=5000)}, "ucx"),
        (
            {"peer": PeerConfig(timeout_s=-3)},
            r"peer\.timeout_s: expected `float` > 0\.0 \[got=-3\]",
        ),
    ],
)
def test_constructors_check_their_values(wrong, complaint):
    """Plain constructors of msgspec structs do not. Errors name sections as those for a mapping do."""
    with pytest.raises(ConfigError, match=complaint):
        ConnectorConfig(**{"engine_id": "e", "control": ControlConfig(insecure=True)} | wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_hosts_may_be_insecure_if_set(host):
    assert is_loopback(host)
    assert config(control={"host": host, "insecure": True}).control.insecure
    with pytest.raises(ConfigError, match="insecure=true"):
        config(control={"host": host})


@pytest.mark.parametrize(
    "host", [EVERY_IPV4_INTERFACE, "::", "192.0.2.1", "host.example", "localhost.evil", ""]
)
@pytest.mark.parametrize("insecure", [True, False])
def test_other_hosts_need_keys_or_insecure_network(host, insecure):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="needs CURVE keys: make them with `kvconnector keygen`"):
        config(control={"host": host, "insecure": insecure})
    control = {"host": host, "insecure_network": True, "advertise_host": "host.example"}
    assert config(control=control).control.host == host


@pytest.mark.parametrize(
    "wildcard",
    [
        *(EVERY_IPV4_INTERFACE, "0", "0.0", "00.0", "0x0", "0X0.0.0.0", "*"),
        *("::", "[::]", "0:0::0", "::0.0.0.0", "::ffff:0.0.0.0", "[::FFFF:0:0]", "::%eth0"),
    ],
)
def test_peers_cannot_connect_to_a_wildcard(wildcard):
    with pytest.raises(ConfigError, match="not a wildcard"):
        config(control={"insecure": True, "advertise_host": wildcard})
    with pytest.raises(ConfigError, match=r"wildcard, control\.advertise_host must be"):
        config(control={"host": wildcard, "insecure_network": True})


@pytest.mark.parametrize(
    "host", ["10.0.0.0", "0.0.0.1", "::1", "::ffff:0.0.0.1", "0x1", "x0", "1::"]
)
def test_hosts_that_hold_zeros_are_no_wildcards(host):
    assert config(control={"host": host, "insecure_network": True}).control.host == host


@pytest.mark.parametrize("engine_id", ["e\n", "\re", "a\x00b", "a\x85b", "a\u2028b"])
def test_an_engines_name_has_no_control_characters(engine_id):
    with pytest.raises(ConfigError, match="engine_id"):
        ConnectorConfig.from_mapping(settings() | {"engine_id": engine_id})


@pytest.mark.parametrize(
    "listed", ["10.0.0.0/33", "10.0.0.1/8", "host:0", "host:65536", "[::1", "a b", "[g::]"]
)
def test_allowed_producers_that_are_none_are_refused(listed):
    with pytest.raises(ConfigError, match=r"control\.allowed_producers"):
        config(control={"insecure": True, "allowed_producers": f"host, {listed}"})


def test_curve_keys_come_in_pairs():
    assert (
        config(
            control=KEYS | {"host": EVERY_IPV4_INTERFACE, "advertise_host": "host.example"}
        ).control.host
        == EVERY_IPV4_INTERFACE
    )
    for name in KEYS:
        with pytest.raises(ConfigError, match="or neither"):
            config(control={name: "/keys/one"})
    with pytest.raises(ConfigError, match="cannot be combined"):
        config(control=KEYS | INSECURE)


def test_variables_override_the_mapping():
    environ = {
        "KVCONNECTOR_ENGINE_ID": "from-env",
        "KVCONNECTOR_LEASE_DURATION_S": "60",
        "KVCONNECTOR_CONTROL_INSECURE": "true",
        "KVCONNECTOR_STAGING_MAX_PROGRAMS": "8",
        "PATH": "/bin",
    }
    base = {"engine_id": "from-base", "lease": {"duration_s": 40, "early_read_s": 2}}
    made = ConnectorConfig.from_env(environ, base)
    assert made.engine_id == "from-env"
    assert made.lease == LeaseConfig(duration_s=60.0, early_read_s=2.0)
    assert made.control.insecure
    assert made.staging.max_programs == 8
    assert base == {"engine_id": "from-base", "lease": {"duration_s": 40, "early_read_s": 2}}


def test_every_setting_has_a_variable():
    made = config()
    environ = {}
    for field in msgspec.structs.fields(ConnectorConfig):
        value = getattr(made, field.name)
        if isinstance(value, msgspec.Struct):
            for name, inner in msgspec.structs.asdict(value).items():
                environ[f"KVCONNECTOR_{field.name}_{name}".upper()] = str(inner)
        else:
            environ[f"KVCONNECTOR_{field.name}".upper()] = value
    assert ConnectorConfig.from_env(environ) == made


@pytest.mark.parametrize(
    "variable,nearest",
    [
        ("KVCONNECTOR_LEASE_DURATION", "KVCONNECTOR_LEASE_DURATION_S"),
        ("KVCONNECTOR_ENGINE_NAME", "KVCONNECTOR_ENGINE_ID"),
        ("KVCONNECTOR_UCX_LIBRARYS", "KVCONNECTOR_UCX_LIBRARY"),
        ("KVCONNECTOR_UCX", "KVCONNECTOR_UCX_TLS"),
        ("KVCONNECTOR_ucx_library", "KVCONNECTOR_UCX_LIBRARY"),
    ],
)
def test_unknown_variables_are_refused_with_a_suggestion(variable, nearest):
    with pytest.raises(ConfigError, match=f"{variable}; did you mean '{nearest}'"):
        ConnectorConfig.from_env({variable: "1"}, settings())


SERVICES = {  # what Kubernetes sets for the Services kvconnector, kvconnector-control and kvconnector-p0
    "KVCONNECTOR_SERVICE_HOST": "10.96.3.7",
    "KVCONNECTOR_SERVICE_PORT": "8000",
    "KVCONNECTOR_SERVICE_PORT_HTTP": "8000",
    "KVCONNECTOR_PORT": "tcp://10.96.3.7:8000",
    "KVCONNECTOR_PORT_8000_TCP": "tcp://10.96.3.7:8000",
    "KVCONNECTOR_PORT_8000_TCP_PROTO": "tcp",
    "KVCONNECTOR_PORT_8000_TCP_PORT": "8000",
    "KVCONNECTOR_PORT_8000_TCP_ADDR": "10.96.3.7",
    "KVCONNECTOR_CONTROL_SERVICE_HOST": "10.96.3.8",
    "KVCONNECTOR_CONTROL_PORT": "udp://10.96.3.8:45680",
    "KVCONNECTOR_CONTROL_PORT_45680_UDP_ADDR": "10.96.3.8",
    "KVCONNECTOR_P0_SERVICE_PORT": "45680",
    "KVCONNECTOR_P0_PORT": "tcp://10.96.3.9:45680",
}


def test_variables_of_kubernetes_services_are_ignored_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(config_module, "_warned", [])
    meant = {"KVCONNECTOR_LEASE_DURATION_S": "60", "PATH": "/bin"}
    for _ in range(2):
        made = ConnectorConfig.from_env({**SERVICES, **meant}, settings())
        assert made == config(lease={"duration_s": 60})
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in SERVICES)
    assert "enableServiceLinks" in record.getMessage()


def test_a_number_or_a_wrong_value_of_a_port_is_still_a_setting():
    """A Service named kvconnector-control has the variable of `control.port`."""
    made = ConnectorConfig.from_env({"KVCONNECTOR_CONTROL_PORT": "45680"}, settings())
    assert made.control.port == 45680
    for value in ("http://x:1", "tcp:/x", ""):
        with pytest.raises(ConfigError, match=r"control\.port"):
            ConnectorConfig.from_env({"KVCONNECTOR_CONTROL_PORT": value}, settings())
    with pytest.raises(ConfigError, match="unknown environment variable KVCONNECTOR_SERVICEHOST"):
        ConnectorConfig.from_env({"KVCONNECTOR_SERVICEHOST": "x"}, settings())


def test_the_default_chunk_holds_the_largest_row_and_a_chosen_one_is_kept():
    assert config().chunk_bytes("cpu", 100) == CPU_CHUNK_BYTES
    row = CPU_CHUNK_BYTES + 1
    assert row <= config().chunk_bytes("cpu", row) < row + (64 << 10)
    assert config(staging={"chunk_bytes": 123456}).chunk_bytes("cpu", row) == 123456
    assert config(staging={"budget_bytes": 1 << 20}).chunk_bytes("cpu", row) == 1 << 19


def test_chunk_bytes_depend_on_device_and_budget():
    assert config().chunk_bytes("cpu") == CPU_CHUNK_BYTES
    assert config().chunk_bytes("cuda:3") == CUDA_CHUNK_BYTES
    chosen = config(staging={"chunk_bytes": 123456})
    assert chosen.chunk_bytes("cpu") == chosen.chunk_bytes("cuda:0") == 123456
    small = config(staging={"budget_bytes": 1 << 20})
    assert small.chunk_bytes("cpu") == small.chunk_bytes("cuda") == 1 << 19
    assert config(peer={"timeout_s": 5.5}).peer == PeerConfig(timeout_s=5.5)
