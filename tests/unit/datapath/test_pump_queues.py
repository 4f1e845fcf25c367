"""Reads that wait for slots or for their turn: one read's work does not depend on how many others wait."""

import logging

import pytest

from kvconnector.datapath.pump.direct_reads import MAX_READS
from kvconnector.datapath.pump.sends import MAX_PROBE_MESSAGES
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.wire import messages as m
from tests.support.lines import lines_of
from tests.unit.datapath.direct_pair import KEY, DirectPair, direct_read
from tests.unit.datapath.pump_pair import READS, both_programs, receive_of

pytestmark = pytest.mark.ucx

TOKENS = range(48)
SMALL = {"chunk_tokens": 1, "chunk_rows": 1}


@pytest.mark.parametrize("num_waiting", [4, 400])
def test_a_receives_work_does_not_grow_with_waiting_receives(make_pair, num_waiting):
    pair = make_pair(num_slots=3)
    _, _, _, receive = both_programs(pair, TOKENS, **SMALL)
    path = pair.d.path
    for read in range(num_waiting):
        path.receives.submit(receive_of(read, receive))
    pair.d.step()
    one = receive_of(-1, receive)
    assert lines_of(lambda: path.receives.submit(one), lambda: path.reads.stop(one)) < 300
    assert {type(event) for event in pair.d.step()} >= {ev.ReceiveStopped, ev.ReceiveDrained}
    assert f"waiting for slots {list(range(1, num_waiting))}" in repr(path)
    path.reads.stop(READS[1])
    path.reads.stop(READS[num_waiting - 1])
    assert f"waiting for slots {list(range(2, num_waiting - 1))}" in repr(path)


@pytest.mark.parametrize("num_sends", [4, 400])
def test_stopping_a_send_does_not_grow_with_other_sends(make_pair, num_sends):
    pair = make_pair()
    _, _, send, receive = both_programs(pair, TOKENS, **SMALL)
    posted = pair.ask(1, receive)
    begun = [pair.serve(posted, send) for _ in range(num_sends)]
    assert lines_of(lambda: pair.p.path.sends.stop(begun[-1])) < 30
    sends = pair.p.path.sends
    assert sends.values(sends._by_send[begun[-1]])["stopped"]


def test_probes_of_a_peer_that_receives_nothing_occupy_a_bounded_number_of_sends(make_pair, caplog):
    """Whatever is under way is looked at for all peers. Only a greeting is worth a line of the log."""
    pair = make_pair(slot_bytes=1 << 20)
    path, probe = pair.p.path, m.Probe(first_tag=1 << 40, nbytes=1 << 20, count=64)
    pair.until(lambda: not path.warm_ups)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            path.sends.probe(pair.to_d, probe)
        assert 64 <= len(path.warm_ups) <= MAX_PROBE_MESSAGES
        pair.until(lambda: not path.warm_ups)  # they belong to no read of the consumer's
    assert "sent over" not in caplog.text
    path.sends.probe(pair.to_d, probe)
    assert len(path.warm_ups) == 64
    path.sends.close_endpoint(pair.to_d)
    pair.until(lambda: not path.warm_ups)


def _finished(pair):
    return [e.read.read_id for e in pair.events if isinstance(e, ev.ReceiveFinished)]


@pytest.mark.parametrize("num_waiting", [4, 400])
def test_a_direct_reads_work_does_not_grow_with_waiting_reads(num_waiting):
    pair = DirectPair.connect()
    try:
        _, _, theirs, ours = both_programs(pair, TOKENS, **SMALL)
        path = pair.d.path
        pair.p.path.board.publish(KEY, Watermark(TOKENS.stop))
        for read in range(MAX_READS + num_waiting):
            path.reads.submit(direct_read(read, theirs, ours, TOKENS))
        one = direct_read(-1, theirs, ours, TOKENS)
        assert lines_of(lambda: path.reads.submit(one), lambda: path.reads.stop(one)) < 500
        waiting = [MAX_READS + read for read in range(num_waiting)]
        assert f"waiting {waiting}>" in repr(path)
        pair.until(lambda: len(_finished(pair)) == MAX_READS + num_waiting)
        assert _finished(pair)[-num_waiting:] == waiting
    finally:
        pair.close()
