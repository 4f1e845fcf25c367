"""The facts about its pools that a producer worker sends, and consumers that take no message as long as these."""

import logging
from contextlib import closing
from types import SimpleNamespace

import pytest
from msgspec import structs

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import export_pools
from kvconnector.runtime.executor import hello_reply
from kvconnector.wire.export import PoolExport
from tests.support.fakes import FakeEngine, attention_model
from tests.support.world import World
from tests.unit.runtime.test_unmapping import cuda_export


@pytest.mark.parametrize("limit, is_told", [(16 << 20, True), (64 << 10, False)])
def test_an_export_that_no_greeting_can_carry_is_not_sent(limit, is_told):
    with closing(World()) as world:
        shape = FakeEngine("p", attention_model(num_layers=500))
        (worker,) = world.start(shape, role="producer").workers
        board = LeaseBoard(num_buckets=1)
        export = cuda_export(export_pools(worker.pools, board))
        board.close()
        datapath = SimpleNamespace(export=export)
        settings = {"insecure": True, "max_message_bytes": limit}
        config = ConnectorConfig.from_mapping({"engine_id": "p", "control": settings})
        told = hello_reply(config, worker.pools, worker.transport, datapath, "one").export
        assert told == (export if is_told else None)


SMALL = 64 << 10
"""The lowest `control.max_message_bytes` that a configuration may have."""


class Greeted:
    """Two engines, of which the consumer takes messages of `SMALL` bytes, and the producer's answer has `changes`."""

    def __init__(self, world, **changes):
        settings = {"insecure": True, "max_message_bytes": SMALL}
        model = attention_model(num_layers=1)
        self.world = world
        self.p = world.start(FakeEngine("p", model), role="producer")
        self.d = world.start(FakeEngine("d", model), role="consumer", control=settings)
        self.producer = self.p.workers[0].driver
        peers = self.producer.producer._peers
        peers.reply = structs.replace(peers.reply, **changes)

    def load(self):
        """Load a request. Returns the statistics and the error of the load."""
        self.d.load_from(self.p, "r", [1, 2], [3, 4], 8)
        (worker,), outputs = self.d.workers, []

        def has_ended():
            outputs.append(worker.poll())
            return "r" in outputs[-1].finished_recving

        assert self.world.run(has_ended, seconds_per_turn=0.01)
        packed = [each.stats.packed for each in outputs if each.stats.packed]
        return packed, outputs[-1].failed_recving.get("r")


def long_export():
    """Return an export that is longer than `SMALL`, and that no consumer here could map."""
    return PoolExport(
        pid=1,
        fd=1,
        nonce=bytes(16),
        num_buckets=1,
        device="cpu",
        tables=(),
        ranges=(),
        allocations=(),
        gpu_uuid="x" * SMALL,
    )


def test_a_consumer_that_takes_no_message_as_long_as_the_export_reads_packed(caplog):
    with closing(World()) as world, caplog.at_level(logging.INFO):
        greeted = Greeted(world, export=long_export())
        packed, error = greeted.load()
        assert error is None
        assert packed == [{"its engine says why, see this rank's log": 1}]
        assert greeted.producer.links.refusals.counts == {"AnswerTooLong": 1}
    (refused,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert "its reads are packed: raise it on the decode engine" in refused
    (told,) = [each.message for each in caplog.records if "because its engine says" in each.message]
    for text in (refused, told):
        assert f"control.max_message_bytes of both is {SMALL}" in text


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(
    "settings, reason",
    [
        ({}, "paths.direct is never"),
        ({"verify": "checksum"}, "verify is checksum, and only packed reads are checked"),
    ],
)
def test_a_setting_that_keeps_reads_packed_is_named_and_no_fault_of_the_host(
    side, settings, reason, caplog
):
    """In a world no engine reads directly. The consumer's own setting counts if the producer offers its pools."""
    offered = {"export": structs.replace(long_export(), gpu_uuid=""), "text": ""}
    with closing(World(settings=settings)) as world, caplog.at_level(logging.INFO):
        greeted = Greeted(world, **(offered if side == "consumer" else {}))
        packed, error = greeted.load()
    assert error is None
    counted = reason if side == "consumer" else "its engine says why, see this rank's log"
    assert packed == [{counted: 1}]
    (line,) = [each.message for each in caplog.records if "reads from" in each.message]
    assert line.endswith(f": {reason}")


def test_a_consumer_that_takes_no_message_as_long_as_an_answer_is_refused_in_words(caplog):
    with closing(World()) as world, caplog.at_level(logging.WARNING):
        greeted = Greeted(world, export=long_export(), transport_address=bytes(SMALL))
        _, error = greeted.load()
        counts = greeted.producer.links.refusals.counts
        assert counts["incompatible"] == 1
        assert not greeted.p.workers[0].poll().stats.contained
    assert "IncompatiblePeerError" in error
    for text in (error, caplog.text):
        assert (
            f"control.max_message_bytes of both is {SMALL}: raise it on the decode engine" in text
        )
    assert "Traceback" not in caplog.text


def test_a_consumer_that_takes_no_message_as_long_as_a_directory_is_refused_in_words():
    with closing(World()) as world:
        greeted = Greeted(world)
        service = greeted.p.responder
        (entry,) = service._directory.workers
        workers = tuple(structs.replace(entry, tp_rank=rank) for rank in range(2000))
        service._directory = structs.replace(service._directory, workers=workers)
        _, error = greeted.load()
    assert f"raise control.max_message_bytes of the engine that asks, which is {SMALL}" in error


@pytest.mark.parametrize(
    "theirs, ours, side",
    [
        (SMALL, 2 * SMALL, "the prefill engine"),
        (2 * SMALL, SMALL, "the decode engine"),
        (SMALL, SMALL, "both engines"),
    ],
)
def test_a_greeting_that_is_too_long_fails_the_load_with_both_lengths(theirs, ours, side):
    """A connection on which a longer message comes is closed without a reason, so it is not sent."""
    with closing(World()) as world:
        model, engines = attention_model(num_layers=1), []
        for name, role, limit in (("p", "producer", theirs), ("d", "consumer", ours)):
            settings = {"insecure": True, "max_message_bytes": limit}
            engines.append(world.start(FakeEngine(name, model), role=role, control=settings))
        p, d = engines
        links = d.workers[0].driver.ports.links
        links._hello = structs.replace(links._hello, transport_address=bytes(SMALL))
        d.load_from(p, "r", [1, 2], [3, 4], 8)
        (worker,), failed = d.workers, {}

        def has_failed():
            failed.update(worker.poll().failed_recving)
            return "r" in failed

        assert world.run(has_failed, seconds_per_turn=0.01)
        assert not [*p.workers[0].driver.links]
        assert not worker.poll().stats.contained
    assert "IncompatiblePeerError: the greeting has 65" in failed["r"]
    assert f"control.max_message_bytes of both is {SMALL}: raise it on {side}" in failed["r"]
