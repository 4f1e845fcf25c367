"""What moves where: a request's token ranges become chunks, one read per producer rank."""

from kvconnector.layout import ALL_LAYERS as ALL_LAYERS
from kvconnector.layout import GroupBlocks as GroupBlocks
from kvconnector.planning.naive import naive_plan as naive_plan
from kvconnector.planning.naive import plan_items as plan_items
from kvconnector.planning.plan import CHUNK_DTYPE as CHUNK_DTYPE
from kvconnector.planning.plan import PeerPlan as PeerPlan
from kvconnector.planning.plan import SourceRead as SourceRead
from kvconnector.planning.plan import plan_peer as plan_peer
from kvconnector.planning.plan import plan_transfer as plan_transfer
from kvconnector.planning.retention import KeepsAll as KeepsAll
from kvconnector.planning.retention import KeepsChunk as KeepsChunk
from kvconnector.planning.retention import KeepsEncoder as KeepsEncoder
from kvconnector.planning.retention import KeepsState as KeepsState
from kvconnector.planning.retention import KeepsWindow as KeepsWindow
from kvconnector.planning.retention import Retention as Retention
from kvconnector.topology import Segment as Segment
