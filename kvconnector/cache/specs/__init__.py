"""What each layer caches, how large it is, and which layers share block ids and memory."""

from kvconnector.cache.specs.attention import AttentionSpec as AttentionSpec
from kvconnector.cache.specs.attention import FullAttentionSpec as FullAttentionSpec
from kvconnector.cache.specs.attention import MambaSpec as MambaSpec
from kvconnector.cache.specs.attention import SlidingWindowSpec as SlidingWindowSpec
from kvconnector.cache.specs.base import CacheLimits as CacheLimits
from kvconnector.cache.specs.base import KVCacheSpec as KVCacheSpec
from kvconnector.cache.specs.base import merge_specs as merge_specs
from kvconnector.cache.specs.uniform import KVCacheTensor as KVCacheTensor
from kvconnector.cache.specs.uniform import UniformTypeKVCacheSpecs as UniformTypeKVCacheSpecs
