"""The driver's loop beside a data path that always has something to tell."""

from __future__ import annotations

from types import SimpleNamespace

from kvconnector.runtime.driver import Driver
from kvconnector.runtime.traces import Traces
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId


class EndlessDataPath:
    """Each step tells something."""

    def __init__(self):
        self.waits_s = []

    def clear_pending(self):
        pass

    def poll_once(self):
        pass

    def pump(self, timeout_s, fds):
        self.waits_s.append(timeout_s)

    def step(self):
        return [ev.SendFinished(LinkId(-1), 1)]


class Control:
    """Nobody says anything."""

    is_settled = True

    def poll(self, timeout_s):
        return []

    def filenos(self):
        return ()


class Session:
    """Always overdue."""

    def __init__(self):
        self.seen = []

    def next_deadline(self):
        return 1.0

    def handle(self, event, now):
        self.seen.append(type(event))
        return []


def test_a_busy_data_path_starves_neither_engine_nor_peers_nor_deadlines():
    datapath, session, intakes = EndlessDataPath(), Session(), []
    driver = Driver(
        control=Control(),
        tagged=SimpleNamespace(receive=lambda progress=False: [], has_more=False),
        datapath=datapath,
        executor=lambda driver: SimpleNamespace(traces=Traces(0.0, print)),
        producer=session,
        consumer=None,
        intake=intakes.append,
        clock=lambda: 2.0,
    )
    driver.turn(1.0)
    driver.turn(1.0)
    assert intakes == [driver, driver]
    assert datapath.waits_s == [0.0, 0.0]
    assert session.seen[1] is ev.Tick
    assert ev.SendFinished in session.seen
