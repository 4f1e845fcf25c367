"""What the engine's thread does in passing."""

from __future__ import annotations

from kvconnector.config import ConnectorConfig
from kvconnector.runtime import Worker


class Thread:
    """A driver's thread that counts looks."""

    def __init__(self) -> None:
        self.num_looks = 0

    def progress_inline(self) -> None:
        self.num_looks += 1


def test_poll_makes_no_progress_inline_while_it_has_something_to_report():
    config = ConnectorConfig.from_mapping(
        {"engine_id": "decode", "role": "consumer", "control": {"insecure": True}}
    )
    worker = Worker(config, rank=(0, 0), model="m")
    thread = worker._thread = Thread()
    worker._outbox.loaded("request", None)
    assert worker.poll().finished_recving == {"request"}
    assert thread.num_looks == 0
    assert worker.poll().is_empty
    assert thread.num_looks == 1
