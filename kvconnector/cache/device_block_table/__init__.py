"""Block tables that the engine keeps on the GPU: staged writes, the batch's rows, its slots."""

from kvconnector.cache.device_block_table.staged_write import StagedWriteTensor as StagedWriteTensor
from kvconnector.cache.device_block_table.staged_write import UvaBackedTensor as UvaBackedTensor
from kvconnector.cache.device_block_table.tables import DeviceBlockTables as DeviceBlockTables
