"""Block tables that the engine keeps on the host: one row of block ids per request slot."""

from kvconnector.cache.block_table.ids import BlockIds
from kvconnector.cache.block_table.multi_group import MultiGroupBlockTable
from kvconnector.cache.block_table.single import BlockTable

__all__ = ["BlockIds", "BlockTable", "MultiGroupBlockTable"]
