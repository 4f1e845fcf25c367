"""Engines in containers of one node: each has namespaces of its own, and one folder is mounted in all of them."""

import os
import re
from pathlib import Path

from kvconnector.integrations.vllm.settings import Settings
from tests.integration.runtime_pair import Engine, same, until
from tests.support.keys import keyed_controls
from tests.support.remote import RemoteObject
from tests.vllm.pure.test_settings import vllm_config

MANIFEST = Path(__file__).parents[2] / "examples/launchers/pods.yaml"
TOKENS, SOURCE, TARGET = 30, [9, 3], [5, 6]


class PodEngine(Engine):
    """An engine that takes a step before each answer."""

    def sends(self, name):
        self.step()
        return name in self.sent

    def receives(self, name):
        self.step()
        self.workers[0].wait(0.01)
        return name in self.received


class ManifestEngine(PodEngine):
    """An engine with the settings that vLLM would pass on from its pod's variables and `--kv-transfer-config`."""

    def __init__(self, name, kv_role):
        found = Settings.of(vllm_config(kv_role, vllm_id=name)).config
        control = {
            field: getattr(found.control, field)
            for field in ("host", "port", "secret_key_file", "authorized_clients_file", "insecure")
        }
        paths = {"shared_folder": found.paths.shared_folder}
        super().__init__(name, found.role, control=control, paths=paths)

    def user(self):
        return os.geteuid()


class Pods:
    """A consumer "d" and producers in containers, which set the volume as the shared folder unless `folder` differs."""

    def __init__(self, network, folder, stack):
        self._network, self._stack = network, stack
        self._controls = keyed_controls(folder, p=["p", "d"], d=["p", "d"])[1]
        self.volume = folder / "volume"
        self.volume.mkdir()

    def start(self, name, role, *, mounts=True, folder=None, seed=0):
        host = self._network.host(f"h{len(self._network.hosts)}")
        place = place_of_volume()
        host.run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
        host.run(["mkdir", place])
        if mounts:
            host.run(["mount", "--bind", str(self.volume), place])
        engine = RemoteObject(
            "tests.hosts.pods:PodEngine",
            name,
            role,
            seed=seed,
            prefix=host.command([]),
            control={**self._controls[name], "host": host.address},
            paths={"shared_folder": place if folder is None else folder},
        )
        self._stack.callback(engine.release)
        return engine


def place_of_volume():
    """The folder where the documented manifest mounts the volume, and to which it sets `paths.shared_folder`."""
    text = MANIFEST.read_text()
    (place,) = set(re.findall(r"KVCONNECTOR_PATHS_SHARED_FOLDER, value: (\S+)}", text))
    assert f"mountPath: {place}}}" in text
    return place


def load(p, d, name):
    """Load tokens that the producer has leased and published, and check the bytes. Returns the paths that they took."""
    params = p.offer(name, SOURCE, TOKENS)
    later = f"later {name}"
    d.load(later, p.offer(later, [0], 5), [0], 6)
    until(lambda: p.sends(later) & d.receives(later))
    d.load(name, params, TARGET, TOKENS + 1)
    until(lambda: p.sends(name) & d.receives(name))
    assert d.call("failed") == {}
    assert same(p.dense(SOURCE, TOKENS), d.dense(TARGET, TOKENS))
    return d.call("paths")[name]
