"""A pair whose consumer reads the producer's pools itself, and reads that it is asked for."""

from typing import ClassVar

from kvconnector.datapath.base import ReadOrigin
from kvconnector.session import events as ev
from tests.unit.datapath.pump_pair import TO_P, Pair, both_programs

KEY = b"sixteen bytes it"
MANY_TOKENS = 1 << 20
CUT = {"chunk_tokens": 5, "chunk_rows": 3}


class DirectPair(Pair):
    """A pair on one host whose consumer has opened the producer's export."""

    KNOBS: ClassVar = {**Pair.KNOBS, "direct": True}

    def __init__(self, p, d):
        super().__init__(p, d)
        self.export = p.path.export()
        assert d.path.open_export(TO_P, self.export)


def both(pair, tokens, heads=None):
    """Blocks at both sides, last first at the producer, and a read of `tokens`."""
    source, destination, theirs, program = both_programs(pair, tokens, **CUT, heads=heads)
    return source, destination, program, origin_of(theirs, tokens)


def origin_of(theirs, tokens):
    """Where the tokens of the producer's program are read."""
    return ReadOrigin(TO_P, theirs.segments, theirs.blocks, KEY, tokens.stop)


def only_consumer_steps(pair, read_id, kind):
    """Go on without the producer until a read has had an event."""
    for _ in range(1000):
        pair.d.path.pump(1e-3, ())
        pair.events += pair.d.path.step()
        if pair.find(kind, read_id) is not None:
            return
    raise AssertionError(f"no {kind.__name__}: {pair.events}")


def give_up(pair, read_id):
    """End a read that its producer was asked for, and does not send."""
    pair.d.path.stop_receive(read_id)
    pair.d.path.drain_receive(read_id, None)
    pair.until(lambda: pair.find(ev.ReceiveDrained, read_id) is not None)
