"""`kvconnector doctor --peer` against running engines, over real UCX and ZMQ."""

import json
import socket
from contextlib import closing

import pytest

from kvconnector.cli import main, peer_greeting
from kvconnector.control.address import parse_address
from kvconnector.control.security import generate_keys
from kvconnector.control.zmq_outgoing import OutgoingConnection
from kvconnector.datapath.pump import opening
from kvconnector.errors import TransportError
from kvconnector.integrations.sglang import registry
from kvconnector.runtime.channels import MAX_MESSAGES_PER_TURN
from tests.integration.runtime_pair import Engine, same, until
from tests.sglang.pure.registry import Registry
from tests.support.keys import keyed_controls

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

MODEL = ["--model", "qwen3-8b,layers=4", "--dtype", "bfloat16"]


def _engine(engine_id, role="producer", **settings):
    engine = Engine(engine_id, role, shape={"tp_size": 2, "layout": "NHD"}, **settings)
    engine.step()
    return engine


@pytest.fixture(scope="module")
def p():
    with closing(_engine("p")) as engine:
        yield engine


def _address(engine):
    return engine.scheduler.address.removeprefix("tcp://")


@pytest.fixture
def doctor(capsys):
    def run(*arguments):
        status = main(["doctor", "--json", *arguments])
        report = json.loads(capsys.readouterr().out)
        assert status == bool(report["faults"])
        return {finding["subject"].strip(): finding for finding in report["findings"]}

    return run


def test_an_engine_that_fits_is_described_rank_by_rank_while_its_requests_go_on(p, doctor):
    with closing(_engine("d", "consumer", seed=1)) as d:
        params = p.offer("r", [1, 2], 30)
        found = doctor("--peer", _address(p))
        assert "r" not in p.sent
        d.load("r", params, [3, 4], 31)
        until(lambda: "r" in d.received and "r" in p.sent, d, p)
        assert same(p.dense([1, 2], 30), d.dense([3, 4], 30))
    assert {finding["verdict"] for finding in found.values()} == {"ok"}
    assert "engine p at" in found["peer"]["text"]
    assert "4 layers; tp 2, pp 1; blocks of 16 tokens" in found["model"]["text"]
    assert found["pp0tp0"]["figures"]["round_trip_s"] > 0
    assert found["pp0tp1"]["figures"]["round_trip_s"] > 0
    assert "direct" in found["path"]["text"]
    assert "/" in found["lanes"]["text"]
    assert found["bandwidth"]["figures"]["bytes_per_second"] > 0


def test_what_an_engine_states_of_its_model_is_shown(doctor):
    encoding = "yarn(rope_theta=1000000, factor=4)"
    kinds = (("full", encoding), ("window", "default(rope_theta=1)"))
    stated = {
        "position_encodings": kinds,
        "revision": "org/m@v1",
        "config": (("scale_emb", "2"),),
    }
    with closing(_engine("stating", stated=stated)) as engine:
        found = doctor("--peer", _address(engine))
    shown = {name: found[name]["text"] for name in ("positions", "revision", "config")}
    assert shown == {
        "positions": f"full {encoding}, window {kinds[1][1]}",
        "revision": "org/m@v1",
        "config": "scale_emb 2",
    }
    assert {finding["verdict"] for finding in found.values()} == {"ok"}


