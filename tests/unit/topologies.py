"""Small engines with one cache group, for tests of topologies."""

import msgspec

from kvconnector.ids import Rank
from kvconnector.topology import TpKVTopology
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine

LAYERS = (0, 1, 2, 3)


def engine(
    *, tp_size=1, stages=(LAYERS,), heads=4, parts=("k", "v"), block_size=16, name="e", dcp=(1, 1)
):
    shape = FakeModel(4, (FakeGroup(LAYERS, tuple(FakePart(p, heads, 8, 2) for p in parts)),))
    return cut_engine(
        shape, engine_id=name, stages=stages, block_sizes=[block_size], tp_size=tp_size, dcp=[dcp]
    )


def mla(tp_size):
    return engine(tp_size=tp_size, heads=1, parts=("latent",))


def sharing(dcp_size, interleave_tokens, block_size=16):
    """Make an engine whose ranks hold all heads and share the tokens."""
    return engine(
        tp_size=dcp_size, heads=1, block_size=block_size, dcp=(dcp_size, interleave_tokens)
    )


def relisted(base, ranks, **changes):
    return msgspec.structs.replace(base, ranks=tuple(ranks), **changes)


def topology(whole, rank=(0, 0)):
    """Return the topology of a rank of an engine that begins with the first replica."""
    return TpKVTopology(whole, Rank(*rank), rotation=0)
