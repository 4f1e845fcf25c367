"""Whether two engines can exchange blocks: checked at hello, before anything is allocated."""

from __future__ import annotations

import hashlib

import msgspec

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.topology.geometry import EngineGeometry
from kvconnector.topology.stripes import common_stripes


def _agreed_values(engine: EngineGeometry) -> dict[str, object]:
    """All that must be equal on both sides. TP, PP, DCP, block sizes, layouts and pool sizes need not be."""
    groups = [
        {
            "parts": [
                [part.name, part.total_heads, part.head_dim, part.item_size_bytes]
                for part in group.parts
            ],
            "layers": sorted({layer for rank in engine.ranks for layer in rank.groups[i].layers}),
        }
        for i, group in enumerate(engine.ranks[0].groups)
    ]
    return {
        "model": engine.model.model,
        "dtype": engine.model.dtype,
        "quantization": engine.model.quantization,
        "num_layers": engine.model.num_layers,
        "groups": groups,
    }


def fingerprint(engine: EngineGeometry) -> str:
    """Digest of everything that two engines must agree on; equal digests can exchange blocks."""
    encoded = msgspec.json.encode(_agreed_values(engine), order="sorted")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def check_compatible(ours: EngineGeometry, theirs: EngineGeometry) -> None:
    """Refuse a peer engine whose cache means something else than ours.

    Raises:
        IncompatiblePeerError: naming every value in which the two engines disagree, or two ways of dealing out tokens
            that hardly ever coincide.
    """
    mine, other = _agreed_values(ours), _agreed_values(theirs)
    differing = {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]}
    if differing:
        raise IncompatiblePeerError(
            "the engines cannot exchange blocks: they disagree in " + ", ".join(sorted(differing)),
            engine=ours.engine_id,
            peer=theirs.engine_id,
            **{f"{name}_ours_theirs": values for name, values in differing.items()},
        )
    try:
        for our_group, their_group in zip(
            ours.ranks[0].groups, theirs.ranks[0].groups, strict=True
        ):
            common_stripes(our_group.context_parallel, their_group.context_parallel)
    except GeometryError as error:
        raise IncompatiblePeerError(
            error.message, engine=ours.engine_id, peer=theirs.engine_id, **error.context
        ) from error
