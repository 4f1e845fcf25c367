"""Which rank of one engine reads what from which rank of another: `TpKVTopology`, and the geometries that it uses.
Pure.
"""

from kvconnector.layout import AttentionBackend as AttentionBackend
from kvconnector.layout import FlashAttentionBackend as FlashAttentionBackend
from kvconnector.layout import current_attention_backend as current_attention_backend
from kvconnector.layout import probe_layout as probe_layout
from kvconnector.layout import required_cache_layout as required_cache_layout
from kvconnector.topology.geometry import EngineGeometry as EngineGeometry
from kvconnector.topology.geometry import GroupGeometry as GroupGeometry
from kvconnector.topology.geometry import ModelDescription as ModelDescription
from kvconnector.topology.geometry import PartGeometry as PartGeometry
from kvconnector.topology.geometry import RankGeometry as RankGeometry
from kvconnector.topology.segments import Segment as Segment
from kvconnector.topology.tp_kv import TpKVTopology as TpKVTopology
