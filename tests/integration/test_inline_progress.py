"""The engine's thread makes progress inline, over real UCX and ZMQ."""

import sys
import threading

import pytest

from kvconnector.runtime.driver import Driver
from kvconnector.session.orders import DropRequest, StepMetadata
from tests.integration.runtime_pair import arrives, same, until
from tests.support import waiting
from tests.support.waiting import DEADLINE_S

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

NUM_REQUESTS = 20
STREAMED = {"do_remote_decode": True, "transfer_id": "t", "transfer_secret": "5" * 32}


@pytest.fixture
def engines(start):
    """A producer and a consumer that have greeted each other."""

    def make(direct):
        paths = {"paths": {"direct": direct}}
        p, d = start("p", "producer", **paths), start("d", "consumer", seed=1, **paths)
        assert arrives(p, d, "warm", [0], [0], num_tokens=9)
        # a direct read may be over before the warm-up messages are, and only drivers' threads take these
        locks = [each.workers[0]._thread._datapath.lock for each in (p, d)]
        waiting.until(lambda: not any(lock.is_greeting for lock in locks))
        return p, d

    return make


@pytest.mark.parametrize("direct", ["always", "never"])
def test_an_engine_that_never_releases_the_gil_gets_its_blocks(engines, direct):
    p, d = engines(direct)
    interval_s = sys.getswitchinterval()
    # from here on no thread takes the GIL from this one, which runs interpreted code
    sys.setswitchinterval(10 * DEADLINE_S)
    blocks = list(range(1, NUM_REQUESTS + 1))
    names = {f"r{block}" for block in blocks}
    try:
        for block in blocks:
            d.load(f"r{block}", p.offer(f"r{block}", [block], 16), [block], 17)
        waiting.until(lambda: names <= d.received and names <= p.sent, lambda: (p.step(), d.step()))
    finally:
        sys.setswitchinterval(interval_s)
    assert not d.failed
    num_tokens = 16 * NUM_REQUESTS
    assert same(p.dense(blocks, num_tokens), d.dense(blocks, num_tokens))


def test_a_short_direct_read_has_ended_when_the_step_that_begins_it_returns(engines):
    """Unless the driver's thread has just woken up, which is rare."""
    p, d = engines("always")
    (worker,) = d.workers
    ended = []
    for number in range(NUM_REQUESTS):
        name = f"r{number}"
        d.load(name, p.offer(name, [1], 16), [1], 17, steps=False)
        worker.start_step(d.scheduler.build_step())
        ended.append(worker._outbox.is_filled)
        until(lambda name=name: name in d.received and name in p.sent, d, p)
    assert not d.failed
    assert any(ended)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["bug", "^C"])
def test_inline_progress_that_fails_ends_every_load_and_not_the_engine(engines, monkeypatch, error):
    p, d = engines("always")
    has_failed = threading.Event()
    lock = d.workers[0]._thread._datapath.lock
    acquire_again = lock.acquire_again

    def come_late():
        assert has_failed.wait(DEADLINE_S)
        acquire_again()

    # the driver's thread, once it has left the loop, leaves all work to the engine's
    monkeypatch.setattr(lock, "acquire_again", come_late)
    params = p.offer("r", [1, 2], 30)

    turn = Driver.turn

    def fail_here(driver, *arguments, **options):
        if threading.current_thread() is threading.main_thread():
            has_failed.set()
            raise error
        turn(driver, *arguments, **options)

    for name in ("progress_inline", "turn"):
        monkeypatch.setattr(Driver, name, fail_here)
    (worker,) = d.workers
    try:
        d.load("r", params, [3, 4], 30)
        waiting.until(lambda: "r" in d.received, lambda: (worker.wait(0.1), d.step()))
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
        until(lambda: "r" in d.received, d)
    assert "driver failed" in d.failed["r"]
    # an engine that lives on keeps giving orders, which nobody takes
    driver = worker._thread._driver
    num_queued = driver.num_queued
    worker.start_step(StepMetadata(orders=(DropRequest("r"),)))
    assert driver.num_queued == num_queued


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_withdrawn_prompt_cannot_be_read_once_the_step_has_started(
    engines, monkeypatch, is_stuck
):
    """The engine fills the blocks anew after `start_step`, whichever thread works on the order. A driver that does not
    come delays the engine by a few milliseconds.
    """
    p, _ = engines("always")
    p.scheduler.on_new_request("r", STREAMED)
    p.scheduler.grow("r", blocks=[[1]], num_tokens=16)
    p.step()
    (thread,) = [worker._thread for worker in p.workers]
    monkeypatch.setattr(thread, "_run_inline", lambda *_: False)
    if is_stuck:
        monkeypatch.setattr(thread._driver, "_take_orders", lambda: None)
    else:
        monkeypatch.setattr("kvconnector.runtime.worker.WITHDRAW_S", DEADLINE_S)
    p.scheduler.withdraw("r")
    p.workers[0].start_step(p.scheduler.build_step())
    assert thread._driver.producer.holds("r") == is_stuck
