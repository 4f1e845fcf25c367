"""`scripts/demo --hosts`: the demo on two hosts made of namespaces, with keys."""

import contextlib
import io
import json
import sys
import tempfile
from itertools import count
from pathlib import Path

from minillm import demo
from tests.hosts.engines import HTTP_PORT, Servers
from tests.hosts.network import Network, missing


class DemoServers(Servers):
    """The demo's servers. The decode engine that reads directly is on the prefill engine's host, the other is not."""

    def __init__(self, network, folder):
        super().__init__(network, folder)
        p, d = (network.host(name) for name in ("p", "d"))
        self._places = {"prefill-0": p, "decode-direct": p, "decode-packed": d, "reference": d}
        self._ports = count(HTTP_PORT)
        with contextlib.redirect_stdout(io.StringIO()):
            self.keys(*self._places)

    async def start_engine(self, name, role, arguments):
        # the connector's default timeouts, since nothing should fail here
        sections = {"peer": {}, "lease": {}}
        if role == "decode":
            *arguments, _, connector = arguments
            sections |= json.loads(connector)
        place, port = self._places[name], next(self._ports)
        return self.engine(place, name, role, *arguments, port=port, **sections)

    async def start_router(self, name, prefill, decode):
        return self.router(self.network, name, [prefill], [decode], next(self._ports))


def main():
    """Run the demo. Returns its exit status, 2 if hosts cannot be made."""
    if reason := missing():
        sys.stderr.write(f"scripts/demo --hosts: {reason}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, Network() as network, network.inside():
        return demo.main(DemoServers(network, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
