"""What each layer caches, how large it is, and which layers share block ids and memory."""

from kvconnector.cache.specs.attention import (
    AttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kvconnector.cache.specs.base import CacheLimits, KVCacheSpec, merge_specs
from kvconnector.cache.specs.state import MambaSpec
from kvconnector.cache.specs.uniform import KVCacheTensor, UniformTypeKVCacheSpecs

__all__ = [
    "AttentionSpec",
    "CacheLimits",
    "FullAttentionSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "MambaSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "merge_specs",
]
