"""A consumer's knowledge of a producer on a GPU in another container, as far as it can be tested without a GPU."""

import os
import time
from contextlib import ExitStack, closing

import pytest
from msgspec.structs import replace

from kvconnector.datapath.direct.peer_memory import check_alive, map_allocations, map_file
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.wire.export import IPC_HANDLE_BYTES, IpcAllocation
from tests.unit.datapath.caches import Shape
from tests.unit.datapath.exporter import CONTAINER, Exporter

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces"),
]


@pytest.fixture
def producer(tmp_path):
    shape = Shape(layers=2, heads=4, dim=128, block=16, blocks=512)
    with closing(Exporter(shape, seed=5, folder=str(tmp_path), prefix=CONTAINER)) as exporter:
        yield exporter


def test_a_producer_is_seen_to_live_and_to_end(producer, tmp_path):
    """It is seen through the folder: its process id belongs to another namespace."""
    export = replace(producer.export, device="cuda", ranges=())
    with pytest.raises((PeerLostError, TransportError), match="both sides need paths"):
        map_file(export, "", ExitStack())
    with ExitStack() as opened:
        _, statm = map_file(export, str(tmp_path), opened)
        check_alive(statm, export.pid)
        producer.kill()
        with pytest.raises(PeerLostError, match="gone"):
            _check_for_a_while(statm, export.pid)


def _check_for_a_while(statm, pid):
    """The kernel ends the producer after `unshare` has ended."""
    for _ in range(1000):
        check_alive(statm, pid)
        time.sleep(0.01)


def test_one_process_id_in_two_containers_is_refused(producer):
    """CUDA would take the producer's addresses for this process's own."""
    somewhere = IpcAllocation(handle=bytes(IPC_HANDLE_BYTES), address=1, nbytes=1)
    export = replace(producer.export, pid=os.getpid(), allocations=(somewhere,))
    with pytest.raises(TransportError, match="one pid namespace"):
        map_allocations(export, "cuda:0", ExitStack())
