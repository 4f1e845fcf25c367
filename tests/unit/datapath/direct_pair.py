"""A pair whose consumer reads the producer's pools itself, and the reads for it."""

from typing import ClassVar

from kvconnector.session import events as ev
from kvconnector.session.lease import lease_key
from tests.support.waiting import until
from tests.unit.datapath.caches import half
from tests.unit.datapath.pump_pair import READS, Pair, receive_of

KEY = lease_key("t", "", ())
MANY_TOKENS = 1 << 20
CUT = {"chunk_tokens": 5, "chunk_rows": 3}


class DirectPair(Pair):
    """A pair on one host whose consumer has opened the producer's export."""

    KNOBS: ClassVar = {**Pair.KNOBS, "direct": True}

    def __init__(self, p, d):
        super().__init__(p, d)
        self.export = p.path.export
        assert d.path.reads.open(self.to_p, self.export)


def direct_read(read_id, theirs, ours, tokens, *, transfer="t", remote_blocks=None):
    """A read of what halves of both sides are to move."""
    (here,), (there,) = ours.source.route.here, theirs.source.route.here
    read = half(here, ours.source.cuts[0], ours.blocks[0], tokens, there=(there,))
    blocks = remote_blocks or theirs.blocks
    return receive_of(read_id, read, transfer=transfer, remote_blocks=blocks)


def only_consumer_steps(pair, read_id, kind):
    """Step only the consumer until a read has had an event."""

    def step():
        pair.d.path.pump(1e-3)
        pair.events += pair.d.step()

    until(lambda: pair.find(kind, read_id) is not None, step, lambda: pair.events)


def give_up(pair, read_id):
    """End a read that its producer was asked to send, and does not send."""
    pair.stop(read_id)
    pair.d.path.receives.drain(READS[read_id], None)
    pair.until(lambda: pair.find(ev.ReceiveDrained, read_id))
