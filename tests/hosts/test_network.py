"""The hosts themselves: nothing reaches across but by the switch, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import demo
from tests.hosts.network import Network, descendants

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]


def test_hosts_share_nothing_but_the_switch(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    assert [host.run(["hostname"]).strip() for host in (a, b)] == ["a", "b"]
    a.run(["touch", "/dev/shm/mine"])
    assert b.run(["ls", "/dev/shm"]) == ""
    assert not Path("/dev/shm/mine").exists()
    a.start(["sleep", "77"])
    assert [host.run(["ps", "ax"]).count("sleep 77") for host in (a, b)] == [1, 0]


@pytest.mark.usefixtures("hosts_available")
def test_everything_ends_with_its_maker() -> None:
    program = (
        "from tests.hosts.network import Network\n"
        "network = Network()\n"
        "network.host('a').start(['sleep', '100'])\n"
        "print('made', flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=environment) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        made = descendants(maker.pid)
        assert len(made) >= 5
        maker.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in made):
        assert time.monotonic() < deadline, "a process of a host was left"
        time.sleep(0.02)


def test_the_demo_on_hosts_says_why_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "missing", lambda: "hosts need root")
    assert demo.main() == 2
    assert capsys.readouterr().err == "scripts/demo --hosts: hosts need root\n"
