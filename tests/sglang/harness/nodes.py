"""Engines on nodes of their own: hosts made of namespaces, joined by a switch, which share a file system and no memory.

An engine on several nodes is one server for each, as an operator starts them: `--nnodes`, `--node-rank` and the first
one's address. Only the first answers requests.
"""

import ctypes
import os
from contextlib import contextmanager
from dataclasses import replace

from tests.hosts.network import Network
from tests.sglang.harness.engine import Engine, run_engine
from tests.support.engine_process import EngineProcess, end_with_parent
from tests.support.ports import free_ports

NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
WILDCARD = "0.0.0.0"  # noqa: S104


@contextmanager
def hosts_of(nodes):
    """Make hosts for each side of a case that names how many it has, and yield `{side: Nodes}`."""
    with Network() as network:
        found = {}
        for side, count in nodes.items():
            hosts = [network.host(f"{side}{number}") for number in range(count)]
            for host in hosts:  # by which SGLang finds a host's address
                host.run(["ip", "route", "add", "default", "via", network.address])
            found[side] = Nodes(network, hosts)
        yield found


class Nodes:
    """The hosts of one engine, on `network`. A router and peers use the first one's address."""

    def __init__(self, network, hosts):
        self.network, self.hosts = network, hosts
        self.address = hosts[0].address
        self._port = free_ports()

    def options(self, number, *, is_wildcard):
        """Return the options of the server on `hosts[number]`, which listens at all addresses of its host, if
        `is_wildcard`, or at the one that others know.
        """
        host = {"host": WILDCARD if is_wildcard else self.hosts[number].address}
        if len(self.hosts) == 1:
            return host
        place = {"nnodes": len(self.hosts), "node-rank": number}
        return host | place | {"dist-init-addr": f"{self.address}:{self._port}"}


class EngineOnNodes(Engine):
    """The servers of one engine, on the hosts of `spec.nodes`. All are killed together. `logs`: of each server."""

    def __init__(self, spec, port=None):
        self.spec = spec
        self.port = port or free_ports()
        self.address = spec.nodes.address
        others = range(1, len(spec.nodes.hosts))
        self.logs = [spec.log, *(spec.log.with_stem(f"{spec.log.stem}-{each}") for each in others)]
        self._others = [
            EngineProcess(replace(spec, log=self.logs[each]), *self._program(each))
            for each in others
        ]
        EngineProcess.__init__(self, spec, *self._program(0))

    def _program(self, number):
        """Return the function that runs a server, and its arguments. The two sides listen in different ways."""
        spec, is_prefill = self.spec, self.spec.options["disaggregation-mode"] == "prefill"
        placed = spec.nodes.options(number, is_wildcard=is_prefill)
        spec = replace(spec, options={**spec.options, **placed})
        arguments = [*spec.arguments, "--port", str(self.port)]
        return run_on, spec.nodes.hosts[number].pid, arguments, spec.dumps, spec.device.kind

    def request(self, path, body, headers=()):
        """Send a request from beside the switch."""
        with self.spec.nodes.network.inside():
            return super().request(path, body, headers)

    @property
    def has_ended(self):
        """Returns True once the first process of any node is gone."""
        return super().has_ended or any(each.has_ended for each in self._others)

    def pause(self):
        """Stop the processes of all nodes."""
        for each in self._others:
            each.pause()
        super().pause()

    def resume(self):
        """Let them go on."""
        for each in self._others:
            each.resume()
        super().resume()

    def kill(self):
        """End the processes of all nodes."""
        for each in self._others:
            each.kill()
        super().kill()


def run_on(holder, *arguments):
    """Run an engine's server in the namespaces of process `holder`, until it ends."""
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    places = [os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    for place in places:
        if libc.setns(place, 0):
            raise OSError(ctypes.get_errno(), "setns failed")
        os.close(place)
    os.chdir(folder)  # another mount namespace begins at its root
    child = os.fork()  # only children are in another namespace of processes
    if child:
        os.waitpid(child, 0)
        return
    end_with_parent()
    run_engine(*arguments)
