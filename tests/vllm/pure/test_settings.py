import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvconnector.errors import ConfigError
from kvconnector.integrations.vllm import check_version
from kvconnector.integrations.vllm import settings as integration


def vllm_config(role="kv_producer", cache_dtype="auto", vllm_id="e", index=0, **extra):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=vllm_id, kv_role=role, kv_connector_extra_config=extra
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=index,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend="mp",
            world_size=1,
        ),
        model_config=SimpleNamespace(
            model="/models/m",
            revision=None,
            dtype="torch.bfloat16",
            get_total_num_hidden_layers=lambda: 4,
            hf_text_config=SimpleNamespace(rope_theta=10000.0),
            multimodal_config=None,
            uses_mrope=False,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        aux_output_config=SimpleNamespace(enabled=False),
    )


def settings(environ=None, **arguments):
    return integration.Settings.of(vllm_config(**arguments), environ or {})


@pytest.mark.parametrize(
    "vllm_role,role",
    [("kv_producer", "producer"), ("kv_consumer", "consumer"), ("kv_both", "both")],
)
def test_one_host_needs_no_options(vllm_role, role):
    config = settings(role=vllm_role).config
    control = config.control
    assert (config.engine_id, config.role) == ("e", role)
    assert (control.host, control.port, control.insecure) == ("localhost", 0, True)
    keys = {"secret_key_file": "s", "authorized_clients_file": "a"}
    assert not settings(role=vllm_role, control=keys).config.control.insecure


def test_nixl_options_and_variables_keep_their_meaning():
    environ = {integration.HOST_VARIABLE: "127.0.0.1", integration.PORT_VARIABLE: "5600"}
    found = settings(
        environ, kv_lease_duration=60, backends=["UCX"], enforce_handshake_compat=False
    )
    control = found.config.control
    assert (control.host, control.port) == ("127.0.0.1", 5600)
    assert found.config.lease.duration_s == 60
    assert (found.bidirectional_kv_xfer, found.kv_recompute_threshold) == (False, 64)
    # reuse between turns needs both roles; truth values may be text
    for value in (True, "true", "false"):
        found = settings(role="kv_consumer", bidirectional_kv_xfer=value, decoder_kv_blocks_ttl=9)
        role = "consumer" if value == "false" else "both"
        assert (found.config.role, found.decoder_kv_blocks_ttl_s) == (role, 9)


@pytest.mark.parametrize(
    "variables,extra",
    [
        ({integration.PORT_VARIABLE: "5600"}, {}),
        ({}, {"control": {"port": 5600}}),
        ({"KVCONNECTOR_CONTROL_PORT": "5600"}, {}),
    ],
)
def test_data_parallel_ranks_of_a_host_never_share_a_port_or_a_name(variables, extra):
    # vLLM names the rank in its own engine id, but not in one that a child of MultiConnector or a setting of ours has
    for name, more in (("e_dp{}", {}), ("e", {}), ("e_dp{}", {"engine_id": "own"})):
        found = [
            settings(variables, vllm_id=name.format(index), index=index, **extra | more).config
            for index in range(3)
        ]
        assert [each.control.port for each in found] == [5600, 5601, 5602]
        assert len({each.engine_id for each in found}) == 3
        assert all(each.engine_id.endswith(f"_dp{i}") for i, each in enumerate(found) if i)
        assert not any(each.engine_id.endswith("_dp1_dp1") for each in found)
    assert [settings(index=index).config.control.port for index in range(3)] == [0, 0, 0]
    with pytest.raises(ConfigError, match=r"65535.*data_parallel_index=1"):
        settings(control={"port": 65535}, index=1)


@pytest.mark.parametrize("name", ["own", "own_dp0", "own_dp1", "own_dp2_dp1"])
@pytest.mark.parametrize("is_child", [True, False])
def test_an_id_that_ends_as_a_ranks_does_is_not_taken_for_one(name, is_child):
    """The id of a `MultiConnector`'s child and one of our settings are the same on all ranks."""
    own = {"vllm_id": name} if is_child else {"vllm_id": "e_dp{}", "engine_id": name}
    found = []
    for index in range(3):
        options = own | {"vllm_id": own["vllm_id"].format(index)}
        found.append(settings(index=index, **options).config.engine_id)
    assert len(set(found)) == 3
    assert all(each.startswith(name) for each in found)


def test_our_own_sections_and_variables_are_options():
    found = settings(
        {"KVCONNECTOR_STAGING_WINDOW": "8"}, lease={"duration_s": 40}, peer={"timeout_s": 20}
    ).config
    assert (found.lease.duration_s, found.peer.timeout_s, found.staging.window) == (40, 20, 8)


@pytest.mark.parametrize(
    "extra,text",
    [
        ({"kv_lease": 3}, "kv_lease_duration|lease"),
        ({"kv_recompute_threshold": "many"}, "kv_recompute_threshold"),
        ({"kv_lease_duration": "long"}, "kv_lease_duration"),
        ({"decoder_kv_blocks_ttl": 0}, "decoder_kv_blocks_ttl"),
        ({"bidirectional_kv_xfer": "perhaps"}, "bidirectional_kv_xfer"),
        ({"control": {"host": "10.0.0.1"}}, "keys"),
        ({"lease": {"duration": 3}}, "duration_s"),
    ],
)
def test_wrong_options_are_named(extra, text):
    with pytest.raises(ConfigError, match=text):
        settings(**extra)
    with pytest.raises(ConfigError, match=integration.PORT_VARIABLE):
        settings({integration.PORT_VARIABLE: "many"})


