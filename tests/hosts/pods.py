"""Engines in containers of one node: each has namespaces of its own, and one folder is mounted in all of them."""

import re
import threading
from pathlib import Path

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump.machine import Machine
from tests.integration.runtime_pair import Engine, keyed_controls, same, until
from tests.support.remote import RemoteObject
from tests.support.waiting import DEADLINE_S

MANIFEST = Path(__file__).parents[2] / "docs/kubernetes.md"
TOKENS, SOURCE, TARGET = 30, [9, 3], [5, 6]


class PodEngine(Engine):
    """An engine whose next direct read can be held after it found its lease, while nothing moves inline."""

    def sends(self, name):
        self.step()
        return name in self.sent

    def receives(self, name):
        self.step()
        self.workers[0].wait(0.01)
        return name in self.received

    def hold_next_read(self):
        found, original = threading.Event(), RemotePools.is_published
        self._may_go_on = threading.Event()

        def is_published(pools, *arguments):
            answer = original(pools, *arguments)
            if answer and not found.is_set():
                found.set()
                assert self._may_go_on.wait(DEADLINE_S)
            return answer

        self._found, RemotePools.is_published = found, is_published
        Machine.try_acquire = lambda machine, limit_s: False

    def is_reading(self):
        return self._found.wait(DEADLINE_S)

    def go_on(self):
        self._may_go_on.set()


class Pods:
    """A consumer "d" and producers in containers, which name the volume unless `folder` says otherwise."""

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
    """Where the documented manifest mounts the volume, which is what it sets `paths.shared_folder` to."""
    text = MANIFEST.read_text()
    (place,) = set(re.findall(r"KVCONNECTOR_PATHS_SHARED_FOLDER, value: (\S+) }", text))
    assert f"mountPath: {place} }}" in text
    return place


def begin_load(p, d, name, *, is_held=False):
    """Begin to load tokens that the producer has leased and published. `is_held`: up to where their lease is found."""
    params = p.offer(name, SOURCE, TOKENS)
    later = f"later {name}"
    d.load(later, p.offer(later, [0], 5), [0], 6)
    until(lambda: p.sends(later) | d.receives(later))
    until(lambda: p.sends(later))
    if is_held:
        d.hold_next_read()
    d.load(name, params, TARGET, TOKENS + 1)
    assert not is_held or d.is_reading()


def load(p, d, name):
    """Load them, check the bytes, and return the paths by which they came."""
    begin_load(p, d, name)
    until(lambda: p.sends(name) & d.receives(name))
    assert d.call("failed") == {}
    assert same(p.dense(SOURCE, TOKENS), d.dense(TARGET, TOKENS))
    return d.call("paths")[name]
