"""Who holds what: heads, layers, cache layouts, and the mapping from producer ranks to consumer ranks. Pure."""

from kvconnector.topology.backend import (
    AttentionBackend,
    CacheLayout,
    FlashAttentionBackend,
    current_attention_backend,
    probe_layout,
    required_cache_layout,
)
from kvconnector.topology.compatibility import check_compatible, fingerprint
from kvconnector.topology.geometry import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartFamily,
    PartGeometry,
    RankGeometry,
)
from kvconnector.topology.heads import is_kv_replicated, owned_heads
from kvconnector.topology.layers import partition_layers
from kvconnector.topology.mapping import (
    Rectangle,
    expected_confirmations,
    release_targets,
    source_rectangles,
)
from kvconnector.topology.stripes import (
    ALL_TOKENS,
    Stripe,
    common_stripes,
    local_stripe,
    own_stripe,
)
from kvconnector.topology.tp_kv import TargetRank, TpKVTopology

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
    "Rectangle",
    "Stripe",
    "TargetRank",
    "TpKVTopology",
    "check_compatible",
    "common_stripes",
    "current_attention_backend",
    "expected_confirmations",
    "fingerprint",
    "is_kv_replicated",
    "local_stripe",
    "own_stripe",
    "owned_heads",
    "partition_layers",
    "probe_layout",
    "release_targets",
    "required_cache_layout",
    "source_rectangles",
]
