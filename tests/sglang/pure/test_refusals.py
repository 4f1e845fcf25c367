"""The SGLang backend takes settings from its environment, and refuses with a worded error what it cannot move."""

import dataclasses
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvconnector.control.security import generate_keys
from kvconnector.errors import (
    AuthenticationError,
    BlockIdError,
    ConfigError,
    GeometryError,
    ProducerNotAllowedError,
)
from kvconnector.integrations.sglang.caches import registered_groups
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.registry import Found
from kvconnector.integrations.sglang.requests import Group, Layout
from kvconnector.integrations.sglang.settings import (
    PrefillEngines,
    cache_facts,
    connector_config,
    refuse_unsupported,
)
from kvconnector.integrations.sglang.transfers import transfer_names
from tests.sglang.pure.pools import CONV_GROUPS, STATE_HEADS, Model, Pools

FOUND = Found(1, 0, "tcp://10.0.0.1:9000")
PORT, ANYWHERE = 8998, "0.0.0.0"  # noqa: S104 - what an operator may write


def _config(
    is_prefill=True, host="127.0.0.1", *, dp=(0, 1), nodes=1, own="10.0.0.1", others=(), **environ
):
    named = {f"KVCONNECTOR_{name}": value for name, value in environ.items()} | dict(others)
    names = {"unique_name": "d", "own_address": own, "dp_rank": dp[0], "dp_size": dp[1]}
    return connector_config(
        is_prefill=is_prefill,
        host=host,
        bootstrap_port=PORT,
        environ=named,
        num_nodes=nodes,
        **names,
    )


def test_both_sides_derive_the_prefill_engines_name_and_the_transfers():
    prefill, decode = _config(), _config(is_prefill=False)
    engines = PrefillEngines(decode)
    address = engines.address_of(f"localhost:{PORT}", FOUND)
    assert (address.engine_id, address.address) == (prefill.engine_id, FOUND.directory)
    assert (prefill.role, decode.role) == ("producer", "consumer")
    second = Found(2, 1, FOUND.directory)
    assert engines.address_of(f"p:{PORT}", second).engine_id == _config(dp=(1, 2)).engine_id
    assert engines.registry_of("fe80::1:7") == ("fe80::1", 7)
    assert transfer_names(7) == transfer_names(7)
    assert not {*transfer_names(7)} & {*transfer_names(8)}
    assert len(transfer_names(7)[1]) == 32


