"""Whole workers whose control messages travel over the transport, in a world without sockets."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from kvconnector.session import events as ev
from kvconnector.session.link import Link
from kvconnector.wire import decode, encode
from kvconnector.wire import messages as m
from tests.support.fakes import FakeEngine, attention_model, dense_of
from tests.support.loopback import LoopbackNetwork
from tests.support.world import World

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=2)
STAY = {"control": {"insecure": True, "over_ucx": False}}


class Deployment:
    """A producer of one rank and a consumer of two, and the kinds of messages that they send over control channels."""

    def __init__(self, producer=None, consumer=None):
        self.world = World(seed=5, network=LoopbackNetwork(seed=5, eager_limit_bytes=0))
        self.p = self.world.start(FakeEngine("p", MODEL), role="producer", **(producer or {}))
        self.d = self.world.start(
            FakeEngine("d", MODEL, tp_size=2), role="consumer", **(consumer or {})
        )
        self.kinds = set()
        for worker in (*self.p.workers, *self.d.workers):
            worker.control.send = partial(self._overhear, worker.control.send)

    def _overhear(self, send, handle, payload):
        self.kinds.add(type(decode(payload)))
        send(handle, payload)

    def request(self, name, block_ids=(1, 2, 3), num_tokens=9):
        """Hold a request at the producer, and have the consumer load it."""
        self.d.load_from(self.p, name, list(block_ids), list(block_ids), num_tokens)

    def outputs(self, engine):
        return [worker.poll() for worker in engine.workers]

    def check_copied(self, block_ids=(1, 2, 3), num_tokens=9):
        source, loaded = (
            dense_of([worker.caches for worker in engine.workers], [list(block_ids)], num_tokens)
            for engine in (self.p, self.d)
        )
        for key, dense in source.items():
            np.testing.assert_array_equal(loaded[key], dense)


@pytest.fixture
def deploy():
    """Make deployments, and close them afterwards."""
    made = []

    def make(**settings):
        made.append(Deployment(**settings))
        return made[-1]

    yield make
    for deployment in made:
        deployment.world.close()


def test_workers_that_have_greeted_say_nothing_more_on_the_control_channel(deploy):
    deployment = deploy()
    for name in ("first", "second"):
        deployment.request(name)
        assert deployment.world.run(deployment.world.is_quiet)
        deployment.check_copied()
    assert deployment.kinds == {m.DirectoryRequest, m.Hello, m.HelloReply}


@pytest.mark.parametrize("which", ["producer", "consumer"])
def test_workers_stay_on_the_control_channel_unless_both_want_otherwise(deploy, which):
    deployment = deploy(**{which: STAY})
    deployment.request("r")
    assert deployment.world.run(deployment.world.is_quiet)
    deployment.check_copied()
    assert deployment.kinds >= {m.Read, m.Done, m.Heartbeat, m.HeartbeatReply}


def _both_report(workers, request_id, field):
    """Returns True if both workers have reported a request, each once."""
    reported = set()

    def have_reported():
        reported.update(worker for worker in workers if request_id in getattr(worker.poll(), field))
        return len(reported) == 2

    return have_reported


def test_a_lost_consumers_last_messages_count(deploy):
    deployment = deploy()
    deployment.request("warm")
    assert deployment.world.run(deployment.world.is_quiet)
    deployment.outputs(deployment.p)
    deployment.request("r")
    assert deployment.world.run(_both_report(deployment.d.workers, "r", "finished_recving"))
    deployment.world.freeze(deployment.p)
    deployment.world.turn()
    for worker in deployment.d.workers:
        worker.driver.links.say_goodbye()
        worker.close()
    deployment.world.engines.remove(deployment.d)
    deployment.world.freeze(deployment.p, frozen=False)
    assert deployment.world.run(deployment.p.is_quiet, max_turns=5)
    (output,) = deployment.outputs(deployment.p)
    assert "r" in output.finished_sending


def test_a_busy_data_path_starves_nobody(deploy):
    deployment = deploy()
    (worker,) = deployment.p.workers
    path = worker.datapath
    path.step = lambda **_: path.events.append(ev.EndpointOpened(Link(-99)))
    deployment.request("r")
    has_arrived = _both_report(deployment.d.workers, "r", "finished_recving")
    assert deployment.world.run(has_arrived, seconds_per_turn=0.1)
    deployment.check_copied()


def test_a_read_is_begun_before_anything_is_looked_at_that_nobody_waits_for(deploy, monkeypatch):
    deployment = deploy(producer={"paths": {"direct": "never"}})
    deployment.request("warm")
    assert deployment.world.run(deployment.world.is_quiet)
    (worker,) = deployment.p.workers
    path, seen = worker.datapath, []

    def note(owner, name):
        original = getattr(owner, name)

        def noted(*arguments, **named):
            seen.append(name)
            if name == "pump":
                path._next_check_s = 0.0
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (path, "pump"),
        (path, "_check_peers"),
        (path.sends, "submit"),
        (worker.control, "poll"),
    ):
        note(owner, name)
    offer = deployment.p.grant("r", [[1, 2, 3]], 9)
    deployment.world.turn()
    deployment.d.want("r", offer)
    deployment.d.load("r", offer, [[1, 2, 3]], [range(9)])
    assert deployment.world.run(lambda: seen.count("submit") == 2)
    assert next(before for before, name in pairwise(seen) if name == "submit") == "pump"
    assert {"poll", "_check_peers"} <= {*seen}
    assert deployment.world.run(deployment.world.is_quiet)
    deployment.check_copied()


def test_each_confused_peer_is_warned_of_once(deploy, caplog):
    deployment = deploy()
    deployment.request("r")
    assert deployment.world.run(deployment.world.is_quiet)
    for worker in deployment.d.workers:
        (connection,) = worker.driver.links._connections.values()
        for _ in range(2):
            worker.control.send(connection.handle, encode(m.HelloReply(incarnation="i")))
    deployment.world.turn()
    for worker in deployment.d.workers:
        assert caplog.text.count(f"refused {worker.control.address}'s connection") == 1
