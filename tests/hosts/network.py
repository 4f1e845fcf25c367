"""Hosts made of Linux namespaces, joined by a switch: each has an address and a name of its own, and shares neither
memory nor processes with the others. Only the file system is common.

They are invisible from outside: the switch has a network namespace of its own. Everything ends with the process that
made it, however that ends.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SUBNETS = ("10.77.0", "10.77.1")
DEADLINE_S = 20.0
CLONE_NEWNET = 0x40000000
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")


class HostsError(Exception):
    """A command of the harness failed; the text is the command's."""


def missing():
    """Returns the reason for which hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "hosts need root, to make network namespaces"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts need {', '.join(absent)} (Debian: apt-get install iproute2 util-linux)"
    probe = "ip link add v0 type veth peer name v1 && ip link add s0 type bridge"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"this kernel makes no network namespaces for us: {tried.stderr.strip()}"
    return None


def descendants(pid):
    """Return all descendants of process `pid`, parents first."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


class HostProcess:
    """A program on a host. `pid` is its process id as seen from outside. `is_child`: of the started program's child."""

    def __init__(self, popen, *, is_child=True):
        self.popen = popen
        self.pid = popen.pid
        deadline = time.monotonic() + DEADLINE_S
        while is_child and not (below := descendants(popen.pid)):
            if popen.poll() is not None or time.monotonic() > deadline:
                raise HostsError(f"{popen.args!r} did not start")
            time.sleep(0.002)
        if is_child:
            self.pid = below[0]

    def pids(self):
        """The process ids of the program and its descendants."""
        return [self.pid, *descendants(self.pid)]

    @property
    def returncode(self):
        return self.popen.poll()

    def signal(self, number, *, all_below=False):
        """Send a signal to the program, or to it and all its descendants."""
        # nsenter stops with its child and must be woken with it
        own = [self.popen.pid] if number == signal.SIGCONT else []
        for pid in [*own, *(self.pids() if all_below else [self.pid])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Host:
    """One host. Its interfaces are eth0 and eth1, each joined to a switch of its own."""

    def __init__(self, network, name, number):
        self.name = name
        self.address = f"{SUBNETS[0]}.{number}"
        self._network = network
        self._number = number
        self._started = []
        mounts = "mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys"
        script = f"hostname {name} && {mounts} && echo ready && exec cat"
        namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
        self._unshare = _start_holder(["unshare", *namespaces, "sh", "-c", script])
        self.pid = descendants(self._unshare.pid)[0]
        self.run(["ip", "link", "set", "lo", "up"])
        self.add_interface(0)

    def command(self, argv):
        """Return the command that runs `argv` on this host."""
        return ["nsenter", f"--target={self.pid}", "--all", "--", *argv]

    def start(self, argv, **options):
        """Start a program on this host; `options` are those of `subprocess.Popen`."""
        self._started.append(popen := subprocess.Popen(self.command(argv), **options))
        return HostProcess(popen)

    def run(self, argv):
        """Run a program on this host to its end. Returns its output."""
        return _run(self.command(argv))

    def add_interface(self, switch):
        """Join the host to switch 0 or 1 by eth0 or eth1. Returns its address there."""
        port, name = f"{self.name}{switch or ''}", f"eth{switch}"
        address = f"{SUBNETS[switch]}.{self._number}"
        peer = ["peer", "name", name, "netns", str(self.pid)]
        self._network.ip(["link", "add", "name", port, "type", "veth", *peer])
        self._network.ip(["link", "set", "dev", port, "master", f"switch{switch}", "up"])
        self.run(["ip", "address", "add", f"{address}/24", "dev", name])
        self.run(["ip", "link", "set", name, "up"])
        return address

    def cut(self):
        """Pull the cable of eth0: packets in flight are lost, and neither end is notified."""
        self._network.ip(["link", "set", "dev", self.name, "nomaster"])

    def restore(self):
        """Put the cable back."""
        self._network.ip(["link", "set", "dev", self.name, "master", "switch0"])

    def limit(self, mbit_per_s):
        """Give eth0 a rate, both ways; `HostsError` if the kernel has no tbf."""
        shaper = ["root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "50ms"]
        self.run(["tc", "qdisc", "replace", "dev", "eth0", *shaper])
        self._network.run(["tc", "qdisc", "replace", "dev", self.name, *shaper])

    def close(self):
        """End every process of the host; its links go with it."""
        _end_holder(self._unshare)
        for popen in self._started:
            popen.wait(DEADLINE_S)


class Network(contextlib.AbstractContextManager):
    """Two switches and the hosts that are joined to them. The switches are 10.77.0.254 and 10.77.1.254."""

    address = f"{SUBNETS[0]}.254"

    def __init__(self):
        self.hosts = {}
        self._unshare = _start_holder(["unshare", "--net", "sh", "-c", "echo ready && exec cat"])
        try:
            self.ip(["link", "set", "lo", "up"])
            for number, subnet in enumerate(SUBNETS):
                self.ip(["link", "add", "name", f"switch{number}", "type", "bridge"])
                self.ip(["address", "add", f"{subnet}.254/24", "dev", f"switch{number}"])
                self.ip(["link", "set", f"switch{number}", "up"])
        except BaseException:
            self.close()
            raise

    def host(self, name):
        """Make a host. Its name must also be valid for a network interface: at most 14 letters."""
        host = self.hosts[name] = Host(self, name, len(self.hosts) + 1)
        return host

    def run(self, argv):
        """Run a program beside the switches. Returns its output."""
        return _run(self.command(argv))

    def start(self, argv, **options):
        """Start a program beside the switches; `options` are those of `subprocess.Popen`."""
        return HostProcess(subprocess.Popen(self.command(argv), **options), is_child=False)

    def command(self, argv):
        """Return the command that runs `argv` beside the switches, where every host can be reached."""
        return ["nsenter", f"--target={self._unshare.pid}", "--net", "--", *argv]

    def ip(self, arguments):
        return self.run(["ip", *arguments])

    @contextlib.contextmanager
    def inside(self):
        """Within this context, sockets that this thread opens reach the hosts, as a client's on the switch would."""
        path = Path(f"/proc/{self._unshare.pid}/ns/net")
        with Path("/proc/thread-self/ns/net").open() as before, path.open() as there:
            _setns(there)
            try:
                yield
            finally:
                _setns(before)

    def close(self):
        """End all hosts and their processes. Idempotent."""
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()
        _end_holder(self._unshare)

    def __exit__(self, kind, error, trace):
        self.close()


def _start_holder(argv):
    """Start a process that keeps its namespaces while its standard input is open: until we end."""
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if holder.stdout.readline() != b"ready\n":
        _end_holder(holder)
        raise HostsError(f"{argv} failed with status {holder.returncode}")
    return holder


def _end_holder(holder):
    holder.stdin.close()
    holder.stdout.close()
    holder.wait(DEADLINE_S)


def _run(argv):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(argv)} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _setns(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def main():
    """Run `scripts/hosts`: make hosts for a shell or a command."""
    parser = argparse.ArgumentParser(
        prog="scripts/hosts",
        description="Makes hosts h1, h2, ... and runs a command beside their switch; they end with it.",
        epilog="There, $h1 is a command's prefix (`$h1 python -m ...` runs on host h1) and $ip1 its address, $second1 "
        "that of eth1; `ip link set dev h1 nomaster` cuts h1 off, `ip link set dev h1 master switch0` joins it again.",
    )
    parser.add_argument("--number", type=int, default=2, help="of hosts; default %(default)s")
    parser.add_argument(
        "--two", action="store_true", help="join all to a second switch by eth1, too"
    )
    parser.add_argument("--mbit", type=int, help="rate of every link, megabits a second")
    parser.add_argument("command", nargs="*", help="default: a shell")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    environment = dict(os.environ)
    with Network() as network:
        for number in range(1, arguments.number + 1):
            host = network.host(f"h{number}")
            if arguments.two:
                environment[f"second{number}"] = host.add_interface(1)
            if arguments.mbit:
                host.limit(arguments.mbit)
            environment[f"h{number}"] = " ".join(host.command([]))
            environment[f"ip{number}"] = host.address
        command = arguments.command or [os.environ.get("SHELL", "bash")]
        return subprocess.run(network.command(command), env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