def test_an_engine_listens_at_the_address_of_its_host_name_that_peers_use(monkeypatch):
    both = [(None, None, None, "", (host, 0)) for host in ("::1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert _config(host="localhost").control.host == "127.0.0.1"


@pytest.mark.parametrize("variable", [("ENGINE_ID", "me"), ("ROLE", "both")], ids=str)
def test_settings_that_follow_from_sglangs_arguments_are_refused(variable):
    with pytest.raises(ConfigError, match="follows from SGLang's arguments"):
        _config(**dict([variable]))


def test_beyond_loopback_keys_are_needed(tmp_path):
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        _config(host=ANYWHERE)
    config = _config(host=ANYWHERE, CONTROL_INSECURE_NETWORK="true")
    assert config.control.advertise_host == "10.0.0.1"
    with pytest.raises(ConfigError, match="has no address"):
        _config(host="no.such.host.invalid")


def test_a_prefill_engines_key_is_the_only_other_one_or_that_of_its_line(tmp_path):
    ours = generate_keys(tmp_path / "ours")
    first, second = (generate_keys(tmp_path / name).public_key for name in ("first", "second"))
    clients = tmp_path / "clients"
    files = {
        "CONTROL_SECRET_KEY_FILE": str(tmp_path / "ours" / "curve.secret"),
        "CONTROL_AUTHORIZED_CLIENTS_FILE": str(clients),
    }

    def key_of(*lines):
        clients.write_text("\n".join(lines), "utf-8")
        engines = PrefillEngines(_config(is_prefill=False, **files))
        clients.unlink()  # it is read once, and not for each request
        # an engine of another kind that a router names is found by the address alone
        named = engines.named_by("vllm@p:1")
        assert (named.engine_id, named.address) == ("vllm", "tcp://p:1")
        found = engines.address_of("p:1", FOUND).public_key
        assert named.public_key == found
        return found

    assert key_of(ours.public_key) == ours.public_key
    assert key_of(ours.public_key, first) == first
    assert key_of(ours.public_key, first, "", "# engines", f"{second} p:1") == second
    with pytest.raises(AuthenticationError, match="which key"):
        key_of(first, second)


@pytest.mark.parametrize(
    "address",
    ["p", ":1", "p:", "p:70000", f"p:{'9' * 5000}", "p q:1", "\ud800:1", "[::1]x:1", "p@", "p@q"],
    ids=ascii,
)
def test_a_bootstrap_address_is_a_host_and_a_port(address):
    """A client may send any address: only its request may fail."""
    with pytest.raises(ConfigError, match="control address"):
        PrefillEngines(_config(is_prefill=False)).registry_of(address)


def test_a_producer_that_is_not_listed_is_not_even_asked():
    engines = PrefillEngines(_config(is_prefill=False, CONTROL_ALLOWED_PRODUCERS="10.1.0.0/16"))
    assert engines.registry_of("10.1.2.3:8998") == ("10.1.2.3", 8998)
    assert engines.named_by("vllm@10.1.2.3:8998").address == "tcp://10.1.2.3:8998"
    for ask in (engines.registry_of, engines.named_by):
        with pytest.raises(ProducerNotAllowedError, match=r"10\.2"):
            ask("vllm@10.2.2.3:8998")
    with pytest.raises(ProducerNotAllowedError, match=r"10\.2"):
        engines.registry_of("10.2.2.3:8998")


def test_sglangs_deadline_for_waiting_requests_is_ours_unless_ours_is_set():
    waiting = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "100000"}
    config = _config(others=waiting)
    assert (config.peer.progress_timeout_s, config.lease.early_follow_s) == (100000.0, 100000.0)
    assert _config(others=waiting, PEER_PROGRESS_TIMEOUT_S="7").peer.progress_timeout_s == 7.0
    with pytest.raises(ConfigError, match="WAITING_TIMEOUT"):
        _config(others={"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "soon"})


def test_an_engine_on_several_nodes_listens_at_each_nodes_own_address():
    insecure = {"CONTROL_INSECURE_NETWORK": "true"}
    assert _config(host="10.0.0.9", nodes=2, **insecure).control.host == "10.0.0.1"
    assert _config(host="10.0.0.9", **insecure).control.host == "10.0.0.9"
    assert _config(host=ANYWHERE, nodes=2, **insecure).control.host == ANYWHERE
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0"):
        _config(nodes=2)


@pytest.mark.parametrize("host", [ANYWHERE, "10.0.0.9"])
def test_a_node_without_an_address_of_its_own_is_refused(host):
    """SGLang finds none where the host has no route and no name: other nodes would be told to connect to themselves."""
    insecure = {"CONTROL_INSECURE_NETWORK": "true"}
    with pytest.raises(ConfigError, match="SGLANG_HOST_IP"):
        _config(host=host, nodes=2, own="127.0.0.1", **insecure)
    alone = _config(host=ANYWHERE, own="127.0.0.1", **insecure)
    assert alone.control.advertise_host == "127.0.0.1"
    with pytest.raises(ConfigError, match="SGLANG_HOST_IP"):
        _config(host="10.0.0.9", nodes=2, own="127.0.0.1", CONTROL_ADVERTISE_HOST="10.0.0.2")
    named = {"CONTROL_HOST": ANYWHERE, "CONTROL_ADVERTISE_HOST": "10.0.0.2"}
    config = _config(host=host, nodes=2, own="127.0.0.1", **insecure, **named)
    assert config.control.advertise_host == "10.0.0.2"


def test_deployments_are_refused_by_name():
    refuse_unsupported({"dp_size": 1, "enable_hisparse": False, "x": None})
    with pytest.raises(ConfigError, match=r"dp_size=2.*enable_hisparse=True"):
        refuse_unsupported({"dp_size": 2, "dcp_size": 1, "enable_hisparse": True})


def _early(req):
    pass


def _early_unless_loading(req, allow_send=True):
    pass


HOST, RADIX, WINDOW = "enable_hierarchical_cache", "enable_radix_cache", {"states": ["swa"]}
IN_BOTH = {"has_host_cache": True, "has_radix_cache": True, "states": ["swa", "mamba"]}
KEPT = {
    "nothing": ({}, ""),
    "a window in pages of one token": ({**WINDOW, "has_radix_cache": True, "page_size": 1}, RADIX),
    "a window in longer pages": ({**WINDOW, "has_radix_cache": True}, ""),
    "a window that no tree keeps": ({**WINDOW, "page_size": 1}, ""),
    "no window": ({"has_radix_cache": True, "page_size": 1}, ""),
    "a prefix while it is loaded": ({"is_prefill": True, "has_host_cache": True}, HOST),
    "a prefix in a decode engine": ({"has_host_cache": True}, ""),
    "a prefix that is waited for": (
        {"is_prefill": True, "has_host_cache": True, "early_send": _early_unless_loading},
        "",
    ),
    "a prefix that is not published early": (
        {"is_prefill": True, "has_host_cache": True, "early_send": None},
        "",
    ),
    "a prefix on the device": ({"is_prefill": True}, ""),
    "a state in host memory": (IN_BOTH, f"{HOST} with .*{RADIX} and recurrent states"),
    "a state in a prefill engine": ({**IN_BOTH, "is_prefill": True, "early_send": None}, ""),
    "a state on the device": ({**IN_BOTH, "has_host_cache": False}, ""),
    "a state that no tree keeps": ({**IN_BOTH, "has_radix_cache": False}, ""),
    "no state": ({**IN_BOTH, "states": []}, ""),
}


@pytest.mark.parametrize("kept", KEPT)
def test_caches_beside_a_request_are_refused_where_they_would_share_its_pages(kept):
    given, text = KEPT[kept]
    plain = {"is_prefill": False, "states": [], "page_size": 16, "early_send": _early}
    plain |= {"has_host_cache": False, "has_radix_cache": False}
    with pytest.raises(ConfigError, match=text) if text else nullcontext():
        refuse_unsupported(cache_facts(**plain | given))


def _registered(args, shape):
    return registered_groups(args, shape, MetadataRows(args, "cpu"))


def _pools(model=None, **changes):
    shape = {"tp_size": 1, "pp_size": 1, "is_prefill": True, "page_size": 4}
    return Pools(model or Model(), rank=(0, 0), **shape | changes)


@pytest.mark.parametrize(
    "model, changes, text",
    [
        (Model(), {"state_types": ["qsa_pending"]}, "does not transfer caches of these kinds"),
        (Model(), {"kv_item_lens": [100] * 8}, "does not fit its tokens and heads"),
        (Model(), {"num_draft_entries": 2}, "the number of buffers"),
        (Model(windows=(1,)), {"swa_kv_cache_layout": "hnd"}, "pages of"),
        (Model(states=(1,)), {"state_dim_per_tensor": [[7, 7]]}, "does not fit its channels"),
        (Model(states=(1, 3)), {"state_layer_ids": [[1, 3, 1, 1]]}, "no histories of n-grams"),
    ],
    ids=["kind", "length", "layers", "layout", "state", "states"],
)
def test_invalid_pools_are_refused(model, changes, text):
    pools = _pools(model)
    args = SimpleNamespace(**vars(pools.args) | changes)
    with pytest.raises(GeometryError, match=text):
        _registered(args, pools.shape)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_share_of_a_state_is_known_only_if_its_channels_are_consecutive(is_transposed):
    pools = _pools(Model(states=(1,)), tp_size=2)
    (_, states, _), _ = _registered(
        pools.args, dataclasses.replace(pools.shape, is_transposed=is_transposed)
    )
    totals = [part.total_heads for part in states.geometry.parts]
    assert totals == ([2, 2] if is_transposed else [*CONV_GROUPS, STATE_HEADS])


def test_heads_that_are_not_cut_evenly_are_refused():
    with pytest.raises(GeometryError, match="not cut evenly"):
        _pools(tp_size=3)


def test_a_decode_engine_has_no_more_stages_than_the_row_has_layers():
    model = Model(layers=9)
    decode, prefill = (_pools(model, pp_size=9, is_prefill=each) for each in (False, True))
    with pytest.raises(GeometryError, match="too many stages"):
        _registered(decode.args, decode.shape)
    (*_, rows), kinds = _registered(prefill.args, prefill.shape)
    assert (kinds[-1].kind, rows.views) == ("row", {})


def test_metadata_rows_are_alike():
    args = _pools().args
    args.aux_data_lens, args.aux_item_lens = [5, 6, 7], [1, 1, 1]
    with pytest.raises(GeometryError, match="have different numbers of rows"):
        MetadataRows(args, "cpu")


@pytest.mark.parametrize(
    "states, options",
    [
        ([[1], [2]], {}),
        ([[1], [2, 3], [4]], {}),
        ([[1], [2]], {"prefix_tokens": 3}),
        ([[1], [2]], {"window_tokens": None}),
        ([[1, 2], [2, 3]], {}),
        ([[1], [2]], {"num_tokens": 0}),
        ([[], [2]], {}),
        ([[1], [2]], {"num_tokens": 8, "window_tokens": 5}),
    ],
)
def test_blocks_that_cannot_be_a_requests_are_refused(states, options):
    layout = Layout((Group("kv"), Group("swa", 0), Group("mamba", 1), Group("row")), 4, 2)
    wanted = {"prefix_tokens": 0, "num_tokens": 4, "window_tokens": 4} | options
    if (states, options) == ([[1], [2]], {}):
        assert layout.to_load([1], states, 0, **wanted)
        return
    with pytest.raises(BlockIdError):
        layout.to_load([1], states, 0, **wanted)
