"""Block tables that the engine keeps on the GPU: staged writes, the batch's rows, its slots."""

from kvconnector.cache.device_block_table.staged_write import StagedWriteTensor
from kvconnector.cache.device_block_table.tables import DeviceBlockTables
from kvconnector.cache.device_block_table.uva import UvaBackedTensor

__all__ = ["DeviceBlockTables", "StagedWriteTensor", "UvaBackedTensor"]
