"""minillm's servers on hosts: each engine with CURVE keys of its own, on the address of its host."""

import asyncio
import json
import os
import shlex
import signal
import sys

from kvconnector.cli import main
from minillm import cluster
from minillm.processes import Child

HTTP_PORT = 8000
STOP_GRACE_S = 15.0
QUICK = {
    "peer": {
        "heartbeat_interval_s": 0.5,
        "timeout_s": 3,
        "transfer_timeout_s": 4,
        "backoff_initial_s": 0.1,
        "backoff_max_s": 0.5,
    },
    "lease": {"duration_s": 6, "early_read_s": 1},
}
"""Settings with which faults are noticed within seconds."""
_SPREAD = (
    "import runpy, sys; sys.executable, module = sys.argv[1:3]; del sys.argv[1:3];"
    " runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
"""Runs a module whose children are started by another program than Python."""


class Server(cluster.Server):
    """One server on a host."""

    def __init__(self, url, name, process, log):
        super().__init__(Child(name, process, log), url=url)
        self.process = process

    def ranks(self):
        """The process ids of an engine's ranks, as seen from outside their namespace."""
        return self.process.pids()[1:]

    async def stop(self):
        """SIGTERM, and SIGKILL if that does not end it."""
        self.process.signal(signal.SIGTERM)
        kill_s = asyncio.get_running_loop().time() + STOP_GRACE_S
        while self.child.is_running:
            if asyncio.get_running_loop().time() > kill_s:
                self.process.signal(signal.SIGKILL, all_below=True)
            await asyncio.sleep(0.02)


class Servers(cluster.Cluster):
    """The servers of a test, stopped at its end. Their keys are made by `kvconnector keygen`, as by an operator."""

    def __init__(self, network, folder):
        super().__init__(folder)
        self.network = network
        self.folder = folder
        self._keys = {}
        self._started = []

    async def stop(self, names):
        await asyncio.gather(*(server.stop() for server in self._started))

    def keys(self, *names):
        """Make a key pair for each engine, and let all of them talk to one another."""
        for name in names:
            self._keys[name] = self.folder / f"keys-{name}"
            assert main(["keygen", str(self._keys[name])]) == 0
        publics = [(path / "curve.public").read_text().strip() for path in self._keys.values()]
        for path in self._keys.values():
            (path / "authorized_clients").write_text("\n".join(publics) + "\n")

    def engine(self, host, name, role, *arguments, port=HTTP_PORT, **sections):
        """Start an engine; `role` is prefill, decode or mono. `sections` are further settings of its connector."""
        options = self._options(host.address, name, sections)
        module = "minillm.server" if role == "mono" else f"minillm.{role}_server"
        return self._start(host, name, ["-m", module], [*options, *arguments], port)

    def spread_engine(self, hosts, name, role, *arguments):
        """Start an engine whose server is beside the switch and whose ranks each have a host of their own."""
        python = self.folder / f"{name}-python"
        cases = ""
        for rank, host in enumerate(hosts):
            settings = ["-u", "MINILLM_PARENT_PID", f"KVCONNECTOR_CONTROL_HOST={host.address}"]
            prefix = shlex.join(host.command(["env", *settings, sys.executable]))
            cases += f'{rank}) exec {prefix} "$@" ;;\n'
        # the rank's number is the last argument
        python.write_text(f"#!/bin/sh\nfor rank; do :; done\ncase $rank in\n{cases}esac\n")
        python.chmod(0o755)
        options = self._options(self.network.address, name, {})
        program = ["-c", _SPREAD, str(python), f"minillm.{role}_server"]
        return self._start(self.network, name, program, [*options, *arguments])

    def router(self, host, name, prefill, decode, port=HTTP_PORT):
        options = [word for server in prefill for word in ("--prefill", server.url)]
        options += [word for server in decode for word in ("--decode", server.url)]
        return self._start(host, name, ["-m", "minillm.router"], options, port)

    def _options(self, address, name, sections):
        control = {
            "host": address,
            "secret_key_file": str(self._keys[name] / "curve.secret"),
            "authorized_clients_file": str(self._keys[name] / "authorized_clients"),
        }
        connector = json.dumps({**QUICK, "control": control, **sections})
        return ["--engine-id", name, "--log-dir", str(self.folder), "--connector", connector]

    def _start(self, place, name, program, options, port=HTTP_PORT):
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(self.folder)  # a killed server leaves files there
        argv = [sys.executable, *program, "--host", place.address, "--port", str(port)]
        with log.open("ab") as output:
            process = place.start(
                [*argv, *options], stdout=output, stderr=output, env=environment, cwd=self.folder
            )
        self._started.append(server := Server(f"http://{place.address}:{port}", name, process, log))
        return server
