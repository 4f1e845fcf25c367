"""What each layer caches, how large it is, and which layers share block ids and memory."""

from kvconnector.cache.specs.attention import (
    AttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kvconnector.cache.specs.base import CacheLimits, KVCacheSpec, merge_specs
from kvconnector.cache.specs.config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    lay_out_tensors,
    max_num_blocks,
)
from kvconnector.cache.specs.state import MambaSpec
from kvconnector.cache.specs.uniform import UniformTypeKVCacheSpecs

__all__ = [
    "AttentionSpec",
    "CacheLimits",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "MambaSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "lay_out_tensors",
    "max_num_blocks",
    "merge_specs",
]
