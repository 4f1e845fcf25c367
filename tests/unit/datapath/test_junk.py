"""Messages of no read, from anybody who reaches the transport, are dropped and counted, while reads go on."""

import ctypes
import logging
import resource
from functools import partial
from pathlib import Path

import pytest

from kvconnector.datapath.pump.receives import new_tags
from kvconnector.session import events as ev
from kvconnector.transport import Buffer
from kvconnector.transport.ucx import open_ucx_transport
from tests.unit.datapath.pump_pair import both_programs

pytestmark = pytest.mark.ucx

NUM_ROUNDS = 20
TOKENS = range(48)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "nbytes, batch", [(4096, 1000), (1 << 20, 50)], ids=["copied at once", "kept by the sender"]
)
def test_junk_with_ordinary_tags_costs_no_memory(make_pair, nbytes, batch, caplog):
    pair, stranger = make_pair(), open_ucx_transport()
    content = ctypes.create_string_buffer(nbytes)
    junk = Buffer(ctypes.addressof(content), nbytes, "cpu", content)
    to_d = stranger.connect(pair.d.transport.address)
    refused = pair.d.path.receives.refusals.counts

    def send(count):
        expected = refused["unknown tag"] + count
        for _ in range(count):
            stranger.send(to_d, new_tags(), junk)
        pair.until(lambda: (stranger.progress(), refused["unknown tag"])[1] == expected)

    with caplog.at_level(logging.WARNING):
        send(batch)
        before = resident_bytes()
        for read_id in range(1, NUM_ROUNDS):
            source, destination, program, receive = both_programs(
                pair, TOKENS, chunk_tokens=1, chunk_rows=1
            )
            posted = pair.ask(read_id, receive)
            pair.serve(posted, program)
            send(batch)
            pair.until(partial(pair.find, ev.ReceiveFinished, read_id))
            pair.check_arrived(source, destination, TOKENS, range(pair.p.shape.heads))
    assert resident_bytes() - before < NUM_ROUNDS * batch * nbytes // 8
    assert len([record for record in caplog.records if "unknown tag" in record.message]) == 1
    stranger.close()
