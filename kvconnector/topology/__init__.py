"""Who holds what, and who reads what from whom: `TpKVTopology`, the geometries it is made from, cache layouts. Pure."""

from kvconnector.topology.backend import (
    AttentionBackend,
    CacheLayout,
    FlashAttentionBackend,
    current_attention_backend,
    probe_layout,
    required_cache_layout,
)
from kvconnector.topology.geometry import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartFamily,
    PartGeometry,
    RankGeometry,
)
from kvconnector.topology.stripes import (
    ALL_TOKENS,
    Stripe,
    common_stripes,
    local_stripe,
    own_stripe,
)
from kvconnector.topology.tp_kv import Segment, Target, TpKVTopology

__all__ = [
    "ALL_TOKENS",
    "AttentionBackend",
    "CacheLayout",
    "EngineGeometry",
    "FlashAttentionBackend",
    "GroupGeometry",
    "ModelDescription",
    "PartFamily",
    "PartGeometry",
    "RankGeometry",
    "Segment",
    "Stripe",
    "Target",
    "TpKVTopology",
    "common_stripes",
    "current_attention_backend",
    "local_stripe",
    "own_stripe",
    "probe_layout",
    "required_cache_layout",
]
