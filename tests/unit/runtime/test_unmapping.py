"""A producer that closes or sleeps waits for the consumers that have mapped its CUDA memory, and for no others."""

import msgspec
import pytest

from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import export_pools
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.errors import TransportError
from kvconnector.wire import encode
from kvconnector.wire import messages as m
from kvconnector.wire.export import IPC_HANDLE_BYTES, IpcAllocation, SegmentRun
from tests.support.fakes import FakeEngine, attention_model
from tests.support.world import World

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=2)
ANYWHERE = IpcAllocation(handle=bytes(IPC_HANDLE_BYTES), address=1, nbytes=(1 << 63) - 1)


SEGMENTED = SegmentRun(address=1, nbytes=(1 << 63) - 1, count=1)


def cuda_export(export):
    """Return the export that pools on a GPU would have."""
    return msgspec.structs.replace(export, device="cuda", ranges=(), allocations=(ANYWHERE,))


class MappingPath:
    """A data path that maps its peers' pools, and unmaps them when the test says so; reads are packed."""

    class Reads:
        """Reads of other workers' pools."""

        def __init__(self, receives):
            self.can_map, self.why_packed = True, ""
            self._receives = receives
            self.unmapping = []
            self.opened = []

        def open(self, link, export, routes):
            if not self.can_map:
                raise TransportError("another host")
            link.maps_pools = True
            self.opened.append(export)
            return "mapped"

        def close(self, link, then):
            if not link.maps_pools:
                then()
            else:
                self.unmapping.append(lambda: (setattr(link, "maps_pools", False), then()))

        def submit(self, read):
            self._receives.submit(read)

        def stop(self, read_id):
            self._receives.stop(read_id)

    def __init__(self, sending, pools):
        self._sending = sending
        self.reads = self.Reads(sending.receives)
        self.board = LeaseBoard(num_buckets=1)
        self.export = cuda_export(export_pools(pools, self.board))
        self._export_again = None

    withdraw, renew = DataPath.withdraw, DataPath.renew

    def segment(self):
        """Give the pools memory that may be replaced."""
        exported = msgspec.structs.replace(self.export, allocations=(), segments=(SEGMENTED,))
        self.export = exported
        self._export_again = lambda: msgspec.structs.replace(
            exported, epoch=self.board.memory.epoch
        )

    def __getattr__(self, name):
        return getattr(self._sending, name)

    def close(self):
        self.board.close()
        self._sending.close()


class MappingWorld(World):
    """A producer "p" and a consumer "d", of one worker each."""

    def __init__(self):
        super().__init__(seed=7)
        self.p = self.start(FakeEngine("p", MODEL), role="producer")
        self.d = self.start(FakeEngine("d", MODEL), role="consumer")
        self.producer, self.path = self.p.workers[0].driver, self.d.workers[0].datapath

    def make_datapath(self, config, pools, transport):
        return MappingPath(super().make_datapath(config, pools, transport), pools)

    @property
    def mappers(self):
        return self.producer.links.mappers

    def request(self, name="r"):
        self.d.load_from(self.p, name, [1, 2], [1, 2], 8)


@pytest.fixture
def world():
    world = MappingWorld()
    yield world
    world.close()


def say_goodbye(driver):
    driver.links.say_goodbye()


def say_nonsense(driver):
    (link,) = driver.links
    driver.links.control.send(driver.links._connections[link].handle, b"nonsense")


@pytest.mark.parametrize("end", [say_goodbye, say_nonsense])
def test_a_consumer_disconnects_once_it_has_unmapped(world, end):
    world.request()
    assert world.run(lambda: bool(world.mappers))
    assert world.run(world.is_quiet)
    assert world.mappers == ["d rank (0, 0)"]
    end(world.producer)
    assert world.run(lambda: bool(world.path.reads.unmapping))
    for _ in range(5):
        world.turn()
    assert world.mappers == ["d rank (0, 0)"]
    world.path.reads.unmapping.pop()()
    assert world.run(lambda: not world.mappers, max_turns=5)


def test_a_dead_consumer_maps_nothing(world):
    world.request()
    assert world.run(world.is_quiet)
    world.kill(world.d)
    assert world.run(lambda: not world.mappers, max_turns=5)


def test_a_consumer_of_another_host_maps_nothing(world):
    world.path.reads.can_map = False
    world.request()
    assert world.run(world.is_quiet)
    world.freeze(world.d)
    assert world.mappers == []


@pytest.fixture
def sleeper(world):
    """A world whose producer's memory may be replaced, before anybody has greeted it."""
    world.p.workers[0].datapath.segment()
    world.producer._change_reply()
    return world


def told(world):
    """Take turns without time passing: nobody waits for a heartbeat's time to come."""
    return world.run(lambda: not world.mappers, max_turns=20)


