from __future__ import annotations

from kvconnector.errors import BlockIdError, KVConnectorError, PeerLostError
from kvconnector.runtime.outbox import Outbox
from kvconnector.session import events as ev


def hold(name, error=None):
    return ev.Granted(name, name, "5" * 32, (), 8, error=error)


def load(name):
    return ev.LoadAsked(name, (), (), ())


def test_results_are_taken_once():
    outbox = Outbox()
    assert not outbox.wait(0.0)
    outbox.released("r", "expired")
    outbox.loaded("a", None)
    outbox.failed("b", PeerLostError("gone"))
    assert outbox.wait(0.0)
    output = outbox.take()
    assert output.finished_sending == {"r"}
    assert output.finished_recving == {"a", "b"}
    assert output.failed_recving == {"b": "PeerLostError: gone"}
    assert (output.stats.leases_expired, output.stats.failures) == (1, {"PeerLostError": 1})
    assert not outbox.wait(0.0)
    assert outbox.take().is_empty


def test_a_lease_that_was_refused_is_reported_as_sent_with_its_reason():
    outbox = Outbox()
    outbox.expect([hold("good"), hold("bad", BlockIdError("too far"))])
    assert outbox.take().is_empty
    outbox.released("bad", "aborted")
    output = outbox.take()
    assert output.finished_sending == {"bad"}
    assert output.failed_sending == {"bad": "BlockIdError: too far"}
    assert output.stats.failures == {"BlockIdError": 1}
    outbox.released("good", "released")
    assert outbox.take().failed_sending == {}


def test_a_broken_driver_ends_all_that_the_engine_waits_for():
    outbox = Outbox()
    outbox.expect([load("a"), load("b"), hold("r")])
    outbox.loaded("a", None)
    outbox.take()
    outbox.break_off(KVConnectorError("broken"))
    outbox.expect([load("late"), hold("s")])
    output = outbox.take()
    assert output.finished_sending == {"r", "s"}
    assert set(output.failed_recving) == output.finished_recving == {"b", "late"}
