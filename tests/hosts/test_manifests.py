"""The engines of the Kubernetes manifests start as their user, with volumes that have the kubelet's owners and modes.

Each has the namespaces of a host of its own. Only vLLM and the model are missing: a worker and a scheduler half start
with the settings that vLLM would pass on, and one reads the other's caches.
"""

import shutil
import sys
from contextlib import ExitStack

import pytest

from kvconnector.control.security import AUTHORIZED_CLIENTS_FILE, SECRET_KEY_FILE, generate_keys
from kvconnector.errors import ConfigError
from tests.docs.blocks import ROOT
from tests.hosts.pods import load
from tests.support.manifests import (
    engine_of,
    engine_pods,
    environment,
    lay_out_secret,
    mount_path,
    transfer_config,
    volume,
)
from tests.support.remote import RemoteObject

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(170)]

# Opens folders that only root may enter, such as the interpreter's, by mounting them anew in this namespace.
OPEN_FOLDERS = """
mount -t tmpfs tmpfs /mnt
for path in "$@"; do
  number=$((${number:-0} + 1))
  mkdir /mnt/$number && mount --rbind "$path" /mnt/$number
done
number=0
for path in "$@"; do
  number=$((number + 1)) closed="" part=""
  for name in $(echo "$path" | tr / ' '); do
    part="$part/$name"
    [ -z "$closed" ] && [ "$part" != "$path" ] && ! chmod_free "$part" && closed="$part"
  done
  [ -z "$closed" ] && continue
  mountpoint -q "$closed" && [ -d "$closed/.opened" ] || mount -t tmpfs -o mode=755 tmpfs "$closed"
  mkdir -p "$closed/.opened" "$path"
  mount --rbind /mnt/$number "$path"
done
"""
CHMOD_FREE = 'chmod_free() { [ $(($(stat -c 0%a "$1") & 5)) = 5 ]; }\n'
# /etc belongs to the machine: the pod gets a copy, in which the keys have a place.
OWN_ETC = (
    'mkdir /mnt/etc && cp -a /etc/. /mnt/etc && mkdir -p "/mnt/$1" && mount --bind /mnt/etc /etc'
)


class PodsOfManifest:
    """Pods of `pods.yaml`, with keys for both engines and a folder of the node."""

    def __init__(self, network, folder, stack):
        self._network, self._stack = network, stack
        self._folder = folder
        self.pods = engine_pods("pods.yaml")
        keys = {name: generate_keys(folder / "made" / name) for name in self.pods}
        listed = "".join(f"{each.public_key}\n" for each in keys.values())
        self._secrets = {
            name: {
                SECRET_KEY_FILE: (folder / "made" / name / SECRET_KEY_FILE).read_text(),
                AUTHORIZED_CLIENTS_FILE: listed,
            }
            for name in self.pods
        }
        self.node = folder / "node"
        self.node.mkdir()

    def start(self, name, *, mode=None, group=True):
        """Start an engine. `mode` replaces the secret's, and without `group` the pod has no fsGroup."""
        pod = self.pods[name]
        container, context = engine_of(pod), pod["securityContext"]
        host = self._network.host(f"h{len(self._network.hosts)}")
        shell = ["sh", "-ec"]
        opened = sorted({sys.prefix, sys.base_prefix, str(ROOT)})
        host.run([*shell, CHMOD_FREE + OPEN_FOLDERS, "sh", *opened])
        keys = mount_path(container, "keys")
        host.run([*shell, OWN_ETC, "sh", keys])
        secret = self._folder / f"secret-{name}"
        default = volume(pod, "keys")["secret"]["defaultMode"]
        fs_group = context["fsGroup"] if group else None
        lay_out_secret(
            secret, self._secrets[name], mode=default if mode is None else mode, group=fs_group
        )
        host.run(["mount", "--bind", str(secret), keys])
        place = mount_path(container, "folder")
        host.run([*shell, 'mount -t tmpfs tmpfs /run && mkdir "$1"', "sh", place])
        host.run(["mount", "--bind", str(self.node), place])
        for each in pod["initContainers"]:  # as root, with the same folder
            host.run(each["command"])
        groups = [str(context["runAsGroup"]), *([str(fs_group)] if group else [])]
        as_user = ["setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"]
        as_user += [f"--groups={','.join(groups)}", "--bounding-set=-all", "--inh-caps=-all"]
        variables = environment(container, host.address) | {"HOME": "/tmp"}
        engine = RemoteObject(
            "tests.hosts.pods:ManifestEngine",
            name,
            transfer_config(container)["kv_role"],
            prefix=host.command(
                [*as_user, "env", *(f"{name}={value}" for name, value in variables.items())]
            ),
        )
        self._stack.callback(engine.release)
        return engine


@pytest.fixture
def pods(network, tmp_path):
    pytest.importorskip("yaml")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed (Debian: util-linux)")
    with ExitStack() as stack:
        yield PodsOfManifest(network, tmp_path, stack)


def test_pods_start_as_their_user_and_read_through_the_node_s_folder(pods):
    p, d = pods.start("prefill"), pods.start("decode")
    user = pods.pods["prefill"]["securityContext"]["runAsUser"]
    assert {p.call("user"), d.call("user")} == {user}
    assert load(p, d, "r") == {"direct"}
    status = pods.node.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (user, 0o700)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"group": False, "mode": 0o400}, "Permission denied.*`fsGroup`"),
        ({"group": False, "mode": 0o644}, "accessible to other users.*`defaultMode: 0440`"),
        ({"group": True, "mode": 0o644}, "accessible to other users.*`defaultMode: 0440`"),
    ],
    ids=["root's alone", "the default", "the default with fsGroup"],
)
def test_without_group_or_mode_an_engine_says_what_is_wrong_with_its_key(pods, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        pods.start("prefill", **changes)
