from kvconnector.errors import KVConnectorError
from kvconnector.ids import EngineAddress
from kvconnector.runtime.outbox import Outbox
from kvconnector.session.orders import DropRequest, HoldRequest, LoadRequest, WantRequest


def hold(name, error=None):
    return HoldRequest(name, name, "5" * 32, (), 8, error=error)


def load(name):
    return LoadRequest(name, (), (), ())


def follow(name):
    return WantRequest(name, name, "5" * 32, EngineAddress("p", "tcp://p"), is_followed=True)


def test_a_broken_driver_ends_all_that_the_engine_waits_for():
    outbox = Outbox()
    outbox.expect([load("a"), load("b"), hold("r"), follow("f"), follow("g")])
    outbox.expect([DropRequest("g")])
    outbox.loaded("a")
    outbox.take()
    outbox.break_off(KVConnectorError("broken"))
    outbox.expect([load("late"), hold("s")])
    output = outbox.take()
    assert output.finished_sending == {"r", "s"}
    assert set(output.failed_recving) == output.finished_recving == {"b", "late"}
    assert output.begun == {"f"}


def test_a_broken_driver_whose_copies_go_on_ends_only_what_has_no_blocks():
    outbox = Outbox()
    outbox.expect([load("a"), hold("r"), follow("f")])
    outbox.break_off(KVConnectorError("broken"), may_write=True)
    # what comes later was never given to the driver
    outbox.expect([load("late"), hold("s")])
    output = outbox.take()
    assert output.finished_sending == {"s"}
    assert output.finished_recving == {"late"}
    assert output.begun == {"f"}