def test_an_sglang_servers_registry_names_its_engines(p, doctor):
    address = parse_address(p.scheduler.address)
    row = dict.fromkeys(("attn_tp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1)
    row |= dict.fromkeys(("attn_tp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0)
    row |= {"load_balance_method": "round_robin"}
    with closing(Registry()) as served:
        served.answer(
            "PUT", "/route", {}, row | {"rank_ip": address.host, "rank_port": address.port}
        )
        found = doctor("--peer", f"127.0.0.1:{served.port}")
    assert "rank 0 of 1" in found["registry"]["text"]
    assert "engine p at" in found["peer"]["text"]
    assert {finding["verdict"] for finding in found.values()} == {"ok"}


def test_every_mismatch_is_a_fault_in_plain_words(p, doctor):
    found = doctor("--peer", _address(p), *MODEL, "--name", "other", "--dtype", "float16")
    faults = {name: each["text"] for name, each in found.items() if each["verdict"] == "FAIL"}
    assert faults == {
        "model": "other here, model there",
        "dtype": "float16 here, bfloat16 there",
        "kv heads": "8 here, 4 there",
        "head dim": "128 here, 16 there",
    }
    assert found["bandwidth"]["verdict"] == "ok"


@pytest.mark.parametrize(
    "setting, expected",
    [
        ("VERIFY=checksum", ("verify", "checksum here, none there")),
        ("STREAM=false", ("stream", "on only there")),
        ("PATHS_DIRECT=never", ("path", "packed: paths.direct=never here")),
        ("UCX_TLS=tcp", ("lanes", "tcp/lo within this host")),
        ("CONTROL_OVER_UCX=false", ("pp0tp0", "round trip")),
    ],
)
def test_the_settings_of_this_engine_count(p, doctor, monkeypatch, setting, expected):
    name, _, value = setting.partition("=")
    monkeypatch.setenv(f"KVCONNECTOR_{name}", value)
    subject, text = expected
    assert text in doctor("--peer", _address(p))[subject]["text"]


def test_a_refused_greeting_says_why(p, doctor, monkeypatch):
    monkeypatch.setenv("KVCONNECTOR_UCX_TCP_SEGMENT_BYTES", "65536")
    monkeypatch.setenv("KVCONNECTOR_UCX_TLS", "tcp")
    found = doctor("--peer", _address(p))
    assert found["peer"]["verdict"] == "FAIL"
    assert "the same ucx.tcp_segment_bytes" in found["peer"]["text"]


def test_an_engine_that_has_not_begun_is_not_sent_more_than_it_keeps(doctor, monkeypatch):
    """Nobody reads what it is sent, and libzmq may end a process that has a full connection whose peer has gone."""
    sent = []
    send = OutgoingConnection.send

    def counted(connection, *arguments):
        sent.append(connection)
        send(connection, *arguments)

    monkeypatch.setattr(OutgoingConnection, "send", counted)
    for name, value in (
        ("HELLO_TIMEOUT_S", "1"),
        ("TIMEOUT_S", "5"),
        ("HEARTBEAT_INTERVAL_S", "1"),
    ):
        monkeypatch.setenv(f"KVCONNECTOR_PEER_{name}", value)
    with closing(Engine("p", "producer", shape={"tp_size": 1, "layout": "NHD"})) as engine:
        found = doctor("--peer", _address(engine))["peer"]
    assert "never asked for anything" in found["text"]
    assert 1 < len(sent) < MAX_MESSAGES_PER_TURN


def test_keys(tmp_path, doctor):
    names = ("ours", "theirs")
    keys, controls = keyed_controls(tmp_path, ours=names, theirs=names)
    with closing(_engine("p", control=controls["theirs"])) as p:
        where = f"{_address(p)},{keys['theirs'].public_key}"
        ours = ("--keys", str(tmp_path / "ours"))
        assert doctor("--peer", where, *ours)["bandwidth"]["verdict"] == "ok"
        generate_keys(tmp_path / "stranger")
        found = doctor("--peer", where, "--keys", str(tmp_path / "stranger"))
        assert found["peer"]["verdict"] == "FAIL"
        assert "not authorised" in found["peer"]["text"]
        assert "control.authorized_clients_file" in found["peer"]["text"]
        assert doctor("--peer", where)["peer"]["verdict"] == "FAIL"


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({}, None),
        ({"do_remote_prefill": False}, "computes the prompt itself"),
        ({"remote_port": "x"}, "kv_transfer_params cannot be used"),
        ({"remote_engine_id": "q"}, "another engine answers there"),
    ],
)
def test_the_reason_for_unusable_params_is_given(p, doctor, tmp_path, changes, cause):
    file = tmp_path / "params.json"
    params = p.offer(f"r{cause}", [1, 2], 30)
    file.write_text(json.dumps({"kv_transfer_params": {**params, **changes}}))
    found = doctor("--params", str(file))
    faults = [each["text"] for each in found.values() if each["verdict"] == "FAIL"]
    assert bool(faults) is (cause is not None)
    assert cause is None or cause in faults[0]
    assert ("bandwidth" in found) is (cause is None)


@pytest.fixture
def silent(monkeypatch):
    """Accepts connections and says nothing; whoever asks gives up soon."""
    monkeypatch.setattr(peer_greeting, "ASK_S", 0.5)
    monkeypatch.setattr(registry, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "where, cause, remedy",
    [
        ("127.0.0.1:1", "refuses connections to this port", "start the prefill engine"),
        ("no-such-host.invalid:9", "name does not resolve", "give its IP address"),
        ("silent", "accepts connections at this port and does not answer", "stopped or stuck"),
    ],
)
def test_each_reason_for_no_answer_has_a_remedy_of_its_own(doctor, request, where, cause, remedy):
    where = request.getfixturevalue("silent") if where == "silent" else where
    found = doctor("--peer", where)["peer"]
    assert found["verdict"] == "FAIL"
    assert cause in found["text"]
    assert remedy in found["text"]


def test_an_engine_that_cannot_share_its_pools_says_why(doctor, monkeypatch):
    def refuse(*arguments):
        raise TransportError("memory of the caches was created for this process alone")

    monkeypatch.setattr(opening, "export_pools", refuse)
    with closing(_engine("p")) as engine:
        found = doctor("--peer", _address(engine))
    assert found["path"]["verdict"] == "note"
    assert "created for this process alone" in found["path"]["text"]
