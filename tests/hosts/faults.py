"""Faults between engines on several hosts: when each is injected, what it does, and what was seen."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from minillm.client import CompletionError
from tests.hosts.engines import Server, Servers
from tests.hosts.network import Host
from tests.integration.minillm_engines import answered, prompt_of, wait_all_blocks_free

PROMPT_TOKENS, SHORT_PROMPT_TOKENS, MAX_TOKENS = 700, 20, 4
MIN_OTHERS = 30
READ_BYTES = (PROMPT_TOKENS - 1) * 8 * 1024
LINK_MBIT = 30
RECOVERY_S = 60.0
UCX_COMPLAINT = re.compile(r"UCX +(WARN|ERROR|FATAL)|Segmentation|Caught signal", re.ASCII)


@dataclass
class Cluster:
    """A producer and two consumers, each on a host of its own, and a router on its own for either consumer."""

    servers: Servers
    hosts: dict[str, Host]
    producer: Server
    consumers: list[Server]
    routers: list[Server] = field(default_factory=list)

    @classmethod
    async def start(cls, servers):
        hosts = {name: servers.network.host(name) for name in ("p", "d1", "d2", "r1", "r2")}
        servers.keys("p", "d1", "d2")
        self = cls(servers, hosts, _producer(servers, hosts), [])
        self.consumers = [_consumer(servers, hosts, name) for name in ("d1", "d2")]
        await servers.wait_healthy(self.producer, *self.consumers)
        self.routers = [self._router(index) for index in (0, 1)]
        await servers.wait_healthy(*self.routers)
        hosts["d1"].limit(LINK_MBIT)
        return self

    def _router(self, index):
        name = f"r{index + 1}"
        pair = [self.producer], [self.consumers[index]]
        return self.servers.router(self.hosts[name], name, *pair)

    async def repair(self):
        """Restore links, and start what has died, under the same engine id."""
        for host in self.hosts.values():
            host.restore()
        if not await self._serves(self.producer):
            await self.producer.stop()
            self.producer = _producer(self.servers, self.hosts)
        for index, consumer in enumerate(self.consumers):
            if not await self._serves(consumer):
                await consumer.stop()
                self.consumers[index] = _consumer(self.servers, self.hosts, consumer.name)
        for index, router in enumerate(self.routers):
            if not await self._serves(router):
                await router.stop()
                self.routers[index] = self._router(index)
        await self.servers.wait_healthy(self.producer, *self.consumers, *self.routers)

    async def _serves(self, server):
        return server.process.is_running() and await server.is_healthy(self.servers.session)


def _producer(servers, hosts):
    return servers.engine(hosts["p"], "p", "prefill", "--engine", "block=16")


def _consumer(servers, hosts, name):
    options = ["--engine", "block=16,prefix=off", "--failure-policy", "fail"]
    return servers.engine(hosts[name], name, "decode", *options)


def cut(seconds):
    """The first consumer's link is cut; for 0 s: for good."""

    async def act(cluster):
        cluster.hosts["d1"].cut()
        if seconds:
            await asyncio.sleep(seconds)
            cluster.hosts["d1"].restore()

    return act


def stop(pick, seconds):
    """The ranks of an engine are stopped, and go on later."""

    async def act(cluster):
        pids = pick(cluster).ranks()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            await asyncio.sleep(seconds if number == signal.SIGSTOP else 0)

    return act


def kill(pick, *, ranks_only=False):
    """A server, or its ranks alone, are killed."""

    async def act(cluster):
        server = pick(cluster)
        for pid in server.ranks() if ranks_only else server.process.pids():
            os.kill(pid, signal.SIGKILL)

    return act


def _p(cluster):
    return cluster.producer


def _d(cluster):
    return cluster.consumers[0]


FAULTS = {
    "link cut for 3 s": cut(3),
    "link cut for good": cut(0),
    "producer stopped for 3 s": stop(_p, 3),
    "consumer stopped for 3 s": stop(_d, 3),
    "producer stopped for 60 s": stop(_p, 60),
    "consumer stopped for 60 s": stop(_d, 60),
    "producer rank killed": kill(_p, ranks_only=True),
    "consumer rank killed": kill(_d, ranks_only=True),
    "producer killed and restarted": kill(_p),
    "consumer killed and restarted": kill(_d),
    "router gone": kill(lambda cluster: cluster.routers[0]),
}
"""All but those of the producer must not be noticed by a request of another consumer."""


def received_bytes(host):
    """What the host's eth0 has received."""
    counters = Path(f"/proc/{host.pid}/root/sys/class/net/eth0/statistics")
    return int((counters / "rx_bytes").read_text())


SHARES = {"idle": 0.0, "greeting": 0.0, "reading": 0.4, "after the read": 1.0}
"""Of the bytes of a read, which have come when a phase begins."""


async def wait_phase(cluster, phase, before, request):
    """Until the first consumer's request is in this phase, by what has reached its host, or over."""
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
    "told after, s",
    "others before, p50 / p99, s",
    "others meanwhile, p50 / p99, s",
    "others failed",
    "next request served after, s",
    "UCX's complaints",
)


def table(rows):
    """The faults as a Markdown table. A wrong token fails the run, so that none is in it."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


async def ask(cluster, index, num_tokens=PROMPT_TOKENS):
    """One request by a consumer's router: "right tokens", or the error that the client got. Wrong tokens fail."""
    router, prompt = cluster.routers[index], prompt_of(num_tokens, index)
    try:
        answer = await answered(cluster.servers, router, prompt, MAX_TOKENS)
    except CompletionError as error:
        words = re.sub(r"http://\S+", "it", str(error))
        found = re.search(r'"message": ?"([^"\\]*)', words)
        return (found.group(1) if found else words)[:90].replace("|", "/").replace("\n", " ")
    assert (answer.kv_transfer_stats or {}).get("bytes", 0) > 0
    return "right tokens"


class Others:
    """Short requests of the second consumer, one after the other: what those that were served took, and errors."""

    def __init__(self):
        self.seconds = []
        self.errors = []

    async def ask(self, cluster, is_over):
        """Until all is over, and there are enough for a percentile."""
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
    """Inject a fault in a phase of a request, and see that everything is well afterwards: a row of the table."""
    complaints = count_complaints(cluster.servers.folder)
    request = asyncio.ensure_future(ask(cluster, 0))
    others_before = await Others().ask(cluster, request.done)
    assert await request == "right tokens"
    assert not others_before.errors
    if phase == "greeting":
        # one that has met nobody
        await cluster.consumers[0].stop()
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
        assert not others.errors
    await cluster.repair()
    repaired_s = time.monotonic()
    while (again := await ask(cluster, 0)) != "right tokens":
        assert time.monotonic() < repaired_s + RECOVERY_S, again
    recovery_s = time.monotonic() - repaired_s
    await wait_all_blocks_free(cluster.servers, cluster.producer, *cluster.consumers)
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
