"""Who holds what, and who reads what from whom: `TpKVTopology`, the geometries it is made from, cache layouts. Pure."""

from kvconnector.topology.backend import FlashAttentionBackend as FlashAttentionBackend
from kvconnector.topology.backend import current_attention_backend as current_attention_backend
from kvconnector.topology.backend import probe_layout as probe_layout
from kvconnector.topology.backend import required_cache_layout as required_cache_layout
from kvconnector.topology.geometry import EngineGeometry as EngineGeometry
from kvconnector.topology.geometry import GroupGeometry as GroupGeometry
from kvconnector.topology.geometry import ModelDescription as ModelDescription
from kvconnector.topology.geometry import PartGeometry as PartGeometry
from kvconnector.topology.geometry import RankGeometry as RankGeometry
from kvconnector.topology.stripes import ALL_TOKENS as ALL_TOKENS
from kvconnector.topology.stripes import Stripe as Stripe
from kvconnector.topology.stripes import local_stripe as local_stripe
from kvconnector.topology.stripes import own_stripe as own_stripe
from kvconnector.topology.tp_kv import Segment as Segment
from kvconnector.topology.tp_kv import TpKVTopology as TpKVTopology
