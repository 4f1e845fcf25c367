import threading

import pytest

from kvconnector.errors import KVConnectorError, TransferAbortedError
from kvconnector.ids import EngineAddress
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.runtime.outbox import Outbox
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
    WithdrawRequest,
)

BLOCKS = (GroupBlocks.of([1]),)


def hold(name, error=None):
    return HoldRequest(name, name, "5" * 32, BLOCKS, 8, error=error)


def grown(name, blocks=BLOCKS):
    return GrowRequest(name, name, "5" * 32, blocks, Watermark(8))


def load(name):
    return LoadRequest(name, (), (), ())


def follow(name):
    return WantRequest(name, name, "5" * 32, EngineAddress("p", "tcp://p"), is_followed=True)


def test_a_broken_driver_ends_everything_that_the_engine_waits_for():
    outbox = Outbox()
    outbox.expect([load("a"), load("b"), hold("r"), follow("f"), follow("g")])
    outbox.expect([DropRequest("g")])
    outbox.load_ended("a")
    outbox.take()
    outbox.break_off(KVConnectorError("broken"))
    outbox.expect([load("late"), hold("s")])
    output = outbox.take()
    assert set(output.failed_sending) == output.finished_sending == {"r", "s"}
    assert set(output.failed_recving) == output.finished_recving == {"b", "late"}
    assert output.producer_started == {"f"}


def test_a_broken_driver_with_running_copies_ends_only_requests_without_blocks():
    outbox = Outbox()
    outbox.expect([load("a"), hold("r"), follow("f")])
    outbox.break_off(KVConnectorError("broken"), may_write=True)
    # later orders were never given to the driver
    outbox.expect([load("late"), hold("s")])
    output = outbox.take()
    assert output.finished_sending == {"s"}
    assert output.finished_recving == {"late"}
    assert output.producer_started == {"f"}


def test_blocks_whose_copies_go_on_are_never_reported_as_free():
    outbox = Outbox()
    outbox.expect([load("a"), hold("r"), grown("g"), follow("f")])
    outbox.break_off(KVConnectorError("broken"), may_write=True)
    assert outbox.awaited() == ["a", "g", "r"]
    assert outbox.is_filled
    assert outbox.take().stats.failures == {"KVConnectorError": 1}
    # the engine has computed the rest of a prompt for which the driver had a lease
    outbox.expect([hold("g")])
    outbox.give_up()
    assert outbox.take().is_empty
    assert outbox.awaited() == ["a", "g", "r"]


def test_requests_end_once_their_copies_have_although_the_driver_had_failed():
    outbox = Outbox()
    outbox.expect([load("a"), load("b"), hold("r"), hold("s"), grown("g"), grown("h")])
    outbox.break_off(KVConnectorError("stuck"), may_write=True)
    outbox.expect([hold("g")])  # computed to its end meanwhile
    assert outbox.take().finished_recving == set()
    outbox.load_ended("a")  # the driver comes to these before it stops
    outbox.released("r", "released")
    outbox.break_off(KVConnectorError("stuck"))
    output = outbox.take()
    assert output.finished_recving == {"a", "b"}
    assert output.failed_recving.keys() == {"b"}
    assert output.finished_sending == {"r", "s", "g"}
    assert output.failed_sending.keys() == {"s", "g"}
    assert outbox.awaited() == []
    assert outbox.take().is_empty


def test_growing_leases_do_not_wait_for_a_broken_driver():
    outbox = Outbox()
    growing = [grown(name) for name in ("g", "late")]
    outbox.expect(growing[:1])
    outbox.break_off(KVConnectorError("broken"))
    outbox.expect(growing[1:])
    assert outbox.give_up() == []
    assert outbox.awaited() == []
    outbox.expect([hold("g")])
    assert outbox.take().finished_sending == {"g"}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_everything_since_the_last_call_is_taken_at_once(count):
    outbox = Outbox()
    for number in range(count):
        outbox.load_ended(f"w{number}", KVConnectorError(f"reason {number}"))
        outbox.released(f"r{number}", "expired")
    output = outbox.take()
    assert output.finished_recving == {f"w{number}" for number in range(count)}
    assert output.failed_recving == {
        f"w{number}": f"KVConnectorError: reason {number}" for number in range(count)
    }
    assert output.finished_sending == {f"r{number}" for number in range(count)}
    assert output.stats.leases_expired == count
    assert output.stats.failures == ({"KVConnectorError": count} if count else {})
    outbox.read_packed("another host's")
    outbox.producer_started("follower")
    assert outbox.take().stats.packed == {"another host's": 1}
    assert outbox.take().is_empty


def test_refused_orders_end_the_requests_that_the_engine_waits_for():
    outbox = Outbox()
    orders = [load("a"), hold("r"), grown("g"), follow("f"), DropRequest("d")]
    outbox.refuse(orders, KVConnectorError("asleep"))
    output = outbox.take()
    assert output.failed_recving == {"a": "KVConnectorError: asleep"}
    assert output.finished_recving == {"a"}
    assert output.failed_sending == {"r": "KVConnectorError: asleep"}
    assert output.finished_sending == {"r"}
    assert output.producer_started == {"f"}


