"""How KV lies in memory: a view's addresses, a request's block ids, a rank's tokens, a backend's axes. Pure."""

from kvconnector.layout.backend import AttentionBackend as AttentionBackend
from kvconnector.layout.backend import CacheLayout as CacheLayout
from kvconnector.layout.backend import FlashAttentionBackend as FlashAttentionBackend
from kvconnector.layout.backend import current_attention_backend as current_attention_backend
from kvconnector.layout.backend import probe_layout as probe_layout
from kvconnector.layout.backend import required_cache_layout as required_cache_layout
from kvconnector.layout.group_blocks import GroupBlocks as GroupBlocks
from kvconnector.layout.stripes import ALL_TOKENS as ALL_TOKENS
from kvconnector.layout.stripes import NO_CONTEXT_PARALLEL as NO_CONTEXT_PARALLEL
from kvconnector.layout.stripes import ContextParallel as ContextParallel
from kvconnector.layout.stripes import Stripe as Stripe
from kvconnector.layout.stripes import common_stripes as common_stripes
from kvconnector.layout.stripes import is_held as is_held
from kvconnector.layout.stripes import local_stripe as local_stripe
from kvconnector.layout.stripes import own_stripe as own_stripe
from kvconnector.layout.views import PART_TABLE_COLUMNS as PART_TABLE_COLUMNS
from kvconnector.layout.views import KVView as KVView
from kvconnector.layout.views import check_block_ids as check_block_ids
from kvconnector.layout.views import memory_orders as memory_orders
from kvconnector.layout.views import part_table as part_table
from kvconnector.layout.watermark import ALL_LAYERS as ALL_LAYERS
from kvconnector.layout.watermark import NO_TOKENS as NO_TOKENS
from kvconnector.layout.watermark import Watermark as Watermark
