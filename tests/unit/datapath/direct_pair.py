"""A pair whose consumer reads the producer's pools itself, and reads that it is asked for."""

from typing import ClassVar

from kvconnector.ids import Rank
from kvconnector.layout import ALL_LAYERS
from kvconnector.planning import SourceRead
from kvconnector.planning.route import Route
from kvconnector.session import events as ev
from kvconnector.session.commands import StartReceive
from tests.unit.datapath.pump_pair import TO_P, Pair

KEY = b"sixteen bytes it"
MANY_TOKENS = 1 << 20
RANK = Rank(0, 0)
CUT = {"chunk_tokens": 5, "chunk_rows": 3}


class DirectPair(Pair):
    """A pair on one host whose consumer has opened the producer's export."""

    KNOBS: ClassVar = {**Pair.KNOBS, "direct": True}

    def __init__(self, p, d):
        super().__init__(p, d)
        self.export = p.path.export()
        assert d.path.reads.open(TO_P, self.export)


def direct_read(read_id, theirs, ours, tokens, *, remote_blocks=None, lease_key=KEY):
    """A read of what programs of both sides are to move, and the key of its lease."""
    num_rows = int((ours.chunks["part_start"] + ours.chunks["num_parts"]).max())
    route = Route(RANK, 1, (), (), here=ours.segments, there=theirs.segments)
    ends = tokens.stop, ALL_LAYERS.stop
    source = SourceRead(route, (tokens,), ALL_LAYERS, 1, (tokens,), (range(num_rows),), 1, *ends)
    vars(source)["chunks"] = ours.chunks  # not those of a real route
    remote_blocks = remote_blocks or theirs.blocks
    read = StartReceive(read_id, "", "p", TO_P, "", source, ours.blocks, (), remote_blocks, False)
    return read, lease_key


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
    pair.d.path.receives.drain(read_id, None)
    pair.until(lambda: pair.find(ev.ReceiveDrained, read_id) is not None)
