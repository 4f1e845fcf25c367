"""Faults between engines on several hosts: each is injected in a phase of a request, and becomes a row of a table."""

import asyncio
import os
import re
import signal
import statistics
import time
from pathlib import Path

from minillm.client import CompletionError
from tests.integration.minillm_engines import answered, prompt_of, wait_all_blocks_free

PROMPT_TOKENS, SHORT_PROMPT_TOKENS, MAX_TOKENS = 700, 20, 4
MIN_OTHERS = 30
READ_BYTES = (PROMPT_TOKENS - 1) * 8 * 1024
LINK_MBIT = 30
RECOVERY_S = 60.0
UCX_COMPLAINT = re.compile(
    r"UCX +(WARN|ERROR|FATAL)|UCX reports|Segmentation|Caught signal", re.ASCII
)


class Cluster:
    """A producer "p" and two consumers, each on a host of its own, and for each consumer a router on its own host."""

    def __init__(self, servers):
        self.servers = servers
        self.hosts = {name: servers.network.host(name) for name in ("p", "d1", "d2", "r1", "r2")}
        self.running = {}
        servers.keys("p", "d1", "d2")

    @classmethod
    async def start(cls, servers):
        self = cls(servers)
        for names in (("p", "d1", "d2"), ("r1", "r2")):
            self.running |= {name: self._server(name) for name in names}
            await servers.wait_healthy(*self.running.values())
        self.hosts["d1"].limit(LINK_MBIT)
        return self

    def _server(self, name):
        host = self.hosts[name]
        if name == "p":
            return self.servers.engine(host, name, "prefill", "--engine", "block=16")
        if name in ("d1", "d2"):
            options = ["--engine", "block=16,prefix=off", "--failure-policy", "fail"]
            return self.servers.engine(host, name, "decode", *options)
        consumer = self.running[name.replace("r", "d")]
        return self.servers.router(host, name, [self.running["p"]], [consumer])

    async def repair(self):
        """Restore links, and restart engines that have died, under the same engine ids."""
        for host in self.hosts.values():
            host.restore()
        for name, server in self.running.items():
            if not (server.child.is_running and await server.is_healthy(self.servers.session)):
                await server.stop()
                self.running[name] = self._server(name)
        await self.servers.wait_healthy(*self.running.values())


def cut(seconds):
    """Cut the first consumer's link for some seconds, or with 0 for good."""

    async def act(cluster):
        cluster.hosts["d1"].cut()
        if seconds:
            await asyncio.sleep(seconds)
            cluster.hosts["d1"].restore()

    return act


def stop(name, seconds):
    """Stop the ranks of an engine, and resume them later."""

    async def act(cluster):
        pids = cluster.running[name].ranks()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            await asyncio.sleep(seconds if number == signal.SIGSTOP else 0)

    return act


def kill(name, *, ranks_only=False):
    """Kill a server, or only its ranks."""

    async def act(cluster):
        server = cluster.running[name]
        for pid in server.ranks() if ranks_only else server.process.pids():
            os.kill(pid, signal.SIGKILL)

    return act


FAULTS = {
    "link cut for 3 s": cut(3),
    "link cut for good": cut(0),
    "producer stopped for 3 s": stop("p", 3),
    "consumer stopped for 3 s": stop("d1", 3),
    "producer stopped for 60 s": stop("p", 60),
    "consumer stopped for 60 s": stop("d1", 60),
    "producer rank killed": kill("p", ranks_only=True),
    "consumer rank killed": kill("d1", ranks_only=True),
    "producer killed and restarted": kill("p"),
    "consumer killed and restarted": kill("d1"),
    "router gone": kill("r1"),
}
"""The faults that requests of another consumer may notice: only the producer's."""


def received_bytes(host):
    """Return the bytes that the host's eth0 has received."""
    counters = Path(f"/proc/{host.pid}/root/sys/class/net/eth0/statistics")
    return int((counters / "rx_bytes").read_text())


SHARES = {"idle": 0.0, "greeting": 0.0, "reading": 0.4, "after the read": 1.0}
"""Share of a read's bytes that have arrived when a phase begins."""


