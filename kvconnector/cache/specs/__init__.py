"""Cache specs: the data that each layer caches, its size, and the layers that share block ids and memory."""

from kvconnector.cache.specs.groups import KVCacheConfig as KVCacheConfig
from kvconnector.cache.specs.groups import KVCacheGroupSpec as KVCacheGroupSpec
from kvconnector.cache.specs.groups import KVCacheTensor as KVCacheTensor
from kvconnector.cache.specs.groups import UniformTypeKVCacheSpecs as UniformTypeKVCacheSpecs
from kvconnector.cache.specs.groups import plan_kv_cache as plan_kv_cache
from kvconnector.cache.specs.layers import AttentionSpec as AttentionSpec
from kvconnector.cache.specs.layers import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from kvconnector.cache.specs.layers import CrossAttentionSpec as CrossAttentionSpec
from kvconnector.cache.specs.layers import EncoderOnlyAttentionSpec as EncoderOnlyAttentionSpec
from kvconnector.cache.specs.layers import FullAttentionSpec as FullAttentionSpec
from kvconnector.cache.specs.layers import MambaSpec as MambaSpec
from kvconnector.cache.specs.layers import RingSpec as RingSpec
from kvconnector.cache.specs.layers import SlidingWindowSpec as SlidingWindowSpec
from kvconnector.cache.specs.spec import CacheLimits as CacheLimits
from kvconnector.cache.specs.spec import DType as DType
from kvconnector.cache.specs.spec import KVCacheSpec as KVCacheSpec
from kvconnector.cache.specs.spec import merge_specs as merge_specs
