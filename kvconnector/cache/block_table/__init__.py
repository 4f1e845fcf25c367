"""Block tables that the engine keeps on the host: one row of block ids per request slot."""

from kvconnector.cache.block_table.ids import BlockIds as BlockIds
from kvconnector.cache.block_table.multi_group import MultiGroupBlockTable as MultiGroupBlockTable
from kvconnector.cache.block_table.single import BlockTable as BlockTable
