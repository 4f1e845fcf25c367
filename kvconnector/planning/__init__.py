"""From a request's token ranges to reads, one per producer rank, and to the chunks of each read."""

from kvconnector.layout import ALL_LAYERS as ALL_LAYERS
from kvconnector.layout import GroupBlocks as GroupBlocks
from kvconnector.planning.plan import CHUNK_DTYPE as CHUNK_DTYPE
from kvconnector.planning.plan import MAX_CHUNKS as MAX_CHUNKS
from kvconnector.planning.plan import MAX_TOKENS as MAX_TOKENS
from kvconnector.planning.plan import SourceRead as SourceRead
from kvconnector.planning.plan import plan_read as plan_read
from kvconnector.planning.plan import plan_reads as plan_reads
from kvconnector.planning.plan import plan_transfer as plan_transfer
from kvconnector.planning.retention import Keeps as Keeps
from kvconnector.planning.retention import KeepsAll as KeepsAll
from kvconnector.planning.retention import KeepsChunk as KeepsChunk
from kvconnector.planning.retention import KeepsEncoder as KeepsEncoder
from kvconnector.planning.retention import KeepsState as KeepsState
from kvconnector.planning.retention import KeepsWindow as KeepsWindow
from kvconnector.planning.retention import Retention as Retention
from kvconnector.planning.retention import from_whole_block as from_whole_block
from kvconnector.planning.retention import retention_named as retention_named
from kvconnector.planning.route import Route as Route
from kvconnector.planning.route import SegmentWindow as SegmentWindow
from kvconnector.planning.route import make_route as make_route
from kvconnector.planning.route import plan_routes as plan_routes
from kvconnector.topology import Segment as Segment
