"""Engines whose ranks share the tokens of a request: decode context parallelism."""

from __future__ import annotations

import msgspec
import pytest

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.topology import (
    TpKVTopology,
)
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine


def latent(tp_size=1, block_size=16):
    """An engine each rank of which holds all of an MLA cache."""
    shape = FakeModel(2, (FakeGroup((0, 1), (FakePart("latent", 1, 8, 2),)),))
    return cut_engine(
        shape, engine_id="e", stages=((0, 1),), block_sizes=[block_size], tp_size=tp_size
    )


def sharing(dcp_ranks, dcp_size=2, interleave_tokens=4, block_size=16):
    """An engine whose ranks all hold all heads, and tokens as their context parallel ranks say."""
    base = latent(tp_size=len(dcp_ranks), block_size=block_size)
    ranks = tuple(
        msgspec.structs.replace(
            rank,
            groups=(
                msgspec.structs.replace(
                    rank.groups[0],
                    dcp_size=dcp_size,
                    dcp_rank=dcp_rank,
                    interleave_tokens=interleave_tokens,
                ),
            ),
        )
        for rank, dcp_rank in zip(base.ranks, dcp_ranks, strict=True)
    )
    return msgspec.structs.replace(base, ranks=ranks)


def topology(engine, number=0):
    return TpKVTopology(engine, engine.ranks[number].rank, replica_index=number)


def test_a_stage_holds_every_token():
    sharing([0, 1, 1, 0])
    with pytest.raises(GeometryError, match="every rank of a context parallel group") as refused:
        sharing([1, 1])
    assert refused.value.context["dcp_ranks"] == [1]
    even, odd = sharing([0, 1]), sharing([0, 1], interleave_tokens=8)
    with pytest.raises(GeometryError, match="same groups"):
        msgspec.structs.replace(even, ranks=(even.ranks[0], odd.ranks[1]))


def test_engines_whose_turns_hardly_ever_coincide_are_not_compatible():
    topology(sharing([0, 1])).check_compatible(sharing([0, 1, 2], dcp_size=3, interleave_tokens=16))
    ours = sharing([0, 1], interleave_tokens=4096, block_size=4096)
    with pytest.raises(IncompatiblePeerError, match="too long a period") as refused:
        topology(ours).check_compatible(sharing([0, 1], interleave_tokens=4095, block_size=4095))
    assert refused.value.context["ours"] == (2, 4096)
