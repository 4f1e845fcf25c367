"""Block tables that the engine keeps on the GPU: staged writes, the batch's rows, its slots."""

from kvconnector.cache.device_block_table.staged_write import StagedWriteTensor as StagedWriteTensor
from kvconnector.cache.device_block_table.tables import DeviceBlockTables as DeviceBlockTables
from kvconnector.cache.device_block_table.uva import UvaBackedTensor as UvaBackedTensor
