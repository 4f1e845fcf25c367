"""`scripts/demo --hosts`: the demo on two hosts made of namespaces, with keys."""

import contextlib
import io
import sys
import tempfile
from itertools import count
from pathlib import Path

from minillm import demo
from tests.hosts.engines import HTTP_PORT, Servers
from tests.hosts.network import Network, missing

PATIENT = {"peer": {}, "lease": {}}
"""The connector's own timeouts: nothing is to fail here."""


async def start(servers, arguments):
    """The decode engine that reads directly is on the prefill engine's host, the other one on a host of its own."""
    ports = count(HTTP_PORT)
    p, d = (servers.network.host(name) for name in ("p", "d"))
    places = {"direct": p, "packed": d}
    with contextlib.redirect_stdout(io.StringIO()):
        servers.keys("prefill-0", "reference", *(f"decode-{path}" for path in places))
    prefill = servers.engine(
        p,
        "prefill-0",
        "prefill",
        *demo.engine_arguments(arguments, arguments.prefill, 0),
        port=next(ports),
        **PATIENT,
    )
    decodes = {
        path: servers.engine(
            host,
            f"decode-{path}",
            "decode",
            *demo.engine_arguments(arguments, arguments.decode, 0),
            port=next(ports),
            **PATIENT,
        )
        for path, host in places.items()
    }
    options = demo.engine_arguments(arguments, "block=16", 0)
    reference = servers.engine(d, "reference", "mono", *options, port=next(ports), **PATIENT)
    await servers.wait_healthy(prefill, *decodes.values(), reference)
    routers = {
        path: servers.router(servers.network, f"router-{path}", [prefill], [decode], next(ports))
        for path, decode in decodes.items()
    }
    await servers.wait_healthy(*routers.values())
    return demo.Servers(decodes, routers, reference)


def main():
    """The demo's exit status; 2 where there can be no hosts."""
    if reason := missing():
        sys.stderr.write(f"scripts/demo --hosts: {reason}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, Network() as network, network.inside():
        return demo.main(Servers(network, Path(folder)), start)


if __name__ == "__main__":
    sys.exit(main())