def test_a_producer_that_sleeps_hears_at_once_that_its_memory_is_free(sleeper):
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    first, *_ = sleeper.path.reads.opened
    sleeper.producer.withdraw_pools()
    assert sleeper.run(lambda: bool(sleeper.path.reads.unmapping), max_turns=5)
    assert sleeper.mappers == ["d rank (0, 0)"]
    sleeper.path.reads.unmapping.pop()()
    assert told(sleeper)
    sleeper.producer.withdraw_pools()
    sleeper.producer.renew_pools()
    assert sleeper.mappers == ["d rank (0, 0)"]
    assert sleeper.run(lambda: len(sleeper.path.reads.opened) == 2, max_turns=5)
    assert sleeper.path.reads.opened[1].epoch == first.epoch + 1
    sleeper.request("again")
    assert sleeper.run(sleeper.is_quiet)
    assert sleeper.mappers == ["d rank (0, 0)"]
    assert sleeper.d.workers[0].poll().failed_recving == {}


def test_memory_that_nobody_can_map_after_a_sleep_is_read_packed(sleeper, caplog):
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    sleeper.producer.withdraw_pools()
    assert sleeper.run(lambda: bool(sleeper.path.reads.unmapping), max_turns=5)
    sleeper.path.reads.unmapping.pop()()
    assert told(sleeper)

    def refuse():
        raise TransportError("the GPU memory is in too many segments")

    sleeper.p.workers[0].datapath._export_again = refuse
    sleeper.producer.renew_pools()
    assert "cannot read these pools directly: the GPU memory is in too many segments" in caplog.text
    sleeper.request("again")
    assert sleeper.run(sleeper.is_quiet)
    assert sleeper.mappers == []
    assert sleeper.d.workers[0].poll().failed_recving == {}


def test_a_consumer_that_greets_while_its_producer_sleeps_maps_the_memory_later(sleeper):
    sleeper.producer.withdraw_pools()
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    assert sleeper.path.reads.opened == []
    assert sleeper.mappers == []
    sleeper.producer.renew_pools()
    assert sleeper.run(lambda: len(sleeper.path.reads.opened) == 1, max_turns=5)


def test_a_stranger_cannot_keep_a_producer_awake(sleeper):
    """Without keys anybody may say that it maps the memory; only who was told how can have mapped it."""
    stranger = sleeper.hub.open()
    handle = stranger.connect(sleeper.p.workers[0].control.address, "")
    stranger.send(handle, encode(m.Heartbeat(transfers=(), maps_pools=True)))
    for _ in range(5):
        sleeper.turn()
    assert sleeper.mappers == []
    sleeper.producer.withdraw_pools()
    assert sleeper.mappers == []
    stranger.close()


def test_a_consumer_counts_once_it_was_told_how_to_map_the_memory(sleeper):
    """It has greeted while the producer slept, and is answered after that has woken up."""
    sleeper.producer.withdraw_pools()
    sends, opened = sleeper.p.workers[0].datapath.sends, []
    sends.open_endpoint, now = lambda *each: opened.append(each), sends.open_endpoint
    sleeper.request()
    assert sleeper.run(lambda: bool(opened), max_turns=50)
    sleeper.producer.renew_pools()
    assert sleeper.mappers == []
    sends.open_endpoint = now
    sleeper.freeze(sleeper.d)
    now(*opened.pop())
    assert sleeper.run(lambda: bool(sleeper.mappers), max_turns=5)


def test_memory_that_has_not_changed_is_not_mapped_anew(sleeper):
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    sleeper.producer.renew_pools()
    sleeper.producer._change_reply()  # as if the reply came twice
    for _ in range(5):
        sleeper.turn()
    assert len(sleeper.path.reads.opened) == 1
    assert not sleeper.path.reads.unmapping


def test_memory_with_ipc_handles_is_not_withdrawn(world):
    world.request()
    assert world.run(world.is_quiet)
    world.producer.withdraw_pools()
    world.producer.renew_pools()
    for _ in range(5):
        world.turn()
    assert not world.path.reads.unmapping
    assert len(world.path.reads.opened) == 1


def test_a_consumer_that_cannot_be_told_of_a_sleep_loses_its_link_and_unmaps(sleeper):
    """It takes no message as long as ours: otherwise it would go on reading memory that is taken away."""
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    (link,) = sleeper.producer.links
    sleeper.producer.links.limit_messages(link, 1)
    sleeper.producer.withdraw_pools()
    assert sleeper.run(lambda: bool(sleeper.path.reads.unmapping), max_turns=5)
    sleeper.path.reads.unmapping.pop()()
    assert told(sleeper)


def test_a_consumer_lost_while_it_unmaps_is_not_waited_for(sleeper):
    sleeper.request()
    assert sleeper.run(sleeper.is_quiet)
    sleeper.producer.withdraw_pools()
    assert sleeper.run(lambda: bool(sleeper.path.reads.unmapping), max_turns=5)
    sleeper.kill(sleeper.d)
    assert told(sleeper)
