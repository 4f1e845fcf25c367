"""The Kubernetes manifests are complete: what `tests/hosts/test_manifests.py` starts is named consistently in them."""

import pytest

from kvconnector.integrations.vllm.settings import ROLES, Settings
from tests.support.manifests import (
    FOLDER,
    NAMES,
    documents,
    engine_of,
    engine_pods,
    environment,
    mount_path,
    transfer_config,
    volume,
)
from tests.vllm.pure.test_settings import vllm_config

ADDRESS = "10.0.0.7"
PODS = [(name, engine) for name in NAMES for engine in ("prefill", "decode")]


@pytest.mark.parametrize("name, engine", PODS)
def test_an_engine_gets_its_address_port_role_and_keys(name, engine):
    pod = engine_pods(name)[engine]
    container = engine_of(pod)
    config = vllm_config(transfer_config(container)["kv_role"])
    settings = Settings.of(config, environment(container, ADDRESS)).config
    assert settings.role == ROLES["kv_producer" if engine == "prefill" else "kv_consumer"]
    assert (settings.control.host, settings.control.insecure) == (ADDRESS, False)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["kv-control"] == settings.control.port
    keys = mount_path(container, "keys")
    assert settings.control.secret_key_file == f"{keys}/curve.secret"
    assert settings.control.authorized_clients_file == f"{keys}/authorized_clients"


@pytest.mark.parametrize("name, engine", PODS)
def test_a_pod_has_what_an_engine_needs_to_start_and_to_be_found(name, engine):
    pod = engine_pods(name)[engine]
    container = engine_of(pod)
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert volume(pod, "keys")["secret"]["secretName"] == f"kvconnector-{engine}"
    assert volume(pod, "shm")["emptyDir"]["medium"] == "Memory"
    assert mount_path(container, "shm") == "/dev/shm"
    assert environment(container, ADDRESS)["HOME"] == mount_path(container, "home")
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in {port["name"] for port in container["ports"]}
    for each in [*pod.get("initContainers", []), *pod["containers"]]:
        mounted = {mount["name"] for mount in each.get("volumeMounts", [])}
        assert mounted <= {found["name"] for found in pod["volumes"]}


@pytest.mark.parametrize("name, engine", PODS)
def test_a_service_leads_to_its_engine(name, engine):
    found = documents(name)
    deployment, service = found["Deployment", engine]["spec"], found["Service", engine]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["selector"] == deployment["template"]["metadata"]["labels"]
    ports = {
        port["name"]: port["containerPort"]
        for container in deployment["template"]["spec"]["containers"]
        for port in container.get("ports", [])
    }
    (port,) = service["ports"]
    assert ports[port["targetPort"]] == port["port"] == 8000


def test_the_keys_that_the_comment_makes_are_those_that_the_pods_mount():
    text = (FOLDER / "pods.yaml").read_text()
    for engine in ("prefill", "decode"):
        assert f"keygen {engine}" in text
        assert f"secretName: kvconnector-{engine}," in text
