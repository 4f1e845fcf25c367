"""The facts about its pools that a producer worker sends."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import export_pools
from kvconnector.runtime.executor import hello_reply
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
