"""The hosts themselves: what reaches across and what does not, cut links, rates, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network import HostsError, Network, descendants

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

LISTEN = "import socket, sys; socket.create_server((sys.argv[1], 7000)).accept()"
SERVE = """
import contextlib, socket, sys
server = socket.create_server((sys.argv[1], 7001))
print("listening", flush=True)
while True:
    with contextlib.suppress(OSError), server.accept()[0] as peer:
        while peer.send(bytes(1 << 16)): pass
"""
FETCH = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7001), timeout=1)
peer.settimeout(1)
start, count = time.monotonic(), 0
while time.monotonic() < start + 1: count += len(peer.recv(1 << 16))
print(count)
"""


def test_hosts_share_nothing_but_the_switch(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    assert [host.run(["hostname"]).strip() for host in (a, b)] == ["a", "b"]
    a.run(["touch", "/dev/shm/mine"])
    assert b.run(["ls", "/dev/shm"]) == ""
    assert not Path("/dev/shm/mine").exists()
    listener = a.start([sys.executable, "-c", LISTEN, a.address])
    assert "socket" in a.run(["ps", "ax"])
    assert "socket" not in b.run(["ps", "ax"])
    listener.signal(signal.SIGKILL)
    assert listener.popen.wait(10) != 0


def test_a_link_has_its_rate_and_can_be_cut(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    try:
        a.limit(80)
    except HostsError as error:
        pytest.skip(f"this kernel gives links no rate: {error}")
    server = a.start([sys.executable, "-c", SERVE, a.address], stdout=subprocess.PIPE)
    assert server.popen.stdout is not None
    server.popen.stdout.readline()
    fetch = [sys.executable, "-c", FETCH, a.address]
    assert 0.3 * 10e6 < int(b.run(fetch)) < 1.3 * 10e6
    b.cut()
    with pytest.raises(HostsError, match="timed out"):
        b.run(fetch)
    b.restore()
    assert int(b.run(fetch)) > 0
    server.popen.stdout.close()


@pytest.mark.usefixtures("hosts_available")
def test_everything_ends_with_its_maker() -> None:
    program = (
        "from tests.hosts.network import Network\n"
        "network = Network()\n"
        "network.host('a').start(['sleep', '100'])\n"
        "print('made', flush=True)\n"
        "input()\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    maker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert maker.stdout is not None
    assert maker.stdin is not None
    maker.stdout.readline()
    made = descendants(maker.pid)
    assert len(made) >= 5
    maker.kill()
    maker.wait(10)
    maker.stdin.close()
    maker.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in made):
        assert time.monotonic() < deadline, "a process of a host was left"
        time.sleep(0.02)
