"""Measuring between hosts, and between the ranks of a torchrun job, as an engineer on a new cluster does."""

import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest

from kvconnector.bench import engine_process, server, transfer
from kvconnector.bench.deployment import Deployment
from kvconnector.bench.options import BenchOptions
from kvconnector.bench.results import Measurement
from kvconnector.cli import main
from kvconnector.errors import ConfigError
from tests.hosts.network import Network, missing
from tests.support.forked import environment
from tests.support.keys import keyed_controls

SIZE = "--model llama-3.1-8b,layers=1 --tokens 64 --iterations 2 --json"
BENCH = [sys.executable, "-m", "kvconnector", "bench"]


@pytest.fixture
def bench(capsys):
    """Runs `kvconnector bench` in this process: (exit status, stdout, stderr)."""

    def run(line):
        status = main(["bench", *line.split()])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def _keys(folder, *names):
    """Make a key pair for each name, all trusting each other. Returns their settings."""
    _, controls = keyed_controls(folder, **dict.fromkeys(names, names))
    return [
        {f"KVCONNECTOR_CONTROL_{key}".upper(): value for key, value in controls[name].items()}
        for name in names
    ]


@contextmanager
def _serving(settings=None, host=None):
    """Run a `bench serve`, on a host or here. Yields the address to pass to --connect."""
    command = [*BENCH, "serve"]
    server = subprocess.Popen(
        host.command(command) if host else command,
        stderr=subprocess.PIPE,
        env={**environment(), **(settings or {})},
        text=True,
    )
    try:
        yield server.stderr.readline().rpartition(" ")[2].strip()
    finally:
        if host:
            host.close()
        server.terminate()
        server.communicate()


@pytest.mark.parametrize("with_keys", [False, True], ids=["loopback", "keys"])
@pytest.mark.ucx
@pytest.mark.integration
def test_a_server_is_measured_from_another_host_beside_a_raw_socket(
    bench, monkeypatch, tmp_path, with_keys
):
    theirs, ours = _keys(tmp_path, "p", "d") if with_keys else ({}, {})
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    with _serving(theirs) as address:
        cut = "--prefill tp=2,layout=HND --decode block=64" if with_keys else ""
        status, out, err = bench(f"transfer --connect {address} --tls tcp {cut} {SIZE}")
        assert status == 0, err
        for case in json.loads(out)["cases"]:
            assert [each["kind"] for each in case["measurements"]] == ["ours", "limit"]
            assert any("path: packed" in note for note in case["notes"])
            assert any("over tcp/" in note for note in case["notes"])
            (limit,) = [note for note in case["notes"] if "ucx_perftest" in note]
            assert "before and after" in limit
            assert "GB/s; kvconnector reaches" in limit


def test_a_client_sets_no_variables_of_a_server_but_those_for_tuning(monkeypatch):
    monkeypatch.setattr(server, "Child", Mock())
    asked = {"LD_PRELOAD": "x", "KVCONNECTOR_STAGING_WINDOW": "7"}
    client = server._Client({})
    client.open(server.__version__, "s", Deployment(BenchOptions()), None, asked)
    *_, environment = server.Child.call_args.args
    assert environment == {"KVCONNECTOR_STAGING_WINDOW": "7"}
    monkeypatch.setattr(engine_process, "Child", Mock())
    monkeypatch.setattr(engine_process, "perftest_server", lambda *each: nullcontext(each))
    with engine_process.Engine(Deployment(BenchOptions()), "prefill") as engine:
        passed = engine.serve_perftest("auto", {"LD_PRELOAD": "x", "UCX_TLS": "tcp"})
    assert passed == ("auto", {"UCX_TLS": "tcp"})


def test_a_server_refuses_caches_that_its_host_has_no_memory_for(monkeypatch):
    monkeypatch.setattr(server, "Child", Mock())
    monkeypatch.setattr("kvconnector.bench.deployment.free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"too little free memory .*free='1 MiB'"):
        server._Client({}).open(server.__version__, "s", Deployment(BenchOptions()), None, {})
    assert not server.Child.called


@pytest.mark.parametrize("path, has_share", [("packed", True), ("direct", False)])
def test_only_transfers_over_ucx_get_a_share_of_its_bandwidth(path, has_share):
    ours = Measurement("kvconnector", "ours", (0.5,), 10**9)
    (note,) = transfer._share_of([3e9, 5e9], ours, {path})
    assert "3.00 and 5.00 GB/s" in note
    assert note.endswith("; kvconnector reaches 50% of it") == has_share


@pytest.mark.ucx
@pytest.mark.integration
def test_the_reason_why_two_hosts_cannot_connect_is_reported(bench, monkeypatch, tmp_path):
    theirs, _ = _keys(tmp_path / "a", "p", "d")
    (ours,) = _keys(tmp_path / "b", "d")
    with _serving(theirs) as address:
        status, _, err = bench(f"transfer --connect {address} {SIZE}")
        assert status == 2
        assert "this channel has none" in err
        with monkeypatch.context() as patch:
            for name, value in ours.items():
                patch.setenv(name, value)
            status, _, err = bench(f"transfer --connect {address} {SIZE}")
        assert status == 2
        assert "are its keys ours" in err
    status, _, err = bench(f"transfer --connect {address.partition(',')[0]} {SIZE}")
    assert status == 2
    assert "is `kvconnector bench serve` running there" in err
    monkeypatch.setattr(server, "__version__", "0.0.1")
    with _serving() as address:
        status, _, err = bench(f"transfer --connect {address} {SIZE}")
    assert status == 2
    assert "versions differ" in err


@pytest.mark.parametrize(
    "line,named",
    [
        ("transfer --connect nowhere", "HOST:PORT"),
        ("pairs", "torchrun"),
    ],
)
def test_impossible_options_are_refused(bench, monkeypatch, line, named):
    monkeypatch.delenv("RANK", raising=False)
    status, out, err = bench(line)
    assert (status, out) == (2, "")
    assert named in err


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_hosts_without_common_memory_measure_each_other(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    theirs, ours = _keys(tmp_path, "p", "d")
    with Network() as network:
        p, d = network.host("p"), network.host("d")
        theirs["KVCONNECTOR_CONTROL_HOST"] = p.address
        with _serving(theirs, p) as address:
            assert address.startswith(f"{p.address}:")
            done = subprocess.run(
                d.command([*BENCH, "transfer", "--connect", address, *SIZE.split()]),
                env={**environment(), **ours, "KVCONNECTOR_CONTROL_HOST": d.address},
                stdout=subprocess.PIPE,
                check=True,
            )
    case, _ = json.loads(done.stdout)["cases"]
    assert any("over tcp/eth0" in note for note in case["notes"])
    assert all(each["time_over_ours"] > 0 for each in case["measurements"])


@pytest.mark.ucx
@pytest.mark.integration
@pytest.mark.slow
def test_the_ranks_of_a_torchrun_job_measure_every_pair(tmp_path):
    pytest.importorskip("torch.distributed.run")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    arguments = [*BENCH[2:], "pairs", *SIZE.split()[:-1], "--output", str(report)]
    done = subprocess.run(
        [*command, "-m", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    matrix = json.loads(report.read_text())["gigabytes_per_s"]
    assert [[cell is not None for cell in row] for row in matrix] == [
        [row != column for column in range(3)] for row in range(3)
    ]
    assert all(f"to {rank}" in done.stdout for rank in range(3))
