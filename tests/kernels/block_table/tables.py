"""Small device block tables, and their rows and slots as lists."""

import torch

from kvconnector.cache.block_table import MultiGroupBlockTable
from kvconnector.cache.device_block_table import DeviceBlockTables
from kvconnector.cache.slot_mapping import PAD_SLOT_ID

CPU = {"device": "cpu"}
GPU = {"device": "cuda"}
MAX_REQS, MAX_TOKENS = 4, 24
SIZES = {
    "block_sizes": [4, 8],
    "kernel_block_sizes": [4, 2],
    "max_num_reqs": MAX_REQS,
    "max_model_len": 24,
    "max_num_batched_tokens": MAX_TOKENS,
}


def make_tables(place, **changes):
    return DeviceBlockTables(**(SIZES | place | changes))


def make_host_tables(**changes):
    """Make host tables, which device tables must equal."""
    return MultiGroupBlockTable(**(SIZES | CPU | changes))


def vector(tables, values, dtype):
    return torch.tensor(values, dtype=dtype, device=tables.device)


def gather(tables, requests):
    rows = tables.gather_block_tables(vector(tables, requests, torch.int32))
    return [table.tolist() for table in rows]


def slots(tables, starts, positions):
    """Return the tokens' slots. All slots after them must be padding."""
    mapped = tables.compute_slot_mappings(
        vector(tables, starts, torch.int32), vector(tables, positions, torch.int64)
    )
    assert (mapped[:, len(positions) :] == PAD_SLOT_ID).all()
    return mapped[:, : len(positions)].tolist()