async def wait_phase(cluster, phase, before, request):
    """Wait until the first consumer's request is in this phase, by the bytes that its host has received, or over."""
    share = SHARES[phase]
    while not request.done():
        received = received_bytes(cluster.hosts["d1"]) - before
        if phase == "idle" or received > 1000 + share * READ_BYTES:
            return
        await asyncio.sleep(0.001)


HEADINGS = (
    "fault",
    "phase",
    "the client saw",
    "answered after, s",
    "others before, p50 / p99, s",
    "others meanwhile, p50 / p99, s",
    "others failed",
    "next request served after, s",
    "UCX's complaints",
)


def table(rows):
    """The faults as a Markdown table. It shows no wrong tokens: these fail the run."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


async def ask(cluster, index, num_tokens=PROMPT_TOKENS):
    """Send a request through a consumer's router. Returns "right tokens" or the client's error; wrong tokens fail."""
    router, prompt = cluster.running[f"r{index + 1}"], prompt_of(num_tokens, index)
    try:
        await answered(cluster.servers, router, prompt, MAX_TOKENS)
    except CompletionError as error:
        words = re.sub(r"http://\S+", "it", str(error))
        found = re.search(r'"message": ?"([^"\\]*)', words)
        return (found.group(1) if found else words)[:90].replace("|", "/").replace("\n", " ")
    return "right tokens"


class Others:
    """The second consumer's short requests, one after the other: seconds of those that were served, and errors."""

    def __init__(self):
        self.seconds = []
        self.errors = []

    async def ask(self, cluster, is_over):
        """Send requests until `is_over`, and enough of them for a percentile."""
        while len(self.seconds) + len(self.errors) < MIN_OTHERS or not is_over():
            began_s = time.monotonic()
            outcome = await ask(cluster, 1, SHORT_PROMPT_TOKENS)
            if outcome == "right tokens":
                self.seconds.append(time.monotonic() - began_s)
            else:
                self.errors.append(outcome)
                await asyncio.sleep(0.05)
        return self

    def __str__(self):
        if len(self.seconds) < 2:
            return "none"
        percentiles = statistics.quantiles(self.seconds, n=100, method="inclusive")
        return f"{percentiles[49]:.3f} / {percentiles[98]:.3f}"


def count_complaints(folder):
    """Lines of UCX's warnings and errors in all logs so far."""
    return sum(len(UCX_COMPLAINT.findall(log.read_text())) for log in folder.glob("*.log"))


async def inject(cluster, name, phase):
    """Inject a fault in a phase of a request, and check that the engines recover. Returns a row of the table."""
    complaints = count_complaints(cluster.servers.folder)
    request = asyncio.ensure_future(ask(cluster, 0))
    others_before = await Others().ask(cluster, request.done)
    assert await request == "right tokens"
    assert not others_before.errors, others_before.errors
    if phase == "greeting":
        # a consumer that has greeted no producer
        await cluster.running["d1"].stop()
        await cluster.repair()
    before = received_bytes(cluster.hosts["d1"])
    request = asyncio.ensure_future(ask(cluster, 0))
    await wait_phase(cluster, phase, before, request)
    injected_s = time.monotonic()
    fault_ends = asyncio.ensure_future(FAULTS[name](cluster))
    told_at = []
    request.add_done_callback(lambda _: told_at.append(time.monotonic()))
    others = await Others().ask(cluster, lambda: request.done() and fault_ends.done())
    outcome = await request
    await fault_ends
    if not name.startswith("producer"):
        assert not others.errors, others.errors
    await cluster.repair()
    repaired_s = time.monotonic()
    while (again := await ask(cluster, 0)) != "right tokens":
        assert time.monotonic() < repaired_s + RECOVERY_S, again
    recovery_s = time.monotonic() - repaired_s
    engines = (cluster.running[each] for each in ("p", "d1", "d2"))
    await wait_all_blocks_free(cluster.servers, *engines)
    failed = f"{len(others.errors)} of {len(others.errors) + len(others.seconds)}"
    return (
        name,
        phase,
        outcome,
        f"{max(0.0, told_at[0] - injected_s):.1f}",
        str(others_before),
        str(others),
        failed,
        f"{recovery_s:.1f}",
        str(count_complaints(cluster.servers.folder) - complaints),
    )
