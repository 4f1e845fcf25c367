"""Ten thousand requests at once for engines on two hosts: all are served, or all are given up in one step."""

from contextlib import ExitStack, closing

import pytest

from kvconnector.ids import new_secret
from tests.support.remote import RemoteObject

pytestmark = [
    pytest.mark.integration,
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

MANY = 10_000
DEADLINE_S = 200.0


@pytest.fixture
def engines(network):
    with ExitStack() as stack:
        made = []
        for name, role in (("p", "producer"), ("d", "consumer")):
            host = network.host(name)
            maker = "tests.hosts.long_queues:QueueEngine"
            engine = RemoteObject(maker, name, role, host.address, prefix=host.command([]))
            stack.callback(engine.release)
            made.append(stack.enter_context(closing(engine)))
        yield made


def _asked_for(p, d, prefix, *, lead_s):
    """Queue all requests at both engines, at the consumer first."""
    names = [f"{prefix}{number}" for number in range(MANY)]
    secret = new_secret()
    place = p.params()
    d.ask(names, {"do_remote_prefill": True, "transfer_secret": secret, **place})
    d.begin("run_for", lead_s)
    p.run_for(lead_s)
    d.answer()
    p.ask(names, {"do_remote_decode": True, "transfer_secret": secret})
    return names


def test_ten_thousand_requests_in_both_queues_are_all_served(engines):
    p, d = engines
    names = _asked_for(p, d, "r", lead_s=3.0)
    content = p.content()
    p.begin("compute", names, DEADLINE_S)
    unloaded, wrong, failed = d.load_all(names, content, DEADLINE_S)
    assert (unloaded[:3], wrong[:3], failed) == ([], [], {})
    assert p.answer() == []


def test_ten_thousand_requests_aborted_in_one_step_hold_no_blocks(engines):
    p, d = engines
    names = _asked_for(p, d, "g", lead_s=1.0)
    d.begin("run_for", 6.0)  # each one sends a heartbeat
    p.run_for(6.0)
    d.answer()
    d.begin("give_up", names)
    p.run_for(5.0)
    d.answer()
    # a lease lasts 30 s: these would be given back 64 at a time
    assert p.offer_late(names[:1000], 20.0) == []
