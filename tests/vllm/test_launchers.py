"""Launchers and routers accept our connector and its parameters: tested with their own packages where installed.

`scripts/test_vllm --launchers` installs them; a test whose package is missing says so. Whole engines run in the cases
of `tests.vllm.harness.launchers`.
"""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnector.integrations.vllm.settings import HOST_VARIABLE, PORT_VARIABLE, Settings
from kvconnector.runtime import TransferParams
from launchers import ray_serve
from tests.support.manifests import NAMES, documents
from tests.vllm.pure.test_settings import vllm_config

pytestmark = pytest.mark.vllm

OFFER = TransferParams(
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=((3, 1, 2), (7,)),
    remote_host="10.0.0.7",
    remote_port=20000,
    remote_num_tokens=40,
    transfer_secret="5" * 32,
    remote_first_blocks=(0, 2),
    remote_public_key="k" * 40,
)


def test_dynamo_uses_the_alias_as_it_uses_nixl():
    found = importlib.util.find_spec("dynamo")
    if found is None:
        pytest.skip("ai-dynamo is not installed")
    (folder,) = found.submodule_search_locations
    path = Path(folder, "vllm", "kv_connector_protocols.py")
    spec = importlib.util.spec_from_file_location("protocols", path)
    protocols = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocols)

    def config(name):
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=name))

    with pytest.raises(ValueError, match="KVConnector"):
        protocols.make_kv_connector_protocol(config("KVConnector"))
    protocol = protocols.make_kv_connector_protocol(config("NixlConnector"))
    assert protocol.prefill_request_kv_transfer_params()["do_remote_decode"] is True
    answer = SimpleNamespace(kv_transfer_params=OFFER.to_mapping())
    assert TransferParams.from_mapping(protocol.decode_request_kv_transfer_params(answer)) == OFFER


def settings_of(transfer, environ):
    config = vllm_config(transfer["kv_role"], **transfer.get("kv_connector_extra_config", {}))
    config.kv_transfer_config.engine_id = transfer.get("engine_id", "e")
    config.parallel_config.data_parallel_index = 0
    return Settings.of(config, environ).config


def test_ray_serve_gives_every_engine_an_id_and_an_address_of_its_own(monkeypatch):
    serve = pytest.importorskip("ray.serve", reason="ray is not installed")
    from ray import util
    from ray.serve.llm import LLMConfig

    monkeypatch.setattr(util, "get_node_ip_address", lambda: "10.0.0.7")
    ray_serve.register()
    found = []
    for rank, role in enumerate(("kv_producer", "kv_consumer")):
        for name in (HOST_VARIABLE, PORT_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        config = LLMConfig(**ray_serve.engine("org/m", role))
        context = SimpleNamespace(rank=SimpleNamespace(rank=rank))
        monkeypatch.setattr(serve, "get_replica_context", lambda context=context: context)
        monkeypatch.setattr(
            LLMConfig, "get_engine_config", lambda self: SimpleNamespace(num_devices=2)
        )
        config.setup_engine_backend()
        keys = config.runtime_env["env_vars"]
        assert "KVCONNECTOR_CONTROL_SECRET_KEY_FILE" in keys
        settings = settings_of(config.engine_kwargs["kv_transfer_config"], {**os.environ, **keys})
        assert (settings.control.host, settings.control.insecure) == ("10.0.0.7", False)
        found.append((settings.engine_id, settings.control.port))
    assert len({engine_id for engine_id, _ in found}) == 2
    assert [port for _, port in found] == [20000, 20002]


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_takes_the_manifest(name):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="it is not installed")
    for document in documents(name).values():
        kubernetes.validate(document, kubernetes.latest_version(), strict=True)
