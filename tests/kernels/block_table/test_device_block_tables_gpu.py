"""Device block tables on a GPU: graph capture and replay, and steps that run ahead of the GPU."""

import numpy as np
import pytest
import torch

from kvconnector.cache.slot_mapping import PAD_SLOT_ID
from kvconnector.errors import LocalProtocolError
from tests.kernels.block_table.tables import (
    GPU,
    MAX_REQS,
    MAX_TOKENS,
    gather,
    make_host_tables,
    make_tables,
    vector,
)


@pytest.mark.gpu
class TestGpu:
    def test_a_captured_graph_replays_with_new_blocks(self):
        tables = make_tables(GPU, max_model_len=240)
        host = make_host_tables(max_model_len=240)
        requests = vector(tables, [-1] * MAX_REQS, torch.int32)
        starts = vector(tables, [0] * (MAX_REQS + 1), torch.int32)
        positions = vector(tables, [0] * MAX_TOKENS, torch.int64)
        tables.gather_block_tables(requests)
        tables.compute_slot_mappings(starts, positions)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = tables.gather_block_tables(requests)
            mapped = tables.compute_slot_mappings(starts, positions)
        random = np.random.default_rng(0)
        for step in range(20):
            row = step % MAX_REQS
            ids = random.integers(0, 1000, (2, 3)).tolist()
            tables.append_block_ids(row, ids, overwrite=step % 3 == 0)
            (host.add_row if step % 3 == 0 else host.append_row)(ids, row)
            tables.apply_staged_writes()
            batch = [each for each in range(MAX_REQS) if host[0].num_blocks(each)]
            counts = random.integers(0, 5, len(batch))
            token_rows = np.repeat(batch, counts)
            token_positions = random.integers(0, 12, len(token_rows))
            bounds = np.concatenate([[0], np.cumsum(counts)])
            padded = np.pad(bounds, (0, MAX_REQS - len(batch)), mode="edge")
            starts.copy_(torch.from_numpy(padded))
            requests.copy_(torch.tensor(batch + [-1] * (MAX_REQS - len(batch))))
            positions.zero_()
            positions[: len(token_rows)] = torch.from_numpy(token_positions).cuda()
            graph.replay()
            expected = host.compute_slot_mapping(token_rows, token_positions)
            for group in range(2):
                kept = rows[group].tolist()
                assert kept[: len(batch)] == host[group].device_tensor()[batch].tolist()
                assert not np.any(kept[len(batch) :])
                padding = [PAD_SLOT_ID] * (MAX_TOKENS - len(token_rows))
                assert mapped[group].tolist() == expected[group].tolist() + padding

    def test_staged_writes_cannot_be_captured(self):
        tables = make_tables(GPU)
        requests = vector(tables, [0], torch.int32)
        tables.append_block_ids(0, [[1], [1]], overwrite=True)
        tables.apply_staged_writes()
        tables.gather_block_tables(requests)
        tables.append_block_ids(0, [[2], [2]], overwrite=False)
        torch.cuda.synchronize()

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                tables.gather_block_tables(requests)
                tables.apply_staged_writes()

        with pytest.raises(LocalProtocolError, match="CUDA graph"):
            capture()
        tables.apply_staged_writes()
        assert gather(tables, [0])[0] == [[1, 2, 0, 0, 0, 0]]

    def test_staged_ids_are_not_overwritten_before_they_are_read(self):
        """The host runs ahead of the GPU, and must not refill a staging buffer before it is read."""
        tables = make_tables(GPU)
        requests = vector(tables, [0], torch.int32)
        tables.gather_block_tables(requests)
        seen = []
        for step in range(30):
            torch.cuda._sleep(2_000_000)
            tables.append_block_ids(0, [[step], [step]], overwrite=True)
            tables.apply_staged_writes()
            seen.append([table[0, 0].clone() for table in tables.gather_block_tables(requests)])
        assert [[table.item() for table in step] for step in seen] == [
            [step, 4 * step] for step in range(30)
        ]
