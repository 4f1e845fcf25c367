"""What a driver leaves for its thread after inline progress, and what its sessions hear."""

from kvconnector.errors import KVConnectorError
from kvconnector.session import events as ev
from kvconnector.session.orders import LoadRequest
from tests.support.fakes import FakeEngine, attention_model
from tests.support.world import World

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=2)


def test_a_read_that_ended_is_not_left_behind_when_another_request_ends_first(monkeypatch):
    world = World()
    (worker,) = world.start(FakeEngine("d", MODEL), role="consumer").workers
    driver, ended = worker.driver, [ev.ReceiveFinished(1, seconds=1.0)]
    monkeypatch.setattr(driver.datapath, "step", lambda: [ended.pop()] if ended else [])
    # nobody has asked for it, so it fails at once
    driver.submit(LoadRequest("unknown", (), (), ()))
    driver.progress_inline(worker.outbox.is_filled)
    assert worker.poll().failed_recving.keys() == {"unknown"}
    # the driver's thread does not sleep on it
    assert driver.num_queued
    world.close()


def test_a_session_that_refuses_a_tick_keeps_it_from_no_other(monkeypatch):
    world = World()
    (worker,) = world.start(FakeEngine("e", MODEL), role="both").workers
    driver, heard = worker.driver, []

    def refuse(event, now):
        raise KVConnectorError("a bug")

    monkeypatch.setattr(driver.producer, "handle", refuse)
    monkeypatch.setattr(driver.consumer, "handle", lambda event, now: heard.append(event) or [])
    driver.submit(ev.Tick())
    driver.turn(0.0)
    assert ev.Tick() in heard
    world.close()
