"""Engines of several data-parallel ranks: any rank decodes prompts that any other computed."""

from collections import Counter
from contextlib import ExitStack
from itertools import product

from tests.support.ports import free_ports
from tests.vllm.harness.servers import Servers, failures, transfers

BALANCED = 6
"""Number of requests that vLLM's own load balancers spread."""


def one_address(kind="llama", *, prefill, decode, more=""):
    """Return a case: two servers with these numbers of ranks, each at one address. It asks every pair of ranks by name,
    then whichever ranks vLLM's load balancers choose.
    """

    def run(folder, outcome, device):
        sizes = {"prefill": prefill, "decode": decode}
        options = {role: f"--data-parallel-size {size} {more}" for role, size in sizes.items()}
        ranks = {role: [(role, rank) for rank in range(size)] for role, size in sizes.items()}
        with ExitStack() as stack:
            servers = Servers(folder, stack, device, kind, options)
            moved = _every_pair(servers, outcome, ranks)
            for seed in range(100, 100 + BALANCED):
                expected = servers.ask("prefill", seed).tokens
                answer = servers.ask("decode", seed, kv_transfer_params=servers.offer(seed))
                outcome.compare(f"request {seed} as balanced", answer, expected)
            total = sum(transfers(servers.metrics(*rank)) for rank in ranks["decode"])
            outcome.check("all transfers", total, moved + BALANCED)
            failed = [failures(servers.metrics(*rank)) for rank in ranks["decode"]]
            outcome.check("no failure", failed, [{}] * decode)

    return run


def address_per_rank(kind, *, size, more=""):
    """Return a case: both engines have `size` ranks, each a server of its own, which vLLM allows only for models with
    experts.
    """

    def run(folder, outcome, device):
        options, ranks = {}, {}
        for role in ("prefill", "decode"):
            ranks[role] = [(f"{role}-{rank}", rank) for rank in range(size)]
            for name, rank in ranks[role]:
                options[name] = f"--data-parallel-size {size} --data-parallel-rank {rank} {more}"
            # the address at which this engine's ranks find each other
            where = f" --data-parallel-address 127.0.0.1 --data-parallel-rpc-port {free_ports()}"
            options |= {name: options[name] + where for name, _ in ranks[role]}
        with ExitStack() as stack:
            servers = Servers(folder, stack, device, kind, options)
            _every_pair(servers, outcome, ranks)

    return run


def _every_pair(servers, outcome, ranks):
    """Move a prompt from each prefill to each decode rank, given as `(server, rank)`. Returns the number of pairs."""
    pairs = list(product(ranks["prefill"], ranks["decode"]))
    sizes = Counter(server for places in ranks.values() for server, _ in places)

    def number(server, rank):
        # vLLM accepts it only if the server has several ranks
        return rank if sizes[server] > 1 else None

    engines = {}
    for seed, (theirs, ours) in enumerate(pairs):
        expected = servers.ask(theirs[0], seed, number(*theirs)).tokens
        offer = servers.offer(seed, theirs[0], number(*theirs))
        engines.setdefault(theirs, set()).add((offer["remote_engine_id"], offer["remote_port"]))
        answer = servers.ask(ours[0], seed, number(*ours), kv_transfer_params=offer)
        outcome.compare(f"{theirs} to {ours}", answer, expected)
    known = [engine for named in engines.values() for engine in named]
    outcome.check("one name and one port a rank", len(known), len(ranks["prefill"]))
    outcome.check("names", len({name for name, _ in known}), len(known))
    first = known[0][1]
    outcome.check("ports", [port for _, port in known], [first + rank for _, rank in engines])
    counts = [transfers(servers.metrics(*rank)) for rank in ranks["decode"]]
    outcome.check("each rank's /metrics", counts, [len(ranks["prefill"])] * len(counts))
    return len(pairs)
