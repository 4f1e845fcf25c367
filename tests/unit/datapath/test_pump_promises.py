"""A receive is promised slots before its copies are made: events in between, and a lack of slots."""

from types import SimpleNamespace

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pump.opening import _chunk_bytes
from kvconnector.errors import ConfigError, TransportError
from kvconnector.session import events as ev
from tests.unit.datapath.pump_pair import READS, both_programs, receive_of, slots_are_free

pytestmark = pytest.mark.ucx

TOKENS = range(48)
SMALL = {"chunk_tokens": 1, "chunk_rows": 1}


def promised(pair, read_id, receive):
    """Submit a receive that gets slots at once; the consumer has not pumped since."""
    pair.d.path.receives.submit(receive_of(read_id, receive))
    (posted,) = pair.d.step()
    assert isinstance(posted, ev.ReceivePosted)
    return posted


def ends_of(pair, read_id):
    """Return the consumer's events of a read, except its progress."""
    kinds = (ev.ReceiveStopped, ev.ReceiveFailed, ev.ReceiveFinished, ev.ReceiveDrained)
    ends = [event for event in pair.events if isinstance(event, kinds)]
    return [type(event) for event in ends if event.read.read_id == read_id]


@pytest.mark.parametrize("drained", [False, True])
def test_a_read_that_is_stopped_meanwhile_writes_nothing(make_pair, drained):
    pair = make_pair()
    _, destination, send, receive = both_programs(pair, TOKENS, **SMALL)
    posted = promised(pair, 1, receive)
    pair.stop(1)
    if drained:  # the producer never learns of it
        pair.d.path.receives.drain(READS[1], 0)
    else:
        pair.serve(posted, send)
        pair.until(lambda: pair.find(ev.SendOver, 1))
        assert ends_of(pair, 1)[0] is ev.ReceiveStopped
        pair.d.path.receives.drain(READS[1], len(send.chunks))
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1))
    assert ends_of(pair, 1) == [ev.ReceiveStopped, ev.ReceiveDrained]
    assert not pair.d.dense(destination, TOKENS).any()
    pair.until(lambda: slots_are_free(pair))


def test_copies_that_cannot_be_made_fail_a_read_that_drains_its_promised_slots(make_pair):
    pair = make_pair()
    _, destination, send, receive = both_programs(pair, TOKENS, **SMALL)
    receive.source.cuts[0].rows[:] = [1, 2, 3, 4, 5]
    posted = promised(pair, 1, receive)
    begun = pair.serve(posted, send)
    failed = pair.until(lambda: pair.find(ev.ReceiveFailed, 1))
    assert isinstance(failed.error, TransportError)
    assert "row 5 of 4" in str(failed.error)
    # the session stops its producer, who may have sent any number by then
    pair.p.path.sends.stop(begun)
    sent_chunks = pair.until(lambda: pair.find(ev.SendOver, 1)).sent_chunks
    pair.stop(1)
    pair.d.path.receives.drain(READS[1], len(send.chunks) if sent_chunks is None else sent_chunks)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1))
    assert ends_of(pair, 1) == [ev.ReceiveFailed, ev.ReceiveDrained]
    assert not pair.d.dense(destination, TOKENS).any()
    pair.until(lambda: slots_are_free(pair))


def test_a_large_row_fits_a_default_chunk_and_not_one_that_was_chosen():
    """Recurrent states have rows of several MiB."""
    part = SimpleNamespace(name="state1", token_bytes=5 << 20)
    group = SimpleNamespace(geometry=SimpleNamespace(parts=[part]))
    pools = SimpleNamespace(device="cpu", groups=[group], largest_row_bytes=part.token_bytes)
    settings = {"engine_id": "e", "control": {"insecure": True}}
    assert _chunk_bytes(ConnectorConfig.from_mapping(settings), pools) == part.token_bytes
    chosen = ConnectorConfig.from_mapping({**settings, "staging": {"chunk_bytes": 1 << 20}})
    with pytest.raises(ConfigError, match=r"raise it, and staging\.budget_bytes"):
        _chunk_bytes(chosen, pools)