def test_the_model_name_that_peers_compare_can_be_set():
    config = vllm_config(model_name="org/m")
    found = integration.model_description(config, integration.Settings.of(config, {}).model_name)
    assert (found.model, found.dtype, found.num_layers) == ("org/m", "bfloat16", 4)
    assert found.position_encodings == (("", "default(rope_theta=10000)"),)
    assert found.revision == ""
    for name in (
        "fp8",
        "fp8_e4m3",
    ):  # one engine's command may have one name, the other's the other
        assert integration.model_description(vllm_config(cache_dtype=name), "m").dtype == "fp8"


@pytest.mark.parametrize(
    "role,pcp_size,dcp_size,is_taken",
    [
        *[("both", 1, 1, True), ("both", 1, 4, True), ("consumer", 2, 2, True)],
        *[("producer", 2, 1, True), ("producer", 2, 4, True)],
        *[("consumer", 2, 1, False), ("both", 2, 1, False)],
    ],
)
def test_engines_do_not_load_into_replicated_caches(role, pcp_size, dcp_size, is_taken):
    config = vllm_config()
    config.parallel_config.prefill_context_parallel_size = pcp_size
    config.parallel_config.decode_context_parallel_size = dcp_size
    refusal = pytest.raises(ConfigError, match="prefill_context_parallel_size=2")
    with nullcontext() if is_taken else refusal:
        integration.check_deployment(config, role)


@pytest.mark.parametrize("role", ["producer", "consumer", "both"])
def test_engines_that_load_have_no_routed_experts_to_return(role):
    """vLLM 0.31 and 0.32 would end the engine at the first load, and 0.33 would load nothing."""
    config = vllm_config()
    config.aux_output_config.enabled = True
    refusal = pytest.raises(ConfigError, match="--enable-return-routed-experts")
    with nullcontext() if role == "producer" else refusal:
        integration.check_deployment(config, role)


@pytest.mark.parametrize(
    "role,uses_mrope,rate,is_taken",
    [
        *[("producer", True, 0.5, True), ("consumer", False, 0.5, True)],
        *[("both", True, 0.0, True), ("consumer", True, None, True)],
        *[("consumer", True, 0.5, False), ("both", True, 0.5, False)],
    ],
)
def test_engines_that_load_do_not_prune_videos(role, uses_mrope, rate, is_taken):
    """vLLM corrects the positions after a pruned video when it embeds the video, which such an engine does not do."""
    config = vllm_config()
    config.model_config.uses_mrope = uses_mrope
    config.model_config.multimodal_config = SimpleNamespace(video_pruning_rate=rate)
    refusal = pytest.raises(ConfigError, match="--video-pruning-rate")
    with nullcontext() if is_taken else refusal:
        integration.check_deployment(config, role)


@pytest.mark.parametrize("backend", ["mp", "external_launcher"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_do_not_have_schedulers_of_their_own(backend, world_size):
    """Loads end on one rank before another, so the ranks would plan different steps, and wait for each other."""
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = backend
    config.parallel_config.world_size = world_size
    refusal = pytest.raises(ConfigError, match="external_launcher")
    with refusal if (backend, world_size) == ("external_launcher", 2) else nullcontext():
        integration.check_deployment(config, "producer")


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_clients_do_not_choose_the_ids_of_requests(value):
    environ = {} if value is None else {integration.OWN_IDS_VARIABLE: value}
    refusal = pytest.raises(ConfigError, match=f"do not set {integration.OWN_IDS_VARIABLE}")
    with refusal if value == "1" else nullcontext():
        integration.check_deployment(vllm_config(), "producer", environ)


@pytest.mark.parametrize("name", [integration.SNAPSHOT_SERVER, "vllm.entrypoints.cli.main", None])
def test_engines_are_not_restored_from_snapshots(monkeypatch, name):
    spec = None if name is None else SimpleNamespace(name=name)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    refusal = pytest.raises(ConfigError, match="snapshot")
    with refusal if name == integration.SNAPSHOT_SERVER else nullcontext():
        integration.check_deployment(vllm_config(), "producer")


def test_a_model_that_denoises_its_answers_is_refused():
    config = vllm_config()
    config.model_config.is_diffusion = True
    with pytest.raises(ConfigError, match="diffusion language models"):
        integration.check_deployment(config, "producer")


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1.dev3+g123", "0.33.0", "0.0.0", "dev"])
def test_supported_and_development_versions_pass(found):
    check_version(found)


def _engine(monkeypatch, found):
    """Let the installed vLLM differ in `found` from what is used of it."""
    monkeypatch.setattr("kvconnector.integrations.vllm.Sources.of", lambda _: None)
    monkeypatch.setattr("kvconnector.integrations.vllm.differences", lambda *_: found)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.32.0"])
def test_other_versions_run_with_a_warning_if_they_have_all_that_is_used(
    monkeypatch, caplog, version
):
    _engine(monkeypatch, [])
    check_version(version)
    assert f"vLLM {version} is newer or older" in caplog.text
    monkeypatch.setenv("KVCONNECTOR_ENGINE_VERSIONS", "known")
    with pytest.raises(ConfigError, match=r"0\.31.*0\.33"):
        check_version(version)


def test_other_versions_that_lack_something_are_refused_by_what_they_lack(monkeypatch):
    _engine(monkeypatch, ["x is missing"])
    with pytest.raises(ConfigError, match=r"0\.34\.0.*x is missing"):
        check_version("0.34.0")