def test_the_engine_learns_why_a_lease_was_aborted():
    outbox = Outbox()
    outbox.expect([hold(name) for name in ("read", "given up", "torn")])
    outbox.released("read", "released")
    unwanted = TransferAbortedError("nobody wants it")
    outbox.released("given up", "aborted", error=unwanted)
    outbox.released("torn", "aborted", error=KVConnectorError("a bug"))
    output = outbox.take()
    assert output.finished_sending == {"read", "given up", "torn"}
    assert output.failed_sending == {
        "given up": f"TransferAbortedError: {unwanted}",
        "torn": "KVConnectorError: a bug",
    }
    assert output.stats.failures == {"KVConnectorError": 1}  # to give up is no failure


def test_prompts_that_are_withdrawn_from_their_blocks_are_named():
    """The engine fills only blocks anew, and waits for none of a queued prompt."""
    outbox = Outbox()
    outbox.expect([grown("queued", blocks=()), grown("started"), hold("held")])
    withdrawn = [
        WithdrawRequest(name) for name in ("queued", "started", "held", "unknown", "started")
    ]
    assert outbox.expect(withdrawn) == ["started"]


class Stepped(Outbox):
    """An outbox whose engine takes a step while the driver's thread ends the first request."""

    def __init__(self):
        super().__init__()
        self.engine = threading.Thread(target=self._step)
        self.taken = []

    def _step(self):
        self.expect([load("new")])
        self.taken.append(self.take())

    def load_ended(self, *arguments):
        if self.engine.ident is None:
            self.engine.start()
            self.engine.join(0.2)
        super().load_ended(*arguments)


def test_a_broken_driver_ends_each_request_once_although_the_engine_takes_a_step_meanwhile():
    outbox = Stepped()
    outbox.expect([load("a"), hold("r")])
    outbox.break_off(KVConnectorError("broken"))
    outbox.engine.join()
    outputs = [*outbox.taken, outbox.take()]
    assert sorted(name for each in outputs for name in each.finished_recving) == ["a", "new"]
    assert [name for each in outputs for name in each.finished_sending] == ["r"]


def test_abandoned_requests_end_and_loads_among_them_do_not_count():
    outbox = Outbox()
    outbox.expect([load("a"), load("b"), hold("r"), grown("g"), follow("f"), load("over")])
    outbox.expect([grown("queued", blocks=())])  # touches no memory
    outbox.load_ended("over", extra=b"token")  # the engine does not know it yet
    outbox.load_ended("failed", KVConnectorError("lost"), filled_tokens=8)
    orders = outbox.give_up()
    assert orders[:3] == [DropRequest("a"), DropRequest("b"), WithdrawRequest("r")]
    # the session does not report the end of a lease that is not complete
    assert orders[3:] == [hold("g"), WithdrawRequest("g")]
    assert outbox.awaited() == ["a", "b", "g", "r"]
    outbox.load_ended("a", extra=b"token")
    # what it has read counts no more: its blocks lose their memory
    outbox.load_ended("b", KVConnectorError("dropped"), filled_tokens=8)
    outbox.released("r", "aborted")
    outbox.released("g", "aborted")
    assert outbox.awaited() == []
    assert outbox.is_waiting  # for the prompt that is followed
    output = outbox.take()
    assert output.failed_recving.keys() == output.finished_recving
    assert output.stats.failures["TransferAbortedError"] == 2  # of "over" and "a"
    assert output.finished_recving == {"a", "b", "over", "failed"}
    assert (output.extras, output.filled_tokens) == ({}, {})
    assert output.finished_sending == {"r"}
    # names may be used again
    outbox.expect([load("a"), hold("g")])
    outbox.load_ended("a", extra=b"token")
    outbox.released("g", "released")
    output = outbox.take()
    assert (output.finished_recving, output.failed_recving) == ({"a"}, {})
    assert output.extras == {"a": b"token"}
    assert output.finished_sending == {"g"}


@pytest.mark.parametrize("spin_s", [0.0, 0.05], ids=["sleeps", "spins"])
@pytest.mark.parametrize("delay_s", [0.0, 0.2], ids=["while it looks", "while it sleeps"])
def test_a_report_ends_a_wait_and_counts_until_it_is_taken(spin_s, delay_s):
    outbox = Outbox(spin_s)
    for name in ("a", "b"):
        assert not outbox.wait(0.1)
        timer = threading.Timer(delay_s, outbox.load_ended, [name])
        timer.start()
        assert outbox.wait(3600.0)  # if nothing ends it, the test's own timeout does
        assert outbox.wait(0.0)
        assert outbox.take().finished_recving == {name}
        timer.join()


def test_two_threads_may_note_exceptions_at_the_same_time():
    """The engine's, which checks orders, and the driver's. The log that folds them is for one thread at a time."""
    outbox, inside, both = Outbox(), [], threading.Event()

    class OneAtATime:
        def warn(self, key, text):
            inside.append(text)
            if len(inside) == 2:
                both.set()
            elif len(inside) == 1 and other.ident is None:
                other.start()
                assert not both.wait(0.2), "another thread is in there"
            inside.pop()

    outbox._bugs = OneAtATime()
    other = threading.Thread(target=outbox.note_contained, args=("b", RuntimeError("b")))
    outbox.note_contained("a", RuntimeError("a"))
    other.join()
    assert outbox.take().stats.contained == {"RuntimeError": 2}
