"""Kubernetes manifests, and what the kubelet makes of them: variables, volumes, owners and modes."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "launchers"
NAMES = ("pods.yaml", "kubernetes.yaml")


def documents(name):
    """All documents of a manifest, as (kind, name) -> document."""
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load_all((FOLDER / name).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def engine_pods(name):
    """The pod of each engine of a manifest, by the engine's name."""
    return {
        named: each["spec"]["template"]["spec"]
        for (kind, named), each in documents(name).items()
        if kind == "Deployment"
    }


def engine_of(pod):
    """The engine's container: the first one."""
    return pod["containers"][0]


def volume(pod, name):
    (found,) = (each for each in pod["volumes"] if each["name"] == name)
    return found


def mount_path(container, name):
    (found,) = (each for each in container["volumeMounts"] if each["name"] == name)
    return found["mountPath"]


def environment(container, address):
    """The variables of a container whose pod has this address."""
    variables = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        variables[entry["name"]] = entry.get("value", address)
    return variables


def transfer_config(container):
    """What vLLM gets as --kv-transfer-config."""
    arguments = [*container.get("command", []), *container["args"]]
    (found,) = (each for each in arguments if each.startswith("--kv-transfer-config="))
    return json.loads(found.partition("=")[2])


def lay_out_secret(folder, files, *, mode, group):
    """Make a secret's volume as the kubelet does: root's files behind two links, and fsGroup's if there is one."""
    data = folder / "..2026_01_01"
    data.mkdir(parents=True)
    for name, text in files.items():
        path = data / name
        path.write_text(text)
        path.chmod(mode | (0o440 if group is not None else 0))
        if group is not None:
            os.chown(path, 0, group)
    for place in (folder, data):
        if group is not None:
            os.chown(place, 0, group)
        place.chmod(0o755)
    (folder / "..data").symlink_to(data.name)
    for name in files:
        (folder / name).symlink_to(Path("..data", name))
