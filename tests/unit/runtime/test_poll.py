"""What the engine's thread does in passing."""

from __future__ import annotations

from kvconnector.config import ConnectorConfig
from kvconnector.ids import Rank
from kvconnector.runtime import KVConsumerWorker
from kvconnector.topology import ModelDescription


class Thread:
    """A driver's thread that counts looks."""

    def __init__(self) -> None:
        self.num_looks = 0

    def look_in(self) -> None:
        self.num_looks += 1


def test_poll_makes_no_visit_while_it_has_something_to_report():
    config = ConnectorConfig.from_mapping(
        {"engine_id": "decode", "role": "consumer", "control": {"insecure": True}}
    )
    model = ModelDescription(model="m", dtype="bfloat16", num_layers=1)
    worker = KVConsumerWorker(config, rank=Rank(0, 0), model=model, device="cpu")
    thread = worker._thread = Thread()
    worker._outbox.loaded("request", None)
    assert worker.poll().finished_recving == {"request"}
    assert thread.num_looks == 0
    assert worker.poll().is_empty
    assert thread.num_looks == 1
